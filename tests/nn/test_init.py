"""Initial weights have the standard deviations of the papers, measured on large tensors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.build import Blueprint
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.nn.init import Initializer

DEPTH, VOCAB, WIDTH, HEADS, HIDDEN = 3, 400, 96, 4, 320
# (inputs, outputs) of each matrix; query heads of 24 together make 96, two key heads 48.
SHAPES = {
    "attention/query/weight": (WIDTH, 96),
    "attention/key/weight": (WIDTH, 48),
    "attention/value/weight": (WIDTH, 48),
    "attention/out/weight": (96, WIDTH),
    "mlp/gate/weight": (WIDTH, HIDDEN),
    "mlp/up/weight": (WIDTH, HIDDEN),
    "mlp/down/weight": (HIDDEN, WIDTH),
}
ON_RESIDUAL = {"attention/out/weight", "mlp/down/weight"}
EXPECTED = {
    "normal": lambda name: 0.05,
    "gpt2": lambda name: 0.05 / math.sqrt(2 * DEPTH) if name in ON_RESIDUAL else 0.05,
    "xavier": lambda name: math.sqrt(2 / sum(SHAPES[name])),
    "he": lambda name: math.sqrt(2 / SHAPES[name][0]),
}


def initial(family):
    leaves = tree.leaves(Blueprint(family.build(), Precision.float32()).init(jax.random.key(0)))
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


@pytest.mark.parametrize("scheme", EXPECTED)
def test_each_scheme_draws_with_its_own_deviation(scheme):
    family = Llama(
        vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, kv_heads=2, hidden=HIDDEN,
        init=scheme, init_std=0.05,
    )  # fmt: skip
    leaves = initial(family)
    for name in SHAPES:
        for layer in leaves[f"stack/0/{name}"]:
            assert layer.size == math.prod(SHAPES[name])
            np.testing.assert_allclose(layer.std(), EXPECTED[scheme](name), rtol=0.05, err_msg=name)
            assert abs(float(layer.mean())) < 0.05 * float(layer.std())
    np.testing.assert_allclose(leaves["embedding/table"].std(), 0.05, rtol=0.05)


def test_gpt2_starts_as_its_paper_says():
    leaves = initial(GPT2(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, max_positions=200))
    for name in ("embedding/table", "positions/table", "stack/0/mlp/up/weight"):
        np.testing.assert_allclose(leaves[name].std(), 0.02, rtol=0.05)
    for name in ON_RESIDUAL:
        deviation = leaves[f"stack/0/{name}"].std()
        np.testing.assert_allclose(deviation, 0.02 / math.sqrt(2 * DEPTH), rtol=0.05)
    for path, leaf in leaves.items():
        if path.endswith("bias"):
            assert not leaf.any(), path
        if path.endswith("scale"):
            assert (leaf == 1).all(), path


def test_the_unembedding_is_no_projection_on_the_residual_stream():
    leaves = initial(
        Llama(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, kv_heads=2, init="gpt2")
    )
    np.testing.assert_allclose(leaves["unembedding/weight"].std(), 0.02, rtol=0.05)
    assert not np.array_equal(leaves["unembedding/weight"].T, leaves["embedding/table"])


def test_weights_are_drawn_in_float32_and_then_rounded():
    low = Precision.of(PrecisionConfig(params="bfloat16"))
    draw = [
        Initializer("normal", 0.02, 1, precision).weight(jax.random.key(0), (64, 64))
        for precision in (Precision.float32(), low)
    ]
    assert draw[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(draw[0].astype(jnp.bfloat16), draw[1])
