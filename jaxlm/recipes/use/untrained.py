"""Models of published sizes with fresh random parameters: for their shapes and costs, untrained."""

import math
import warnings
from pathlib import Path

import jax

from jaxlm.core import config, random
from jaxlm.core.errors import OutOfMemory
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.families.union import (
    BY_PARAMETERS,
    SIZES,
    EncoderDecoderFamily,
    EncoderFamily,
)
from jaxlm.monitor import formatting
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import oom
from jaxlm.recipes.use.load import LoadedRun

SEQUENCE = 256  # tokens in a row


class Untrained(UserWarning):
    """Warning about a model whose parameters are random."""


def size_named(text: str) -> str | None:
    """Return the published size of a name; hyphens equal underscores. None if there is none."""
    names = {name.replace("_", "-"): name for name in SIZES} | BY_PARAMETERS
    return names.get(text.replace("_", "-").lower())


def fresh_run(name: str, seed: int = 0, cpu_devices: int | None = None) -> LoadedRun:
    """Return a published size with the random parameters that a run with this seed begins with.

    The tokenizer is `bytes`: a size has no tokenizer. Warns that the model is untrained. Raises
    OutOfMemory if the parameters do not fit the memory of a device.
    """
    family = SIZES[name]
    objective = "span" if isinstance(family, EncoderDecoderFamily) else "causal"
    objective = "masked" if isinstance(family, EncoderFamily) else objective
    settings = {
        "model": name,
        "objective.name": objective,
        "seed": seed,
        "data.tokenizer": "bytes",
        "data.sequence": min(SEQUENCE, family.max_positions),
    }
    run: Run = config.load(
        Run, None, [(path, str(value)) for path, value in settings.items()]
    ).value
    setup.start(cpu_devices)
    mesh = meshes.build(run.mesh)
    tokenizer = Bytes()
    model = setup.build_sharded_model(run, setup.vocabulary(run, tokenizer.size), mesh)
    leaves = jax.tree.leaves(model.blueprint.shapes)
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    limit = oom.memory_limit(run)
    if limit is not None and needed > limit:
        raise OutOfMemory(
            f"the parameters of {name} do not fit the memory",
            where=f"load({name!r})",
            why=f"they are {formatting.size(needed)}, and a device has {formatting.size(limit)}",
            fix=f"jaxlm plan --config={name}    # shows which machines suffice",
        )
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    text = f"{name} is untrained: its {count:,} parameters are random, of the seed {seed}"
    warnings.warn(text, Untrained, stacklevel=3)

    def init() -> object:
        return model.blueprint.init(random.key(seed, "init"))

    with jax.set_mesh(mesh):
        params = jax.jit(init, out_shardings=model.shardings)()
    return LoadedRun(Path(name), run, 0, model, params, tokenizer, is_trained=False)
