"""The call of cuDNN equals float64 in another implementation, and a GPU program has it."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.ops import kernels, masks
from jaxlm.ops.attention import attention
from jaxlm.ops.cudnn import cudnn
from jaxlm.parallel import mesh, rules
from jaxlm.parallel.config import MeshConfig
from tests.ops.float64 import SCALE, exact, operands, reach_of, segments_of

LOW = Precision.of(PrecisionConfig(compute="bfloat16"))


def graded(mask, compute, implementation, arrays):
    """The result and its gradients by queries, keys and values."""

    def weighed(query, key, value, weights):
        out = cudnn(query, key, value, mask, compute, scale=SCALE, implementation=implementation)
        return (out * weights).sum(), out

    return jax.value_and_grad(weighed, argnums=(0, 1, 2), has_aux=True)(*arrays)


def computed(mask, compute, arrays):
    """Result of the call by XLA's implementation."""
    (_, out), grads = jax.jit(functools.partial(graded, mask, compute, "xla"))(arrays)
    return out, *grads


@pytest.mark.few(2)
@pytest.mark.parametrize("length", [16, 25])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 99])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_arguments_of_the_call_mean_the_same_in_float64(
    length, heads, kv_heads, window, is_packed
):
    segments = segments_of(length) if is_packed else None
    arrays = operands(length, heads, kv_heads)
    expected = exact(*arrays, causal=True, window=window, softcap=None, segments=segments)
    mask = dataclasses.replace(masks.causal(length, segments), window=window)
    got = computed(mask, jnp.float32, [jnp.asarray(x, jnp.float32) for x in arrays])
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(one).max()))


@pytest.mark.few(1)
@pytest.mark.parametrize("reach", [None, reach_of(16)], ids=["all", "reach"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("is_packed", [False, True])
def test_queries_may_see_what_comes_after_them(window, is_packed, reach):
    segments = segments_of(16) if is_packed else None
    arrays = operands(16, 2, 1)
    terms = dict(causal=reach is not None, window=window)
    expected = exact(*arrays, **terms, softcap=None, segments=segments, reach=reach)
    mask = dataclasses.replace(masks.causal(16, segments, reach), **terms)
    got = computed(mask, jnp.float32, [jnp.asarray(x, jnp.float32) for x in arrays])
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * np.abs(one).max())


@pytest.mark.slow
def test_operands_are_in_the_compute_dtype():
    arrays = operands(24, 4, 2)
    expected = exact(*arrays, causal=True, window=None, softcap=None, segments=segments_of(24))
    mask = masks.causal(24, segments_of(24))
    got = computed(mask, LOW.compute, [jnp.asarray(x, jnp.float32) for x in arrays])
    for exactly, low in zip(expected, got, strict=True):
        assert low.dtype == jnp.float32
        error = np.abs(np.asarray(low) - exactly).max() / np.abs(exactly).max()
        assert 1e-5 < error < 2e-2


@pytest.mark.few(1)
@pytest.mark.parametrize("reach", [None, reach_of(16)], ids=["all", "reach"])
def test_a_few_rows_at_a_time_give_what_all_rows_give(monkeypatch, reach):
    segments = np.tile(segments_of(16), (3, 1))
    arrays = [jnp.asarray(np.tile(x, (3, 1, 1, 1)), jnp.float32) for x in operands(16, 2, 1)]
    rows = len(arrays[0])
    reach = None if reach is None else np.tile(reach, (3, 1))
    mask = masks.causal(16, jnp.asarray(segments), reach)
    whole = computed(mask, jnp.float32, arrays)
    for most in (1, 2, 3):
        monkeypatch.setattr(kernels, "MASK_BYTES", most * 4 * 16**2)
        assert kernels.rows_at_a_time(rows, 16, 4) == max(n for n in (1, 2, 3) if n <= most)
        for one, other in zip(whole, computed(mask, jnp.float32, arrays), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_few_rows_at_a_time_keep_no_mask_and_call_the_kernel_once_each_way(monkeypatch):
    """8 rows, 2 at a time: no array has the size of a mask of all rows, and no slot runs twice."""
    monkeypatch.setattr(kernels, "MASK_BYTES", 2 * 2 * 256**2)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
    shapes = [jax.ShapeDtypeStruct((8, 256, 2, 64), jnp.bfloat16)] * 3
    segments = jax.ShapeDtypeStruct((8, 256), jnp.int32)

    def loss(query, key, value, segments):
        mask = masks.causal(256, segments)
        with backend.compiling_for("gpu"):
            return attention(query, key, value, mask, LOW, scale=SCALE, kernel="cudnn").sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes, segments)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"call @(__cudnn\$fmha\w+)|custom_call @(__cudnn\$fmha\w+)", text)
    assert sorted(a or b for a, b in calls) == [
        "__cudnn$fmhaScaleBiasSoftmax",
        "__cudnn$fmhaScaleBiasSoftmaxBackward",
    ]
    sizes = {
        tuple(map(int, dimensions.split("x")))
        for dimensions in re.findall(r"tensor<((?:\d+x)*\d+)x[bf]", text)
    }
    masks_there = {size for size in sizes if size[-2:] == (256, 256)}
    assert masks_there
    assert max(math.prod(size) for size in masks_there) == 2 * 256**2


