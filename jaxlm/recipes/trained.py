"""A trained run, opened to be used."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core import config
from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.data import tokenizer as tokenizers
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import assembly, attention, devices
from jaxlm.recipes.assembly import Assembly
from jaxlm.recipes.config import Run
from jaxlm.train.rundir import read_json


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's model with the parameters of one step, replicated over this machine's devices or split as its mesh says."""

    run: Run
    step: int
    model: Assembly
    params: Any
    tokenizer: Tokenizer


def open_run(
    workdir: Path,
    *,
    step: int | None = None,
    best: bool = False,
    sequence: int | None = None,
    cpu_devices: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Trained:
    """Opens the newest step of a run, the best one, or the one named; to be used on rows of `sequence` tokens, or its own.

    Attention is computed as suits these devices and rows, where the kernel that it was trained with cannot; that is said.

    Raises:
      InputMissing: where there is no run or no such step.
      DataError: where the step is damaged.
    """
    run = config.from_json(
        Run, read_json(workdir, "config.json"), where=str(workdir / "config.json")
    )
    encoder = tokenizers.read(workdir / "tokenizer")
    devices.start(cpu_devices)
    store = Store(workdir / "checkpoints", CheckpointConfig(), read_only=True)
    chosen = choose(store, step, best, say)
    mesh = devices.build_mesh(run.mesh if _fits(run.mesh) else MeshConfig())
    vocab = assembly.vocabulary(run, encoder.size)
    model = assembly.assemble(_suited(run, vocab, mesh, sequence, say), vocab, mesh)
    params = store.restore_part(chosen, "params", assembly.placed(model))
    return Trained(run, chosen, model, params, encoder)


def choose(store: Store, step: int | None, best: bool, say: Callable[[str], None]) -> int:
    """The step that was asked for, whole; without a number or `best`, the newest that is."""
    named = step if step is not None else store.best() if best else None
    chosen = store.newest_sound(say) if named is None else named
    committed = store.steps()
    if chosen is None or chosen not in committed:
        raise InputMissing(
            "there is no checkpoint yet"
            if chosen is None
            else f"there is no checkpoint of step {chosen}",
            where=str(store.directory),
            why=f"committed steps: {', '.join(map(str, committed)) or 'none'}",
            fix=f"--step={committed[-1]}"
            if committed
            else f"jaxlm train --config=... --workdir={store.directory.parent}",
        )
    if named is not None and (wrong := store.problems(named)):
        raise DataError(
            f"checkpoint {named} is damaged",
            where=str(store.directory / str(named)),
            why="\n".join(wrong[:4]),
            fix="name another with --step=, or none for the newest that is sound",
        )
    return chosen


def _suited(
    run: Run, vocab: int, mesh: Mesh, sequence: int | None, say: Callable[[str], None]
) -> Run:
    """The run on rows of another length, by kernels that can compute its attention here."""
    data = dataclasses.replace(run.data, sequence=sequence or run.data.sequence)
    run = dataclasses.replace(run, data=data)
    decoder = run.decoder(vocab)
    free = dataclasses.replace(run, train=dataclasses.replace(run.train, attention="auto"))
    target = devices.target(mesh)
    try:
        attention.check(run, decoder, mesh.shape, target)
    except ConfigError as error:
        say(f"{error.what} here: {attention.told(free, decoder, mesh.shape, target)}")
        return free
    return run


def _fits(mesh: MeshConfig) -> bool:
    """Whether the run's mesh can be laid out here; a run trained on a pod is looked at on a laptop too."""
    try:
        mesh.sizes(jax.device_count())
    except ConfigError:
        return False
    return True
