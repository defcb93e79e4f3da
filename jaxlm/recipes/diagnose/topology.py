"""A training step compiled for devices that are not there: TPU slices by name, from a host without any."""

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
from jaxlm.parallel import hlo_collectives, host, mesh
from jaxlm.parallel.config import shown
from jaxlm.recipes import jax_setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.plan import divisibility
from jaxlm.recipes.plan.predict import decoder_tokens
from jaxlm.recipes.train import programs
from jaxlm.recipes.train.programs import without_data

Say = Callable[[str], None]


def compile_step(run: Run, grid: Mesh) -> jax.stages.Compiled:
    """The update of a run, compiled for the devices of a mesh from shapes alone."""
    # Its random key is a number, and no chip of the mesh may be there to hold it.
    engine = without_data(run, grid, vocabulary(run))
    (platform,) = {device.platform for device in grid.devices.flat}
    with backend.of(platform), jax.set_mesh(grid):
        return engine.step.lower(engine.abstract(), abstract_batch(run, grid)).compile()


def abstract_batch(run: Run, grid: Mesh) -> Tokens:
    """Return the shapes and layout of the batches that a run trains on, with the fields that its objective has."""
    place = host.batch_sharding(grid)

    def slots(length: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((run.train.batch, length), dtype, sharding=place)

    read, wrote = run.data.sequence, decoder_tokens(run) or run.data.sequence
    fields: Any = dict.fromkeys(Tokens._fields, slots(wrote))
    fields |= dict.fromkeys(("weights", "predicts_ahead"), slots(wrote, jnp.float32))
    batch = Tokens(**fields | dict.fromkeys(("source", "source_segments"), slots(read)))
    if not run.objective.bidirectional:
        batch = batch._replace(visible_until=None)
    if run.architecture != "encoder-decoder":
        batch = batch._replace(source=None, source_segments=None)
    if run.objective.block_positions is None:
        batch = batch._replace(block_positions=None)
    if not run.objective.marks_mtp_rows:
        batch = batch._replace(predicts_ahead=None)
    return batch


def vocabulary(run: Run) -> int:
    """Rows of the embedding, for a size that a tokenizer has yet to settle those of a small one."""
    return 4096 if run.model.vocab == "auto" else run.model.vocab


def compile_for(run: Run, name: str, say: Say = lambda _: None) -> dict[str, Any]:
    """Compiles a run's step for a TPU slice such as v5e-16: bytes on a chip, and what the chips send each other.

    Raises:
      CommandError: where there is no such slice, or no compiler for it on this machine.
      ConfigError: where the run does not fit it.
    """
    known = chips.tpu_slice(name, flag="--topology")
    divisibility.check(run, known.devices)
    grid = mesh.build(run.mesh, devices_of(known))
    say(f"{shown(grid.shape)} on {name}, {known.devices} chips; compiling for them takes minutes")
    compiled = compile_step(run, grid)
    memory = programs.compiled_memory(compiled)
    # A real run's sizes have no mark to tell activations by: nothing is judged here.
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
    """Compiles a run's step for this machine's CPU, split into so many devices: bytes on one of them.

    Raises:
      ConfigError: where the run does not fit them.
    """
    jax_setup.start(count)
    divisibility.check(run, count)
    grid = mesh.build(run.mesh, jax.devices()[:count])
    say(f"{shown(grid.shape)} on this CPU; compiling the step")
    return {"devices": count, "bytes_per_device": programs.compiled_memory(compile_step(run, grid))}


def devices_of(known: Machine) -> list[jax.Device]:
    """The chips of a slice, to compile for and not to compute with.

    Raises:
      CommandError: where the TPU compiler is not installed.
    """
    # The library would ask the cloud's metadata server who it is, and write logs.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    jax.config.update("jax_platforms", "cpu")
    assert known.topology
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=known.topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise CommandError(
            "there is no compiler for TPUs here",
            where=f"--topology, {known.topology}",
            why=str(error).partition("\n")[0][:200],
            fix="wait for the other process of this machine that compiles for TPUs"
            if "lockfile" in str(error)
            else "pip install 'jaxlm[tpu]'    # in an environment of its own",
        ) from error
    return list(found.devices)
