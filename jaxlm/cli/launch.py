"""Start several processes of one run on this machine, and restart them after recoverable failures.

jaxlm launch --processes=2 -- train --config=FILE --workdir=DIR
"""

import signal
import sys
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import CPU_DEVICES, Parser, add_flag, extract
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError
from jaxlm.training.launch import ElasticJob, RestartPolicy


def add_arguments(parser: Parser) -> None:
    parser.withhold("the command after -- has the config")
    add_flag(parser, "--processes", "N", int, "number of processes", least=1, required=True)
    doc = "restarts after a lost process, a stall or a preemption"
    add_flag(parser, "--restarts", "N", 100, doc, least=0)
    add_flag(parser, *CPU_DEVICES)
    add_flag(parser, "--pause", "SECONDS", 1.0, "pause before the first restart", least=0)
    add_flag(parser, "--silence", "SECONDS", 120.0, "longest time without a heartbeat", least=1)
    parser.add_argument("command", nargs="*", metavar="WORD", help="command of each process")


def run(args: Any, out: Output) -> int:
    index = args.words.index("--") if "--" in args.words else len(args.words)
    words = args.words[index + 1 :]
    if words[:1] != ["train"]:
        what = "launch starts only training runs"
        why = f"{words[0]!r} follows --" if words else "nothing follows --"
        fix = "jaxlm train --help    # the command after --"
        raise CommandError(what, where="jaxlm launch", why=why, fix=fix)
    workdir = extract(words)[0].workdir
    devices = [] if args.cpu_devices is None else [f"--cpu_devices={args.cpu_devices}"]
    job = ElasticJob(
        [sys.executable, "-m", "jaxlm", *words, *devices],
        args.processes,
        workdir=Path(workdir) if workdir else None,
        policy=RestartPolicy(args.restarts, args.silence, args.pause),
        log=out.log,
    )
    before = {number: signal.signal(number, job.stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        failure = job.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    answer: dict[str, Any] = {"code": failure.code if failure else 0, "started": job.started}
    ending = "finished"
    if failure:
        answer |= {"rank": failure.rank, "cause": failure.cause}
        ending = f"rank {failure.rank} ended it with {failure.code}: {failure.cause}"
    starts = f" after {job.started} starts" if job.started > 1 else ""
    return out.result(answer, f"{ending}{starts}", answer["code"])
