"""Load the model of a trained run."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError, DataError, InputMissing
from jaxlm.data import tokenizer_file
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.optim.average_config import NoAverage
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels
from jaxlm.training.rundir import read_json

Weights = Literal["raw", "ema", "swa"]


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run's model with the parameters of one step, replicated or split by the run's mesh."""

    run: Run
    step: int
    model: setup.ShardedModel
    params: Any
    tokenizer: Tokenizer


def load_run(
    workdir: Path,
    *,
    step: int | None = None,
    best: bool = False,
    weights: Weights = "raw",
    sequence: int | None = None,
    cpu_devices: int | None = None,
    say: Log = lambda _: None,
) -> LoadedRun:
    """Load the newest step of a run, the best one, or the named one.

    If the kernel of the training cannot compute attention on these devices and rows, another is
    chosen and logged. Raises InputMissing without the run or the step, DataError if the step is
    damaged, and CommandError if the run stores no such average.

    Args:
      workdir: the run.
      step: the step to load; None for the newest.
      best: load the best step instead.
      weights: the parameters or the stored average of them, in the dtypes of the parameters.
      sequence: length of the rows; None for the run's own.
      cpu_devices: number of devices to split the CPU into.
      `say`: receives log lines.
    """
    run = config.from_json(Run, read_json(workdir, "config.json"), f"{workdir}/config.json")
    encoder = tokenizer_file.read(workdir / "tokenizer")
    if weights not in ("raw", run.average.name):
        what = f"the run stores no {weights} average of its parameters"
        fix = f"--weights={'raw' if isinstance(run.average, NoAverage) else run.average.name}"
        why = f"its average.name is {run.average.name}"
        raise CommandError(what, where=f"--weights={weights}", why=why, fix=fix)
    setup.start(cpu_devices)
    verifier = Verifier(say=say)
    store = Store(workdir / "checkpoints", CheckpointConfig(), read_only=True, verifier=verifier)
    chosen = select_step(store, step, best, say)
    mesh_config = run.mesh
    try:
        mesh_config.sizes(jax.device_count())
    except ConfigError:  # runs of a pod are inspected on laptops too
        mesh_config = MeshConfig()
    mesh = meshes.build(mesh_config)
    vocab = setup.vocabulary(run, encoder.size)
    adapted = _adapted_to_mesh(run, vocab, mesh, sequence, say)
    model = setup.build_sharded_model(adapted, vocab, mesh)
    abstract = setup.abstract_params(model)
    if weights == "raw":
        params = store.restore_part(chosen, "params", abstract)
    else:
        shape = jax.ShapeDtypeStruct
        layout = jax.tree.map(lambda a: shape(a.shape, jnp.float32, sharding=a.sharding), abstract)
        average = store.restore_part(chosen, "average", layout)
        params = jax.tree.map(lambda a, leaf: a.astype(leaf.dtype), average, abstract)
    return LoadedRun(run, chosen, model, params, encoder)


def select_step(store: Store, step: int | None, best: bool, say: Log) -> int:
    """Return the requested step if it is undamaged; by default the newest undamaged one."""

    def damaged(step: int, lines: list[str]) -> None:
        say(f"checkpoint {step} is damaged ({lines[0]})")

    named = step if step is not None else store.best() if best else None
    chosen = committed_step(store, store.latest_valid(damaged) if named is None else named)
    if named is not None:
        check_undamaged(store, named)
    return chosen


def committed_step(store: Store, step: int | None) -> int:
    """Return the step. Raises InputMissing if it is None or not committed."""
    committed = store.steps()
    if step is not None and step in committed:
        return step
    what = f"the run has no checkpoint {'yet' if step is None else f'of step {step}'}"
    why = f"committed steps: {', '.join(map(str, committed)) or 'none'}"
    fix = f"jaxlm train --workdir={shlex.quote(str(store.directory.parent))}"
    fix = f"--step={committed[-1]}" if committed else fix
    raise InputMissing(what, where=str(store.directory), why=why, fix=fix)


def check_undamaged(store: Store, step: int) -> None:
    """Raise DataError if a file of the step is damaged."""
    if problems := store.problems(step):
        raise DataError(
            f"checkpoint {step} is damaged",
            where=str(store.directory / str(step)),
            why="\n".join(problems[:4]),
            fix=f"jaxlm checkpoint list --workdir={shlex.quote(str(store.directory.parent))}",
        )


def _adapted_to_mesh(run: Run, vocab: int, mesh: Mesh, sequence: int | None, say: Log) -> Run:
    """Return the run on rows of another length, with kernels that compute its attention here."""
    run = run.at(run.pace.phases[-1])  # warm-ups are over
    data = dataclasses.replace(run.data, sequence=sequence or run.data.sequence)
    run = dataclasses.replace(run, data=data)
    decoder = run.decoder(vocab)
    free = dataclasses.replace(run, train=dataclasses.replace(run.train, attention="auto"))
    target = setup.target(mesh)
    try:
        attention_kernels.check(run, decoder, mesh.shape, target)
    except ConfigError as error:
        chosen = attention_kernels.describe_kernels(free, decoder, mesh.shape, target)
        say(f"{error.what} here: {chosen}")
        return free
    return run