def calls_of(monkeypatch, window, is_packed, place):
    """Calls of cuDNN in a program for a GPU, by name, with their configuration, both ways.

    JAX reads the version of the library before it lowers: here it gets one without the library.
    """
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
    low = [
        jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16, sharding=place)
        for heads in (4, 2, 2)
    ]
    segments = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def loss(query, key, value, segments):
        packed_segments = segments if is_packed else None
        mask = dataclasses.replace(masks.causal(128, packed_segments), window=window)
        with backend.compiling_for("gpu"):
            return attention(query, key, value, mask, LOW, scale=SCALE, kernel="cudnn").sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*low, segments)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    matches = re.findall(r"@(__cudnn\$fmha\w+)\(.*?backend_config = (\"\{.*?\}\")", text)
    return {
        name: json.loads(json.loads(backend_config.replace("\\22", '\\"')))[
            "cudnn_fmha_backend_config"
        ]
        for name, backend_config in matches
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_program_for_a_gpu_calls_cudnn(monkeypatch, window, is_packed):
    calls = calls_of(monkeypatch, window, is_packed, None)
    name = "__cudnn$fmhaScaleBiasSoftmax" if is_packed else "__cudnn$fmhaSoftmax"
    assert set(calls) == {name, f"{name}Backward"}
    for call in calls.values():
        assert call["fmha_scale"] == SCALE
        assert call["mask_type"] == "CAUSAL"
        assert call["sliding_window_length"] == (0 if is_packed else window or 0)
        scores = call["intermediate_tensor_shape"]
        assert scores["dimensions"] == ["2", "4", "128", "128"]
        assert scores["element_type"] == "BF16"


def test_on_a_mesh_of_gpus_each_calls_it_for_its_rows_and_heads(monkeypatch):
    grid = mesh.build(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    place = jax.NamedSharding(grid, rules.spec(("batch", "length", "heads", "head_dim")))
    with jax.set_mesh(grid):
        calls = calls_of(monkeypatch, None, True, place)
    assert len(calls) == 2
    for call in calls.values():
        assert call["intermediate_tensor_shape"]["dimensions"] == ["1", "2", "128", "128"]


@pytest.mark.slow
def test_on_a_mesh_each_device_computes_its_rows_and_heads():
    arrays = [jnp.asarray(x, jnp.float32) for x in operands(16, 4, 2)]
    mask = masks.causal(16, jnp.asarray(segments_of(16)))
    alone = computed(mask, jnp.float32, arrays)
    grid = mesh.build(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    place = jax.NamedSharding(grid, rules.spec(("batch", "length", "heads", "head_dim")))
    with jax.set_mesh(grid):
        split = computed(mask, jnp.float32, [jax.device_put(x, place) for x in arrays])
    for one, other in zip(alone, split, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
        assert other.sharding.is_equivalent_to(place, 4)


def test_what_it_cannot_do_is_refused():
    query, key, value, _ = (jnp.asarray(x, jnp.bfloat16) for x in operands(16, 2, 2))
    slots = jnp.arange(16)[None]
    cache = masks.Mask(query_index=slots, key_index=slots)
    call = functools.partial(attention, precision=LOW, scale=1.0, kernel="cudnn")
    with pytest.raises(ValueError, match="cudnn attention does not run on a cpu"):
        call(query, key, value, masks.causal(16))
    with backend.compiling_for("gpu"):
        with pytest.raises(ValueError, match="needs a mask of whole rows"):
            call(query, key, value, cache)
        with pytest.raises(ValueError, match="no softcap"):
            call(query, key, value, masks.causal(16), softcap=2.0)
        with pytest.raises(ValueError, match="cudnn has no attention dropout"):
            call(query, key, value, masks.causal(16), dropout=0.1, dropout_key=jax.random.key(0))
