"""Each shipped config fits on each hardware that it names, and its step can be traced."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxlm.core import backend, config, tree
from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.models.cost import model_cost
from jaxlm.models.families.experts import Experts
from jaxlm.monitor.chips import machine
from jaxlm.parallel import host, logical, rules
from jaxlm.parallel.config import AXES
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from jaxlm.recipes.train import programs

CONFIGS = Path(__file__).parents[2] / "configs"
# number of JAX devices, and bytes of each; v5p is named by its cores: two make a device
DEVICES = {
    "1gpu": (1, 80e9),
    "8gpu": (8, 80e9),
    "64gpu": (64, 80e9),
    "512gpu": (512, 80e9),
    "v5e-16": (16, 16e9),
    "v5p-128": (64, 95e9),
    "v6e-256": (256, 32e9),
}


# Of the sizes and the hardware that are asked for, those that are left out: the state does not fit.
WANTED = ("1gpu", "8gpu", "v5e-16", "v5p-128", "v6e-256")
TOO_SMALL = {
    ("llama_8b", "1gpu"): ("take 128 GB; 1gpu has 80 GB, and activations", "8gpu"),
    ("llama_70b", "1gpu"): ("take 1,129 GB; 1gpu has 80 GB, and activations", "512gpu"),
    ("llama_70b", "8gpu"): ("take 1,129 GB; 8gpu has 640 GB, and activations", "512gpu"),
    ("llama_70b", "v5e-16"): ("take 1,129 GB; v5e-16 has 275 GB, and activations", "v5p-128"),
    ("mixtral_8x7b", "1gpu"): ("take 747 GB; 1gpu has 80 GB, and activations", "64gpu"),
    ("mixtral_8x7b", "8gpu"): ("take 747 GB; 8gpu has 640 GB, and activations", "64gpu"),
    ("mixtral_8x7b", "v5e-16"): ("take 747 GB; v5e-16 has 275 GB, and activations", "v5p-128"),
    ("moe_fine", "1gpu"): ("take 262 GB; 1gpu has 80 GB, and activations", "8gpu"),
    ("moe_fine", "v5e-16"): ("take 262 GB; v5e-16 has 275 GB, and activations", "v5p-128"),
}


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


NAMED = {path.stem: tuple(getattr(module(path), "HARDWARE", ())) for path in CONFIGS.glob("*.py")}
PAIRS = [(name, hardware) for name in sorted(NAMED) for hardware in NAMED[name]]


def load(name, hardware):
    return config.load(Run, f"{CONFIGS / name}.py:{hardware}").value


@pytest.mark.parametrize(("name", "hardware"), PAIRS)
def test_a_part_of_the_loss_has_thousands_of_tokens_of_each_device(name, hardware):
    """Each part gathers the output matrix, and sums its gradient, where devices split it."""
    run = load(name, hardware)
    ways = logical.ways(run.mesh.sizes(DEVICES[hardware][0]), "batch")
    tokens = run.train.batch * run.data.sequence // run.train.microbatches
    assert run.loss.chunk >= min(4096, tokens // ways)


def assembled(run, hardware):
    """The model on a mesh of the hardware's size, without a device."""
    sizes = run.mesh.sizes(DEVICES[hardware][0])
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=types)
    return setup.build_sharded_model(run, run.model.vocab, mesh)


def test_each_config_names_the_hardware_that_it_is_for():
    assert {name: set(named) for name, named in NAMED.items() if named} == {
        "gpt2_124m": {"1gpu", "8gpu", "v5e-16", "v5p-128", "v6e-256"},
        "gpt2_1p5b": {"1gpu", "8gpu", "v5e-16", "v5p-128", "v6e-256"},
        "llama_1b": {"1gpu", "8gpu", "v5e-16", "v5p-128", "v6e-256"},
        "llama_8b": {"8gpu", "64gpu", "v5e-16", "v5p-128", "v6e-256"},
        "llama_70b": {"512gpu", "v5p-128", "v6e-256"},
        "mixtral_8x7b": {"64gpu", "v5p-128", "v6e-256"},
        "moe_fine": {"8gpu", "v5p-128", "v6e-256"},
    }
    real = [name for name, named in NAMED.items() if named]
    assert TOO_SMALL.keys() == {
        (name, each) for name in real for each in WANTED if each not in NAMED[name]
    }


