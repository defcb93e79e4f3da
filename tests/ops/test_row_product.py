"""Products of a few rows: their values, the order of factors, and the layouts of codes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.generate import decode
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.ops import row_product
from jaxlm.ops.row_product import dot_rows
from jaxlm.tune import surgery
from jaxlm.tune.config import Quantized
from tests.models.parameters import draw_params

INPUTS, OUTPUTS = 40, 24


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Compile the programs of a CPU with this vendor and these flags, on any CPU."""

    def described(*words):
        monkeypatch.setattr(backend, "CPUINFO", tmp_path / "cpuinfo")
        backend.CPUINFO.write_text(" ".join(words))

    return described


@pytest.fixture
def amx(cpu):
    cpu(backend.INTEL, backend.AMX, backend.AVX2, backend.AVX512)


@pytest.fixture(params=["AMX", "Intel", "AVX2", "AMD", "other"])
def kind(request, cpu):
    words = {
        "AMX": (backend.INTEL, backend.AMX, backend.AVX2, backend.AVX512),
        "Intel": (backend.INTEL, backend.AVX2, backend.AVX512),
        "AVX2": (backend.AVX2,),
        "AMD": (backend.AVX2, backend.AVX512),
        "other": (),
    }
    cpu(*words[request.param])
    return request.param


def operands(rows, dtype):
    draw = np.random.default_rng(rows)
    if dtype == "int8":
        draws = (draw.integers(-127, 128, shape) for shape in ((rows, INPUTS), (INPUTS, OUTPUTS)))
    else:
        draws = (draw.normal(size=shape) for shape in ((rows, INPUTS), (INPUTS, OUTPUTS)))
    return tuple(jnp.asarray(each, dtype) for each in draws)


def program(rows, dtype, side):
    sums = jnp.dtype("int32" if dtype == "int8" else "float32")
    x, weight = operands(rows, dtype)
    weight = weight.T if side else weight
    return jax.jit(lambda x, weight: dot_rows(x, weight, side, sums)).lower(x, weight).compile()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("rows", "side"), [(1, 1), (3, 1), (3, 0), (1, 0), (200, 1)])
def test_the_product_is_that_of_float64(rows, side, dtype, kind):
    x, weight = operands(rows, dtype)
    out = program(rows, dtype, side)(x, weight.T if side else weight)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    assert out.shape == exact.shape
    np.testing.assert_allclose(out, exact, atol=0 if dtype == "int8" else 1e-5, rtol=1e-5)


def product_shape(rows, dtype, side=1):
    """The shape of the result of the compiled product."""
    return dot_shape(program(rows, dtype, side).as_text())


def dot_shape(text):
    return re.search(r" = \w+\[([\d,]+)\]\S* dot\(", text).group(1)


def is_weight_first(kind, dtype, rows=5):
    if kind == "other":
        return False
    if kind in ("AMX", "AMD") or dtype == "float32":
        return True
    return kind == "AVX2" and dtype == "int8" and rows >= 8


def most_rows(kind, dtype):
    """The most rows that may be the second factor, or whose order of factors is fixed."""
    if kind == "AMD" and dtype != "float32":
        return row_product.MOST_ROWS_OF_AMD
    if kind == "Intel" and dtype == "float32":
        return row_product.FEW_ROWS_OF_INTEL
    return row_product.FEW_ROWS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_few_rows_are_the_second_factor_where_that_is_faster(dtype, kind):
    """XLA copies the second factor into tiles; it may not swap the factors again."""
    is_first = is_weight_first(kind, dtype)
    assert product_shape(5, dtype) == (f"{OUTPUTS},5" if is_first else f"5,{OUTPUTS}")
    assert product_shape(5, dtype, side=0) == f"5,{OUTPUTS}"
    is_first = is_weight_first(kind, dtype, rows=8)
    assert product_shape(8, dtype) == (f"{OUTPUTS},8" if is_first else f"8,{OUTPUTS}")
    most = most_rows(kind, dtype)
    assert product_shape(most + 1, dtype) == f"{most + 1},{OUTPUTS}"


def test_an_amd_has_weights_of_more_outputs_than_inputs_first_in_float32_alone(cpu):
    """XLA takes up to 3.5 times as long with such a weight of int8."""
    cpu(backend.AVX2, backend.AVX512)
    for dtype, is_first in [("float32", True), ("bfloat16", False), ("int8", False)]:
        sums = jnp.dtype("int32" if dtype == "int8" else "float32")
        x, weight = jnp.ones((5, OUTPUTS), dtype), jnp.ones((INPUTS, OUTPUTS), dtype)
        product = jax.jit(functools.partial(dot_rows, side=1, sums=sums))
        shape = dot_shape(product.lower(x, weight).compile().as_text())
        assert shape == (f"{INPUTS},5" if is_first else f"5,{INPUTS}"), dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_fewer_rows_than_have_their_bits_among_others_are_padded(dtype, kind):
    least = 2 if dtype != "float32" else 4 if kind in ("AMX", "Intel") else 1
    is_first = is_weight_first(kind, dtype)
    for rows in (1, 3):
        count = max(rows, least)
        if count > 1:  # one row of float32 is no product of matrices
            expected = f"{OUTPUTS},{count}" if is_first else f"{count},{OUTPUTS}"
            assert product_shape(rows, dtype) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_transposed_result_does_not_swap_the_factors(dtype, kind):
    """XLA would merge the transpose of heads into the product."""
    sums = jnp.dtype("int32" if dtype == "int8" else "float32")
    x, weight = operands(5, dtype)

    def split(x, weight):
        heads = dot_rows(x, weight, 1, sums).reshape(5, 1, 4, -1).astype(jnp.float32)
        return jnp.tanh(heads.transpose(2, 3, 0, 1)).sum(0)

    shape = dot_shape(jax.jit(split).lower(x, weight.T).compile().as_text())
    expected = f"{OUTPUTS},5" if is_weight_first(kind, dtype) else f"5,{OUTPUTS}"
    assert kind == "other" or shape == expected


