"""Arrays of an engine: bytes by ZeRO stage, one state and never two, offloaded optimizer state."""

import gc
import math

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.data.batch import Tokens
from jaxlm.data.dataset import Data
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.families.deepseek import DeepSeekV3
from jaxlm.models.families.llama import Llama
from jaxlm.optim.config import AdamW
from jaxlm.parallel import host, mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.programs import TrainPrograms, without_data
from jaxlm.training.config import TrainConfig

MODEL = Llama(vocab=512, width=32, depth=2, heads=4, kv_heads=4, hidden=64)
OFFLOAD = {"offload": ("optimizer",), "remat": "offload:layer_in,attention_out"}


def engine_of(sizes, model=MODEL, **train):
    run = Run(
        model=model,
        train=TrainConfig(batch=8, steps=10, **train),
        mesh=MeshConfig(**{"data": 1} | sizes),
    )
    count = math.prod(size for axis, size in sizes.items() if axis != "zero")
    grid = mesh.build(run.mesh, jax.devices()[:count])
    return TrainPrograms(
        run, Data(Bytes(), None, {}, {}), setup.build_sharded_model(run, MODEL.vocab, grid)
    )


def batch_of(engine):
    ids = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    ones = np.ones_like(ids)
    batch = Tokens(ids, ids + 1, ones.astype(np.float32), ones, ids % 16)
    return host.put(engine.model.mesh, batch)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("rate", [0.02, 0.0])
def test_a_bias_on_the_choice_of_experts_moves_by_its_rate_and_nothing_else(rate):
    """And stays where it is without one."""
    model = DeepSeekV3(
        vocab=512,
        width=32,
        depth=2,
        heads=2,
        kv_rank=16,
        nope_dim=8,
        rope_dim=8,
        value_dim=8,
        experts=4,
        top_k=2,
        groups=2,
        top_groups=1,
        hidden=16,
        shared=16,
        dense_hidden=32,
        balance_bias=rate,
    )
    engine = engine_of({}, model)
    with jax.set_mesh(engine.model.mesh):
        state, _ = engine.step(engine.init_state(), batch_of(engine))
    moved = np.abs(state.params["stack"]["0"]["mlp"]["bias"])
    assert set(moved.ravel()) <= {np.float32(0), np.float32(rate)}
    assert moved.max() == np.float32(rate)


def held(values):
    """Bytes on the first device."""
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(values) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


@pytest.mark.slow
def test_the_bytes_that_the_header_shows_are_those_of_the_live_arrays():
    """Gradients exist inside of a step alone: a program that ends with them shows their layout.

    tests/training/test_zero.py reads the layout in the step.
    """
    figures = {}
    for zero in (1, 2, 3):
        engine = engine_of({"fsdp": 4, "zero": zero})
        figures[zero] = engine.bytes_per_device()
        state = engine.init_state()
        assert figures[zero]["parameters"] == held(state.params)
        assert figures[zero]["optimizer"] == held(state.opt_state)
        with jax.set_mesh(engine.model.mesh):
            assert figures[zero]["gradients"] == held(engine.gradient(state, batch_of(engine)))
    whole = tree.size_bytes(engine.model.blueprint.shapes)
    shares = {
        name: [figures[zero][name] / whole for zero in (1, 2, 3)]
        for name in ("parameters", "gradients", "optimizer")
    }
    assert shares["parameters"] == [1, 1, 1 / 4]
    assert shares["gradients"] == [1, 1 / 4, 1 / 4]
    assert shares["optimizer"] == pytest.approx([2 / 4] * 3, rel=1e-3), "moments, and counts"


def living():
    """Buffers on the devices and their bytes, each once."""
    gc.collect()
    shards = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.data.nbytes
    }
    return len(shards), sum(shards.values())


@pytest.mark.parametrize(
    ("devices", "train"),
    [
        pytest.param(1, {}, id="one device"),
        pytest.param(2, OFFLOAD, id="moments on the host", marks=pytest.mark.slow),
        pytest.param(4, {}, id="four devices", marks=pytest.mark.slow),
    ],
)
def test_a_step_writes_over_its_state_and_leaves_it_where_it_was(devices, train):
    engine = engine_of({"fsdp": devices}, **train)
    gc.freeze()  # collections look at new objects alone: arrays of earlier tests stay as they are
    try:
        with jax.set_mesh(engine.model.mesh):
            batch = batch_of(engine)
            before = living()
            state = engine.init_state()
            one = tuple(np.subtract(living(), before))
            first = tree.leaves(state)
            for _ in range(2):
                state, metrics = engine.step(state, batch)
                jax.block_until_ready(metrics)
                del metrics
                now = tuple(np.subtract(living(), before))
    finally:
        gc.unfreeze()
    assert all(leaf.is_deleted() for leaf in first.values())
    assert now == one == (len(first) * devices, held(state) * devices)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim}
    assert ("pinned_host" in kinds) == bool(train)
    assert len(kinds) == 1
    assert not any(
        leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state.params)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("names", "on_host", "on_devices"),
    [("mlp_out", 0, 1), ("layer_in,attention_out", 2, 0)],
)
def test_activations_that_are_kept_on_the_host_are_on_no_device(names, on_host, on_devices):
    """The residuals of the loop over layers: the stream of each layer, and saved activations."""
    engine = engine_of({"fsdp": 2}, remat=f"offload:{names}")
    with jax.set_mesh(engine.model.mesh):
        text = str(engine.step.trace(engine.abstract(), batch_of(engine)).jaxpr)
    (handed_on,) = (
        line for line in text.splitlines() if "[2,8,16,32]" in line and "= scan[" in line
    )
    assert handed_on.count(":f32<host>[2,8,16,32]") == on_host
    assert handed_on.count(":f32[2,8,16,32]") == on_devices
    assert text.count("devices=(MemorySpace.Host,)") == on_host
    assert (text.count("devices=(MemorySpace.Device,)") > 0) == (on_host > 0)


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_the_guard_knows_if_the_gradient_is_clipped(clip_norm):
    run = Run(model=MODEL, optim=AdamW(clip_norm=clip_norm), mesh=MeshConfig(data=1))
    grid = mesh.build(run.mesh, jax.devices()[:1])
    spec = without_data(run, grid, MODEL.vocab).spec
    assert spec.is_clipped == (clip_norm is not None)
    assert not spec.is_sampled
