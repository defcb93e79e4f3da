"""Averages the parameters of several checkpoints, of one run or of several alike, into a run of their own."""

import argparse
from pathlib import Path

from jaxlm.cli.arguments import needed_run, withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(
        parser, "--config", "--config.a.b", why="it goes by the config that the run was saved with"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the run to make")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", default="", metavar="A,B,C", help="committed steps of the run")
    which.add_argument("--newest", type=int, default=0, metavar="N", help="its N newest")
    parser.add_argument(
        "--with",
        dest="others",
        action="append",
        default=[],
        metavar="RUN[@STEP]",
        help="a checkpoint of another run of the same model; may be given again",
    )
    parser.add_argument(
        "--proportions", default="", metavar="X,Y,Z", help="of the mean; equal ones unless named"
    )
    parser.add_argument(
        "--accumulate",
        choices=["float32", "float64"],
        default="float64",
        help="the dtype in which they are added (float64)",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    workdir, place = Path(needed_run(args)), Path(args.out)
    steps = _numbers("steps", args.steps, int)
    proportions = _numbers("proportions", args.proportions, float)

    from jaxlm.recipes.use.average import Options, average

    answer = average(
        Options(
            workdir=workdir,
            out=place,
            steps=steps,
            newest=args.newest,
            others=tuple(args.others),
            proportions=proportions,
            accumulate=args.accumulate,
        ),
        out.say,
    )
    lines = [
        f"{each['share']:.3f} of step {each['step']} of {each['run']}" for each in answer["of"]
    ]
    out.result(answer, "\n".join([f"{place}: {answer['parameters']:,} parameters", *lines]))
    return 0


def _numbers(flag: str, text: str, kind: type) -> tuple:
    try:
        return tuple(kind(each) for each in text.split(",") if each.strip())
    except ValueError:
        raise CommandError(
            "numbers with commas between them are needed",
            where=f"--{flag}={text}",
            why=f"one of them is not {'a whole number' if kind is int else 'a number'}",
            fix="jaxlm average --help",
        ) from None
