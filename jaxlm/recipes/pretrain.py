"""Training, from a config to a run directory: the story in the order you would tell it."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax

from jaxlm.checkpoint.store import Store
from jaxlm.core import config
from jaxlm.core.config import Loaded
from jaxlm.core.errors import ConfigError
from jaxlm.data import prepare
from jaxlm.data.prepare import Data
from jaxlm.monitor import environment
from jaxlm.monitor.console import Console
from jaxlm.parallel import host
from jaxlm.recipes import assembly, devices, resume, telling
from jaxlm.recipes.config import Run
from jaxlm.recipes.session import Session
from jaxlm.train.rundir import RunDir, read_json
from jaxlm.train.signals import StopRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says beside the config."""

    workdir: Path
    arguments: list[str]  # the words after `jaxlm`, for command.sh
    stop_at: int | None = None
    allow_change: tuple[str, ...] = ()
    cpu_devices: int | None = None
    quiet: bool = False


def pretrain(loaded: Loaded, options: Options) -> dict[str, Any]:
    """Trains, or goes on training, in a run directory; returns the last evaluation and where things are.

    Raises:
      JaxlmError: for whatever a user can cause, before anything is compiled where it can be known.
    """
    run: Run = loaded.value
    # What costs nothing to find out comes first: a wrong setting must not cost a minute.
    prepare.find(run.data)
    with RunDir(options.workdir) as directory, contextlib.ExitStack() as stack:
        devices.start(options.cpu_devices)
        store = Store(directory.checkpoints, run.checkpoint)
        stack.callback(store.release)
        meta = _latest_meta(store, directory)
        start = meta["step"] if meta else 0
        directory.step = start
        changes = []
        if meta:
            changes = resume.check(
                config.from_json(Run, meta["config"]), run, options.allow_change, start
            )
            if start >= run.train.steps or (meta["finished"] and not changes):
                return {
                    "step": start,
                    "complete": True,
                    "workdir": str(options.workdir),
                    **(meta["evaluation"] or {}),
                }
        mesh = devices.build_mesh(run.mesh)
        host.check_rows(mesh, run.train.batch, run.train.microbatches)
        assembly.check_fit(run, mesh)
        directory.begin()

        log = stack.enter_context(open(directory.path / "log.txt", "a", encoding="utf-8"))
        screen = None if options.quiet or "console" not in run.log.sinks else sys.stderr
        console = stack.enter_context(Console(screen, log=log, total=run.train.steps))
        data = prepare.open_data(run.data, seed=run.seed, say=console.say)
        if meta:
            resume.check_data(meta["data"], data.fingerprint, options.allow_change)
        model = assembly.assemble(run, assembly.vocabulary(run, data.tokenizer.size), mesh)
        _check_vocabulary(run, data)
        _describe(directory, loaded, options, data)
        stop = stack.enter_context(StopRequest())
        with jax.set_mesh(mesh):
            session = Session(run, directory, console, store, data, model, start, meta, stack)
            telling.header(session, changes)
            session.train(stop, options.stop_at)
        return telling.finish(session)


def _latest_meta(store: Store, directory: RunDir) -> dict[str, Any] | None:
    """The JSON of the newest committed step; None in a new directory."""
    committed = store.steps()
    return store.meta(committed[-1]) if committed else None


def _check_vocabulary(run: Run, data: Data) -> None:
    if run.model.vocab != "auto" and run.model.vocab < data.tokenizer.size:
        raise ConfigError(
            f"the tokenizer has {data.tokenizer.size} ids and the model only {run.model.vocab}",
            where="model.vocab",
            why=f"id {data.tokenizer.size - 1} would be past the embedding's last row",
            fix="--config.model.vocab=auto",
        )


def _describe(directory: RunDir, loaded: Loaded, options: Options, data: Data) -> None:
    """Writes what the run was started with. A config that replaces another leaves the old one beside it, by its step."""
    path = directory.path / "config.json"
    wanted = config.to_json(loaded.value)
    if path.exists() and (before := read_json(directory.path, "config.json")) != wanted:
        directory.write_json(f"config.{directory.step}.json", before)
    directory.write_json("config.json", wanted)
    directory.write_json(
        "provenance.json", {name: str(origin) for name, origin in loaded.provenance.items()}
    )
    directory.write_json("environment.json", environment.facts())
    directory.write_command(options.arguments)
    directory.write_bytes("tokenizer", data.tokenizer.serialise())
