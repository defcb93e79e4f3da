"""Average the parameters of checkpoints, of one run or of several runs, into a new run.

jaxlm average --workdir=runs/a --newest=5 --out=runs/a-mean
jaxlm average --workdir=runs/a --with=runs/b --out=runs/soup    of two runs
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import SAVED_CONFIG, Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError


def add_arguments(parser: Parser) -> None:
    parser.withhold(SAVED_CONFIG)
    add_flag(parser, "--out", "DIR", str, "new run directory", required=True)
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--steps", default="", metavar="A,B,C", help="committed steps of the run")
    steps.add_argument("--newest", type=int, default=0, metavar="N", help="the N newest steps")
    doc = "checkpoint of another run of the same model; repeatable"
    add_flag(parser, "--with", "RUN[@STEP]", [], doc, dest="others")
    add_flag(parser, "--proportions", "X,Y,Z", str, "weights of the mean (equal)", default="")
    add_flag(parser, "--accumulate", ["float32", "float64"], "float64", "dtype of the sums")


def run(args: Any, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    from jaxlm.recipes.use.average import AverageOptions, average

    options = AverageOptions(
        workdir=workdir,
        out=target,
        steps=_numbers("steps", args.steps, int),
        others=tuple(args.others),
        proportions=_numbers("proportions", args.proportions, float),
        **selection(args, "newest", "accumulate"),
    )
    answer = average(options, out.log)
    parts = [f"{row['share']:.3f} of step {row['step']} of {row['run']}" for row in answer["of"]]
    return out.result(answer, [f"{target}: {answer['parameters']:,} parameters", *parts])


def _numbers(flag: str, text: str, kind: type) -> tuple:
    try:
        return tuple(kind(each) for each in text.split(",") if each.strip())
    except ValueError:
        what, fix = f"--{flag} takes numbers separated by commas", "jaxlm average --help"
        why = f"one of them is not {'a whole number' if kind is int else 'a number'}"
        raise CommandError(what, where=f"--{flag}={text}", why=why, fix=fix) from None
