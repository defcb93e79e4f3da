"""Trains a model. The same run directory goes on where it stopped."""

import argparse
import os
from pathlib import Path

from jaxlm.cli.arguments import needed, needed_config
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.core.quoting import redacted
from jaxlm.parallel import cluster, rendezvous


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop_at", type=int, metavar="STEP", help="save after this step and exit 0"
    )
    parser.add_argument(
        "--init_from",
        metavar="RUN[@STEP]",
        help="begin with the weights of another run, or of an imported model",
    )
    parser.add_argument(
        "--allow_change",
        default="",
        metavar="A.B,C",
        help="settings that may differ from those of the run in --workdir",
    )
    parser.add_argument(
        "--reset_optimizer",
        action="store_true",
        help="go on with the parameters alone; optim and schedule may differ",
    )
    parser.add_argument(
        "--cast",
        action="store_true",
        help="take stored arrays over into the dtypes of this config; precision may differ",
    )
    parser.add_argument(
        "--start_at", type=int, metavar="STEP", help="go on from this committed step"
    )
    parser.add_argument(
        "--force", action="store_true", help="with --start_at: later steps go to quarantine/"
    )
    parser.add_argument(
        "--cpu_devices", type=int, metavar="N", help="split the CPU into N devices, to try a mesh"
    )
    several = parser.add_argument_group(
        "one process of several; `jaxlm launch` gives these, and Slurm, Open MPI, JobSet and TPU pods are detected"
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where they meet: at rank 0")
    several.add_argument(
        "--num_processes", type=int, metavar="N", help="how many they are; 1 asks no cluster"
    )
    several.add_argument("--process_id", type=int, metavar="RANK", help="which this is, from 0")


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.config import Run

    workdir = Path(needed(args, "workdir"))
    file = _config(args, workdir, Run)
    place = cluster.process_spec(
        os.environ, coordinator=args.coordinator, count=args.num_processes, rank=args.process_id
    )
    with rendezvous.report_failure_to_peers(place):
        loaded = config.load(Run, file, args.overrides)
        _refuse_secrets(args.words)

    from jaxlm.recipes.train.api import train
    from jaxlm.recipes.train.context import ResumeOptions

    result = train(
        loaded,
        workdir=workdir,
        arguments=args.words,
        init_from=args.init_from,
        stop_at=args.stop_at,
        resume=ResumeOptions(
            start_at=args.start_at,
            force=args.force,
            reset_optimizer=args.reset_optimizer,
            cast=args.cast,
            allow_change=tuple(name for name in args.allow_change.split(",") if name),
        ),
        cpu_devices=args.cpu_devices,
        process=place,
        quiet=args.quiet,
    )
    loss = f", {result.metrics['loss_nats']:.4f} nats" if "loss_nats" in result.metrics else ""
    state = "complete" if result.complete else "stopped"
    state = f"already {state}" if result.metrics.get("already") else state
    wrong = result.metrics.get("divergence")
    verdict = f", {wrong['outcome']}" if wrong else ""
    known = {"step": result.step, "complete": result.complete, "workdir": str(result.workdir)}
    out.result(known | result.metrics, f"{workdir}: {state} at step {result.step}{loss}{verdict}")
    return 0


def _config(args: argparse.Namespace, workdir: Path, schema: type) -> str:
    """Return --config; without it, the config of the run in `workdir`, which continues."""
    own = workdir / "config.json"
    return str(own) if args.config is None and own.is_file() else needed_config(args, schema)


def _refuse_secrets(words: list[str]) -> None:
    """command.sh keeps every word. Settings were looked at when the config was loaded."""
    for word in words:
        if not word.startswith("--config.") and redacted(word) != word:
            raise CommandError(
                "the command line holds a password or a key",
                where=word,
                why="command.sh in the run directory would keep it, and `ps` shows it to others",
                fix="name a file that holds it\nname an environment variable that holds it",
            )
