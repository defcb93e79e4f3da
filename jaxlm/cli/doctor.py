"""Looks at this machine: versions, devices, memory, disks, and whether the devices compute what they should.

Each finding that is not ok comes with its fix. Exit code 1 where something keeps a run from working, or from using what the
machine has.
"""

import argparse
import dataclasses
from pathlib import Path

from jaxlm.cli.arguments import withhold
from jaxlm.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Where runs will be written is --workdir, which every verb knows.
    withhold(parser, "--config", "--config.a.b", why="it looks at the machine, not at a config")


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.diagnose.doctor import examine

    found = list(examine(Path(args.workdir or "."), out.say))
    problems = sum(finding.verdict == "problem" for finding in found)
    answer = {"ok": not problems, "findings": [dataclasses.asdict(finding) for finding in found]}
    ending = f"{problems} problem{'s' if problems > 1 else ''}" if problems else "ok"
    out.result(answer, "\n".join([*map(str, found), ending]))
    return 1 if problems else 0
