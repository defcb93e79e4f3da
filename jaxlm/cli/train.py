"""Train a model. A second start in the same run directory resumes the run.

jaxlm train --config=quickstart --workdir=runs/a                      a first run, in minutes
jaxlm train --workdir=runs/a                                          resumes it
jaxlm train --config=quickstart --config.data.train='texts/*.txt' --workdir=runs/b
jaxlm train --config=finetune/lora --init_from=MODEL --config.data.train=chat.jsonl --workdir=R

The settings that are changed most, as --config.NAME=VALUE, and their defaults:
  data.train         stdlib:train        globs of text, .jsonl, .parquet or token shards
  data.tokenizer     sentencepiece:4096  bytes, bpe:SIZE, ..., or the path of a tokenizer
  data.sequence      256                 tokens in a row
  model.width        512                 hidden size
  model.depth        8                   layers
  train.steps        1000                updates in the whole run
  train.batch        32                  rows of the global batch
  optim.lr           0.0003              peak learning rate
  eval.every         10%                 interval between evaluations
  precision.compute  float32             dtype of products and activations: bfloat16, float16
  mesh.fsdp          1                   devices that split rows and parameters
  seed               0                   seed of weights, data order, dropout and samples

--config.model=llama3-8b sets a published model. `jaxlm config show` lists all settings, `jaxlm
config explain NAME` describes one, and `jaxlm init` writes a config for text of your own.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import (
    CPU_DEVICES,
    Parser,
    add_flag,
    free_workdir,
    needed,
    needed_config,
    selection,
)
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import ANOTHER, CommandError, JaxlmError
from jaxlm.core.quoting import redacted
from jaxlm.parallel import cluster, rendezvous
from jaxlm.training.rundir import IMPORTED, split_ref


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--stop_at", "STEP", int, "step at which to save and exit with 0", least=1)
    doc = "run or imported model with the initial weights"
    add_flag(parser, "--init_from", "RUN[@STEP]", str, doc)
    doc = "settings that may differ from those of the run in --workdir"
    add_flag(parser, "--allow_change", "A.B,C", str, doc, default="")
    doc = "resume with the parameters only; optim and schedule may differ"
    parser.add_switch("--reset_optimizer", doc)
    doc = "convert stored arrays to the dtypes of this config; precision may differ"
    parser.add_switch("--cast", doc)
    parser.add_switch("--verbose", "the whole header on the screen; log.txt in DIR always has it")
    add_flag(parser, "--start_at", "STEP", int, "committed step to resume from", least=0)
    parser.add_switch("--force", "with --start_at: move later steps to quarantine/")
    add_flag(parser, *CPU_DEVICES)
    detected = "Slurm, Open MPI, JobSet and TPU pods are detected"
    doc = f"processes; `jaxlm launch` sets the flags, and {detected}"
    several = parser.add_argument_group(doc)
    add_flag(several, "--coordinator", "HOST:PORT", str, "address of rank 0 for the rendezvous")
    doc = "number of processes; 1 disables cluster detection"
    add_flag(several, "--num_processes", "N", int, doc, least=1)
    add_flag(several, "--process_id", "RANK", int, "rank of this process, from 0", least=0)


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.config import Run

    named = Path((args.config or "a").partition(":")[0]).stem
    workdir = Path(needed(args, "workdir", fix=free_workdir(named)))
    saved = workdir / "config.json"  # of the run, which continues
    if args.config is None and not saved.is_file() and args.init_from:
        saved = _config_of(args)
    is_saved = args.config is None and saved.is_file()
    file = str(saved) if is_saved else needed_config(args, Run)
    process = cluster.process_spec(
        os.environ, coordinator=args.coordinator, count=args.num_processes, rank=args.process_id
    )
    with rendezvous.report_failure_to_peers(process):
        loaded = config.load(Run, file, args.overrides)
        _refuse_secrets(args.words)

    from jaxlm.recipes.train.api import ResumeOptions, train

    flags = selection(args, "init_from", "stop_at", "cpu_devices", "quiet", "verbose")
    allowed = tuple(name for name in args.allow_change.split(",") if name)
    resume = selection(args, "start_at", "force", "reset_optimizer", "cast")
    try:
        result = train(
            loaded,
            workdir=workdir,
            arguments=args.words,
            resume=ResumeOptions(allow_change=allowed, **resume),
            process=process,
            **flags,
        )
    except JaxlmError as error:
        if is_saved and saved.parent == workdir:
            error.fix = _with_config(error.fix, workdir)
        raise
    metrics = result.metrics
    nats = metrics.get("loss_nats")
    loss = "" if nats is None else f", {nats:.4f} nats"
    if "reward" in metrics:
        loss = f", reward {metrics['reward']:.4f}"
    state = "complete" if result.complete else "stopped"
    state = f"already {state}" if result.metrics.get("already") else state
    wrong = result.metrics.get("divergence")
    verdict = f", {wrong['outcome']}" if wrong else ""
    known = {"step": result.step, "complete": result.complete, "workdir": str(result.workdir)}
    text = f"{workdir}: {state} at step {result.step}{loss}{verdict}"
    return out.result(known | result.metrics, text)


def _with_config(fix: str, workdir: Path) -> str:
    """Return a fix whose lines that begin another run take the config of the run that resumes."""
    flag = f"--config={shlex.quote(str(workdir))}"
    lines = fix.splitlines()
    return "\n".join(f"{flag} {line}" if ANOTHER in line else line for line in lines)


def _config_of(args: Any) -> Path:
    """Return the config of the run of --init_from, which a new run without --config takes.

    Raises CommandError if that run was imported, and so has no data, and no flag names the data.
    """
    run, _ = split_ref(args.init_from)
    saved = run / "config.json"
    is_run = saved.is_file() and (run / "checkpoints").is_dir()
    has_data = "data.train" in dict(args.overrides)
    if is_run and (run / IMPORTED).is_file() and not has_data:
        raise CommandError(
            "the text to train on is not named",
            where=f"--init_from={args.init_from}",
            why="an imported model has no data, and the command has no --config",
            fix="--config.data.train='texts/*.txt'",
        )
    return saved if is_run else Path(args.workdir) / "config.json"


def _refuse_secrets(words: list[str]) -> None:
    """Refuse secrets in flags: command.sh stores every word. Loading has checked the settings."""
    for word in words:
        if not word.startswith("--config.") and redacted(word) != word:
            what = "the command line contains a password or a key"
            why = "command.sh in the run directory would store it, and `ps` shows it to others"
            fix = "name a file that holds it\nname an environment variable that holds it"
            raise CommandError(what, where=word, why=why, fix=fix)
