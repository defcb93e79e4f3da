"""Draw the plots and write the report of a run directory again."""

import argparse
from pathlib import Path

from jaxlm.cli.arguments import needed_run, withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import InputMissing
from jaxlm.monitor import plots, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(parser, "the report shows the files of the run")


def run(args: argparse.Namespace, out: Output) -> int:
    folder = Path(needed_run(args))
    if not (folder / "metrics.jsonl").exists():
        raise InputMissing(
            "the run has no metrics",
            where=str(folder / "metrics.jsonl"),
            why="`jaxlm train` writes them from its first logged step on",
            fix="find . -name metrics.jsonl",
        )
    drawn = plots.draw(folder)
    written = report.write(folder)
    out.result({"report": str(written), "plots": [str(path) for path in drawn]}, f"wrote {written}")
    return 0
