"""Draw the plots and write the report of a run directory again.

jaxlm report --workdir=runs/a
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, needed_run
from jaxlm.cli.output import Output
from jaxlm.core.errors import InputMissing
from jaxlm.monitor import plots, report


def add_arguments(parser: Parser) -> None:
    parser.withhold("the report shows the files of the run")


def run(args: Any, out: Output) -> int:
    folder = Path(needed_run(args))
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        why = "`jaxlm train` writes them from its first logged step on"
        fix = "find . -name metrics.jsonl"
        raise InputMissing("the run has no metrics", where=str(metrics), why=why, fix=fix)
    drawn = [str(path) for path in plots.draw(folder)]
    written = report.write(folder)
    return out.result({"report": str(written), "plots": drawn}, f"wrote {written}")