@pytest.mark.parametrize("places", [1, 3])
def test_a_decode_pass_computes_the_rows_in_use_and_zeros_for_the_others(places):
    """Each time that it is traced, though one jitted function was traced without before."""
    x, weight = operands(6 * places, "float32")
    inner = jax.jit(lambda x, weight: dot_rows(x, weight, 0, jnp.dtype("float32")))
    whole = inner(x, weight)

    def drawn(used):
        @jax.jit
        def traced(x, weight):
            with row_product.decode_rows(row_product.DecodeRows(used, 6)):
                return inner(x, weight)

        return np.asarray(traced(x, weight))

    np.testing.assert_allclose(drawn(6), whole, rtol=1e-6)
    few = drawn(2)
    np.testing.assert_allclose(few[: 2 * places], whole[: 2 * places], rtol=1e-6)
    assert few.shape == whole.shape
    assert not few[2 * places :].any()
    np.testing.assert_array_equal(inner(x, weight), whole)


@pytest.mark.parametrize(
    ("words", "total", "padded"),
    [
        ((backend.AVX2,), 6, 6),
        ((backend.AVX2,), 16, 8),
        ((backend.AVX2, backend.AVX512), 6, 6),
        ((backend.AVX2, backend.AVX512), 16, 16),
        ((backend.AVX2, backend.AVX512, backend.INTEL), 16, 4),
    ],
)
def test_the_rows_in_use_are_padded_to_those_with_equal_bits(words, total, padded, cpu):
    cpu(*words)
    x, weight = operands(total, "float32")

    def few(x, weight):
        with row_product.decode_rows(row_product.DecodeRows(2, total)):
            return dot_rows(x, weight, 1, jnp.dtype("float32"))

    text = jax.jit(few).lower(x, weight.T).compile().as_text()
    assert dot_shape(text) == f"{OUTPUTS},{padded}"


def test_a_cpu_with_avx2_reads_weights_by_output(kind):
    weight = jnp.zeros((INPUTS, OUTPUTS))
    layout, side = row_product.decode_layout(weight, 0)
    assert (layout.shape, side) == (
        ((INPUTS, OUTPUTS), 0) if kind == "other" else ((OUTPUTS, INPUTS), 1)
    )


def test_other_devices_keep_the_rows_first_on_a_host_with_amx(amx):
    x, weight = operands(3, "float32")

    def traced():
        made = jax.make_jaxpr(lambda x, weight: dot_rows(x, weight, 1, jnp.dtype("float32")))
        return str(made(x, weight.T))

    assert "optimization_barrier" in traced()
    with backend.compiling_for("tpu"):
        assert "optimization_barrier" not in traced()


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_token_loop_copies_no_codes(scheme, amx):
    """The logits have the same bits, and no code is copied for a token."""
    family = Llama(vocab=64, width=16, depth=1, heads=2, kv_heads=2, tied=True)
    plain = Blueprint(family.build(), Precision.float32())
    at = ("*/attention/*", "*/mlp/*", "embedding/*")
    surgeon = surgery.quantization(Quantized(base=scheme, block="all", at=at))
    stored = Blueprint(family.build(), Precision.float32(), surgery=surgeon)
    codes = surgery.adapted_params(plain, surgeon, draw_params(plain), jax.random.key(0))
    ids = jnp.arange(3, dtype=jnp.int32)[:, None]

    def logits(model):
        def step(number, before):
            cache = model.empty_cache(3, 8)
            tokens = (ids + number) % 64
            hidden = model.hidden(tokens, positions=jnp.zeros_like(ids), cache=cache)
            return before + model.logits(hidden.values)

        return jax.lax.fori_loop(0, 4, step, jnp.zeros((3, 1, 64)))

    prepare, merge = decode.weight_layout(stored.merge)
    ready = jax.jit(prepare)(codes)
    loop = jax.jit(lambda ready: logits(merge(ready)))
    np.testing.assert_array_equal(
        loop(ready), jax.jit(lambda params: logits(stored.merge(params)))(codes)
    )
    text = loop.lower(ready).compile().as_text()
    assert not re.search(r" = [su]8\[(16,64|64,16)\]\S* (transpose|copy)\(", text)
    assert not re.search(r" = s32\[(16,64|64,16)\]", text), "it is not converted"
