"""Starts several processes of one run on this machine, and starts them again where that helps.

jaxlm launch --processes=2 -- train --config=FILE --workdir=DIR
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import extract, withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError
from jaxlm.training.launch import ElasticJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(
        parser,
        "--config",
        "--config.a.b",
        why="what follows -- is what is trained, and has the config",
    )
    parser.add_argument(
        "--processes", type=int, required=True, metavar="N", help="how many processes"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=100,
        metavar="N",
        help="how often to start again after a loss, a stall or a preemption (default 100)",
    )
    parser.add_argument(
        "--cpu_devices", type=int, metavar="N", help="split the CPU of each process into N devices"
    )
    parser.add_argument(
        "--pause", type=float, default=1.0, metavar="SECONDS", help="before the first restart"
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long a process may give no sign of life (default 120)",
    )
    parser.add_argument("command", nargs="*", metavar="WORD", help="what each process runs")


def run(args: argparse.Namespace, out: Output) -> int:
    at = args.words.index("--") if "--" in args.words else len(args.words)
    words = args.words[at + 1 :]
    if words[:1] != ["train"]:
        raise CommandError(
            "launch starts a training run",
            where="jaxlm launch",
            why="nothing follows --" if not words else f"{words[0]!r} follows --",
            fix="jaxlm train --help    # what may follow --",
        )
    if args.processes < 1:
        raise CommandError(
            f"--processes={args.processes} starts nothing",
            where="jaxlm launch",
            why="it is at least 1",
            fix="jaxlm launch --help",
        )
    workdir = extract(words)[0].workdir
    devices = [] if args.cpu_devices is None else [f"--cpu_devices={args.cpu_devices}"]
    job = ElasticJob(
        [sys.executable, "-m", "jaxlm", *words, *devices],
        args.processes,
        workdir=Path(workdir) if workdir else None,
        restarts=args.restarts,
        say=out.say,
        silence_seconds=args.silence,
        pause_seconds=args.pause,
    )
    before = {number: signal.signal(number, job.stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        failure = job.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    answer: dict[str, Any] = {"code": failure.code if failure else 0, "started": job.started}
    if failure:
        answer |= {"rank": failure.rank, "cause": failure.cause}
    times = f" after {job.started} starts" if job.started > 1 else ""
    ending = (
        f"rank {failure.rank} ended it with {failure.code}: {failure.cause}"
        if failure
        else "finished"
    )
    out.result(answer, f"{ending}{times}")
    return failure.code if failure else 0
