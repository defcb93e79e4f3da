"""Check this machine: versions, devices, memory, disks, and the results of the devices.

jaxlm doctor
jaxlm doctor --workdir=runs/a    and the disk of a run

Each finding that is not ok comes with its fix. Exit code 1 if a problem keeps a run from working,
or from using the hardware.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser
from jaxlm.cli.output import Output


def add_arguments(parser: Parser) -> None:
    # The disk that runs are written to is that of --workdir, a flag of every verb.
    parser.withhold("doctor checks the machine, not a config")


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.diagnose.doctor import examine

    findings = list(examine(Path(args.workdir or "."), out.log))
    problems = sum(finding.verdict == "problem" for finding in findings)
    answer = {"ok": not problems, "findings": [dataclasses.asdict(each) for each in findings]}
    ending = f"{problems} problem{'s' if problems > 1 else ''}" if problems else "ok"
    return out.result(answer, [*map(str, findings), ending], 1 if problems else 0)
