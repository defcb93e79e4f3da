"""Average the parameters of checkpoints, of one run or of several runs, into a new run."""

import argparse
from pathlib import Path

from jaxlm.cli.arguments import SAVED_CONFIG, add_flag, needed_run, selection, withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(parser, SAVED_CONFIG)
    add_flag(parser, "--out", "DIR", str, "new run directory", required=True)
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--steps", default="", metavar="A,B,C", help="committed steps of the run")
    steps.add_argument("--newest", type=int, default=0, metavar="N", help="the N newest steps")
    doc = "checkpoint of another run of the same model; repeatable"
    add_flag(parser, "--with", "RUN[@STEP]", [], doc, dest="others")
    add_flag(parser, "--proportions", "X,Y,Z", str, "weights of the mean (equal)", default="")
    add_flag(parser, "--accumulate", ["float32", "float64"], "float64", "dtype of the sums")


def run(args: argparse.Namespace, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    from jaxlm.recipes.use.average import Options, average

    options = Options(
        workdir=workdir,
        out=target,
        steps=_numbers("steps", args.steps, int),
        others=tuple(args.others),
        proportions=_numbers("proportions", args.proportions, float),
        **selection(args, "newest", "accumulate"),
    )
    answer = average(options, out.log)
    lines = [
        f"{each['share']:.3f} of step {each['step']} of {each['run']}" for each in answer["of"]
    ]
    out.result(answer, "\n".join([f"{target}: {answer['parameters']:,} parameters", *lines]))
    return 0


def _numbers(flag: str, text: str, kind: type) -> tuple:
    try:
        return tuple(kind(each) for each in text.split(",") if each.strip())
    except ValueError:
        raise CommandError(
            f"--{flag} takes numbers separated by commas",
            where=f"--{flag}={text}",
            why=f"one of them is not {'a whole number' if kind is int else 'a number'}",
            fix="jaxlm average --help",
        ) from None
