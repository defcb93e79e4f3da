"""Train a model. A second start in the same run directory resumes the run."""

import argparse
import os
from pathlib import Path

from jaxlm.cli.arguments import CPU_DEVICES, add_flag, add_switch, needed, needed_config
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.core.quoting import redacted
from jaxlm.parallel import cluster, rendezvous


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--stop_at", "STEP", int, "step at which to save and exit with 0")
    doc = "run or imported model with the initial weights"
    add_flag(parser, "--init_from", "RUN[@STEP]", str, doc)
    doc = "settings that may differ from those of the run in --workdir"
    add_flag(parser, "--allow_change", "A.B,C", str, doc, default="")
    doc = "resume with the parameters only; optim and schedule may differ"
    add_switch(parser, "--reset_optimizer", doc)
    doc = "convert stored arrays to the dtypes of this config; precision may differ"
    add_switch(parser, "--cast", doc)
    add_flag(parser, "--start_at", "STEP", int, "committed step to resume from")
    add_switch(parser, "--force", "with --start_at: move later steps to quarantine/")
    add_flag(parser, *CPU_DEVICES)
    several = parser.add_argument_group(
        "multi-process runs; `jaxlm launch` sets these flags, and Slurm, Open MPI, JobSet and TPU "
        "pods are detected"
    )
    add_flag(several, "--coordinator", "HOST:PORT", str, "address of rank 0 for the rendezvous")
    doc = "number of processes; 1 disables cluster detection"
    add_flag(several, "--num_processes", "N", int, doc)
    add_flag(several, "--process_id", "RANK", int, "rank of this process, from 0")


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.config import Run

    workdir = Path(needed(args, "workdir"))
    file = _config(args, workdir, Run)
    process = cluster.process_spec(
        os.environ, coordinator=args.coordinator, count=args.num_processes, rank=args.process_id
    )
    with rendezvous.report_failure_to_peers(process):
        loaded = config.load(Run, file, args.overrides)
        _refuse_secrets(args.words)

    from jaxlm.recipes.train.api import ResumeOptions, train

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
        process=process,
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
    """Return --config, or the config of the run in `workdir`, which continues."""
    saved = workdir / "config.json"
    is_saved = args.config is None and saved.is_file()
    return str(saved) if is_saved else needed_config(args, schema)


def _refuse_secrets(words: list[str]) -> None:
    """Refuse secrets in flags: command.sh stores every word. Loading has checked the settings."""
    for word in words:
        if not word.startswith("--config.") and redacted(word) != word:
            raise CommandError(
                "the command line contains a password or a key",
                where=word,
                why="command.sh in the run directory would store it, and `ps` shows it to others",
                fix="name a file that holds it\nname an environment variable that holds it",
            )
