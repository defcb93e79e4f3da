"""Store a run's next-token distributions on training data, to train students on them.

jaxlm teach --workdir=runs/teacher --config=my_config.py --out=taught

The folder has the likeliest next ids of each token, their log-probabilities, and that of all other
ids together. `jaxlm train` with `objective.name=distill` and `objective.stored` reads them instead
of running the teacher. Name the config of the student: its data is read, in its rows, at the
temperature of its objective. The same command continues an interrupted pass.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import CPU_DEVICES, Parser, add_flag, needed, needed_run, selection
from jaxlm.cli.output import Output
from jaxlm.core import config


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--out", "DIR", str, "folder of the distributions", required=True)
    doc = "next ids of each token (64, or 32 of more than 65,536 ids: at most 300 bytes)"
    add_flag(parser, "--top", "K", int, doc)
    add_flag(parser, "--step", "STEP", int, "committed step of the teacher (newest)")
    add_flag(parser, *CPU_DEVICES)


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.config import Run

    workdir = Path(needed_run(args))
    flag = shlex.quote(f"--config={workdir}")  # a student of the teacher's size and data
    loaded = config.load(Run, needed(args, "config", fix=flag), args.overrides)

    from jaxlm.monitor import formatting
    from jaxlm.recipes.use.teach import TeachOptions, teach

    options = TeachOptions(
        workdir=workdir, out=Path(args.out), **selection(args, "step", "top", "cpu_devices")
    )
    answer = teach(loaded.value, options, out.log)
    size = formatting.size(answer["bytes"])
    settings = {path: text for path, text in args.overrides if not path.startswith("objective.")}
    settings |= {
        "objective.name": "distill",
        "objective.stored": answer["out"],
        "objective.temperature": f"{answer['temperature']:g}",
    }
    flags = [f"--config.{path}={text}" for path, text in settings.items()]
    lines = [
        f"{answer['out']}: the {answer['top']} likeliest ids behind {answer['tokens']:,} tokens, "
        f"{size}, {answer['bytes_per_token']} bytes a token",
        f"next  jaxlm train --config={shlex.quote(args.config)} {shlex.join(flags)} "
        "--workdir=runs/student",
    ]
    return out.result(answer, lines)
