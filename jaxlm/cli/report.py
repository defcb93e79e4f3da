"""`jaxlm report`: draws the plots and writes the report of a run directory again."""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import needed_run, withhold
from jaxlm.core.errors import InputMissing
from jaxlm.monitor import plots, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--workdir` is common to all verbs, so there are none of its own."""
    withhold(parser, "--config", "--config.a.b", why="it draws what the run has written")


def run(args: argparse.Namespace, out: Any) -> int:
    """Writes plots/*.png and report.html from the files of the run.

    Raises:
      InputMissing: where the directory holds no metrics.
    """
    folder = Path(needed_run(args))
    if not (folder / "metrics.jsonl").exists():
        raise InputMissing(
            "there are no metrics to report",
            where=str(folder / "metrics.jsonl"),
            why="`jaxlm train` writes them from its first logged step on",
            fix="find . -name metrics.jsonl",
        )
    drawn = plots.draw(folder)
    written = report.write(folder)
    out.result({"report": str(written), "plots": [str(path) for path in drawn]}, f"wrote {written}")
    return 0
