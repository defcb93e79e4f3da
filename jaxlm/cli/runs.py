"""List the runs in a folder and below it: state, steps, best loss, speed and time.

jaxlm runs            the runs below the current directory
jaxlm runs runs/lr    those of another folder
"""

import time
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser
from jaxlm.cli.output import Output, columns
from jaxlm.monitor import formatting

HEAD = ("run", "status", "step", "best nats", "tokens/s", "when")


def add_arguments(parser: Parser) -> None:
    parser.withhold("the list shows runs with the configs that they were saved with")
    doc = "folder of runs (--workdir, else the current directory)"
    parser.add_argument("folder", nargs="?", metavar="DIR", help=doc)


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.compare import summary

    folder = args.folder or args.workdir or "."
    runs = summary.find(Path(folder))
    answer = {"runs": [each.record() for each in runs]}
    if not runs:
        return out.result(answer, f"{folder}: no runs")
    rows = [HEAD, *map(row, runs)]
    notes = [f"{each.path}: {each.cause}" for each in runs if each.cause]
    return out.result(answer, [*columns(rows, "<<>>><"), *notes])


def row(each: Any) -> tuple[str, ...]:
    """Return the cells of a run; the status of a failed one has its exit code."""
    known = "-" if each.step is None else f"{each.step}"
    steps = known if each.steps is None else f"{known}/{each.steps}"
    status = f"failed ({each.code})" if each.status == "failed" else each.status
    best, speed = formatting.number(each.best, 5), formatting.count(each.tokens_per_second)
    if each.is_rewarded and each.best is not None:
        best = f"reward {formatting.number(0.0 - each.best, 5)}"
    when = "-"
    if each.time_unix:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time_unix))
    return (str(each.path), status, steps, best, speed, when)
