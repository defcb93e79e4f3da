"""Training step compiled for devices that are absent, such as TPU slices by name."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxlm.core import backend
from jaxlm.core.errors import CommandError
from jaxlm.data.batch import Tokens
from jaxlm.monitor import chips
from jaxlm.monitor.chips import Machine
from jaxlm.objectives.config import has_ahead, has_inner
from jaxlm.parallel import hlo_collectives, host, mesh
from jaxlm.parallel.config import shown
from jaxlm.recipes import jax_setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.plan import divisibility
from jaxlm.recipes.plan.predict import decoder_tokens
from jaxlm.recipes.train import trainer
from jaxlm.recipes.train.programs import without_data

Say = Callable[[str], None]


def compile_step(run: Run, grid: Mesh) -> jax.stages.Compiled:
    """Compile the update of a run for the devices of a mesh, from shapes alone."""
    # The random key is a number: the chips of the mesh may be absent.
    engine = without_data(run, grid, vocabulary(run))
    (platform,) = {device.platform for device in grid.devices.flat}
    with backend.of(platform), jax.set_mesh(grid):
        return engine.step.lower(engine.abstract(), abstract_batch(run, grid)).compile()


def abstract_batch(run: Run, grid: Mesh) -> Tokens:
    """Return shapes and sharding of a run's batches, with the fields that its objective has."""
    sharding = host.batch_sharding(grid)

    def slots(length: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((run.train.batch, length), dtype, sharding=sharding)

    read, wrote = run.data.sequence, decoder_tokens(run) or run.data.sequence
    fields: Any = dict.fromkeys(Tokens._fields, slots(wrote))
    fields |= dict.fromkeys(("weights", "predicts_ahead"), slots(wrote, jnp.float32))
    batch = Tokens(**fields | dict.fromkeys(("source", "source_segments"), slots(read)))
    if not run.objective.both_ways:
        batch = batch._replace(visible_until=None)
    if not run.is_paired:
        batch = batch._replace(source=None, source_segments=None)
    if not has_inner(run.objective):
        batch = batch._replace(block_positions=None)
    if not has_ahead(run.objective):
        batch = batch._replace(predicts_ahead=None)
    return batch


def vocabulary(run: Run) -> int:
    """Return the rows of the embedding; 4096 if the tokenizer is not trained yet."""
    return 4096 if run.model.vocab == "auto" else run.model.vocab


def compile_for(run: Run, name: str, say: Say = lambda _: None) -> dict[str, Any]:
    """Compile a run's step for a TPU slice such as v5e-16: bytes per chip, and collectives.

    Raises:
      CommandError: if the slice or its compiler does not exist here.
      ConfigError: if the run does not fit.
    """
    known = chips.tpu_slice(name, flag="--topology")
    divisibility.check(run, known.devices)
    grid = mesh.build(run.mesh, devices_of(known))
    say(f"{shown(grid.shape)} on {name}, {known.devices} chips; compiling for them takes minutes")
    compiled = compile_step(run, grid)
    memory = trainer.compiled_memory(compiled)
    # The sizes of a real run have no mark that identifies activations: no judgment here.
    lines = collectives.table(hlo_collectives.read(compiled.as_text() or ""), dict(grid.shape))
    return {
        "topology": known.topology,
        "devices": known.devices,
        "mesh": dict(grid.shape),
        "bytes_per_device": memory,
        "hbm_bytes": known.chip.memory_bytes,
        "fits": memory["total"] <= known.chip.memory_bytes,
        "collectives": [line.record() for line in lines],
    }


def compile_here(run: Run, count: int, say: Say = lambda _: None) -> dict[str, Any]:
    """Compile a run's step for this machine's CPU, split into `count` devices: bytes per device.

    Raises:
      ConfigError: if the run does not fit.
    """
    jax_setup.start(count)
    divisibility.check(run, count)
    grid = mesh.build(run.mesh, jax.devices()[:count])
    say(f"{shown(grid.shape)} on this CPU; compiling the step")
    return {"devices": count, "bytes_per_device": trainer.compiled_memory(compile_step(run, grid))}


def devices_of(known: Machine) -> list[jax.Device]:
    """Return the chips of a slice, as targets of the compiler.

    Raises:
      CommandError: if the TPU compiler is not installed.
    """
    # Without these, libtpu queries the cloud's metadata server and writes logs.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    jax.config.update("jax_platforms", "cpu")
    assert known.topology
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=known.topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise CommandError(
            "the compiler for TPUs does not start here",
            where=f"--topology, {known.topology}",
            why=str(error).partition("\n")[0][:200],
            fix="wait for the other process of this machine that compiles for TPUs"
            if "lockfile" in str(error)
            else "pip install 'jaxlm[tpu]'    # in an environment of its own",
        ) from error
    return list(topology.devices)