@pytest.mark.parametrize(("name", "hardware"), PAIRS)
def test_every_dimension_divides_and_the_state_fits(name, hardware):
    run = load(name, hardware)
    devices, limit = DEVICES[hardware]
    model = assembled(run, hardware)
    host.check_rows(model.mesh, run.train.batch, run.train.microbatches)
    held = sum(
        math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, place in zip(
            jax.tree.leaves(model.blueprint.shapes), jax.tree.leaves(model.shardings), strict=True
        )
    )
    # Weights, gradients and two moments; gathered layers, activations and logits need the rest.
    assert 4 * held < 0.7 * limit
    assert f"    {hardware} " in (CONFIGS / f"{name}.py").read_text().split('"""')[1]
    rows = run.train.batch // run.train.microbatches // rules.split(model.mesh, "batch")
    assert 1 <= rows <= 16
    assert tree.size_bytes(model.blueprint.shapes) == 4 * model_cost.parameters(run.model.build())
    assert held * devices >= tree.size_bytes(model.blueprint.shapes)


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "hardware"), PAIRS)
def test_the_plan_of_a_layout_fits_and_multiplies_no_row_with_the_weights_of_other_experts(
    name, hardware
):
    on = f"h100x{hardware.removesuffix('gpu')}" if "gpu" in hardware else hardware
    run = load(name, hardware)
    forecast = predict.forecast(run, machine(on, flag="--on"))
    assert forecast.fits
    assert not any("model.capacity" in risk for risk in forecast.risks)
    capacity = getattr(run.model, "capacity", None)
    assert capacity == (1.25 if "gpu" in hardware and isinstance(run.model, Experts) else None)


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        pytest.param(*pair, marks=() if pair == ("llama_8b", "v5e-16") else pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_the_step_and_its_layout_can_be_traced(name, hardware):
    """Traced for the hardware: activations there are in bfloat16, on a CPU in float32."""
    run = load(name, hardware)
    model = assembled(run, hardware)
    vocab = np.ones(run.model.vocab, np.int32)
    data = SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=vocab, lead=""))
    with (
        backend.compiling_for("gpu" if "gpu" in hardware else "tpu"),
        jax.sharding.use_abstract_mesh(model.mesh),
        mock.patch.object(programs.host, "host_rows"),
        mock.patch.object(programs, "Replicas"),
    ):
        built = programs.TrainPrograms(run, data, model)
        state = built.abstract()
        shape = (run.train.batch, run.data.sequence)
        place = host.batch_sharding(model.mesh)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
        weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        needed = [field for field in Tokens._fields if field not in Tokens._field_defaults]
        batch = Tokens(*(weights if field == "weights" else ids for field in needed))
        after, metrics = jax.eval_shape(built.step, state, batch)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert all(leaf.dtype for leaf in jax.tree.leaves(metrics))


@pytest.mark.parametrize(
    ("name", "hardware", "why", "nearest"),
    [
        *((*pair, *reason) for pair, reason in TOO_SMALL.items()),
        ("llama_8b", "16gpu", "has 1,280 GB: it fits, with --config.mesh settings", "8gpu"),
        ("llama_8b", "v6e_256", "is a number of GPUs", "v6e-256"),
    ],
)
def test_hardware_that_a_config_is_not_for_is_refused_with_why_and_the_nearest(
    name, hardware, why, nearest
):
    with pytest.raises(ConfigError) as caught:
        load(name, hardware)
    assert why in caught.value.why
    assert f"the file has layouts for {', '.join(NAMED[name])}" in caught.value.why
    assert caught.value.fix.splitlines()[0].endswith(f"configs/{name}.py:{nearest}")
    assert nearest in NAMED[name]
