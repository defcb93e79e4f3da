"""Our models against what transformers computed for the same weights; tests/parity makes these files."""

import itertools
import json
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.families import gpt2, llama, mixtral
from jaxlm.models.families.union import Family
from tests.parity import weights

GOLDENS = Path(__file__).parents[1] / "golden/transformers"
# Each table, and the family's switches that add or remove parameters.
# Of Mixtral's, dense_depth and balance_bias add what no Mixtral has; beside its table it says why they have no names.
TABLES = {
    "gpt2": (gpt2.KEYS, ("tied", "bias")),
    "llama": (llama.KEYS, ("tied", "qk_norm")),
    "mixtral": (mixtral.KEYS, ("tied", "qk_norm", "shared")),
}


@pytest.mark.parametrize("family", weights.FAMILIES)
def test_loss_logits_and_gradients_are_those_of_transformers(family):
    golden = json.loads((GOLDENS / f"{family}.json").read_text())
    blueprint = Blueprint(weights.FAMILIES[family].build(), Precision.float32())
    names = shapes_by_name(family, blueprint)
    named = {name: weights.weight(name, shape) for name, shape in names.items()}
    params = weights.ours(family, blueprint.shapes, named)
    ids = weights.tokens()
    positions = np.broadcast_to(np.arange(weights.LENGTH, dtype=np.int32), ids.shape)

    def loss(params):
        model = blueprint.merge(params)
        logits = model.logits(model(ids, positions=positions).values)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        picked = jax.numpy.take_along_axis(log_p, ids[:, 1:, None], axis=-1)
        return -picked.mean(), logits

    (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(value, golden["loss"], rtol=1e-6)
    np.testing.assert_allclose(logits[:, ::4], golden["logits"], rtol=1e-4, atol=2e-5)
    mine = weights.theirs(family, gradient)
    assert mine.keys() == golden["gradient_norms"].keys()
    for name, norm in golden["gradient_norms"].items():
        np.testing.assert_allclose(np.linalg.norm(mine[name]), norm, rtol=1e-4, err_msg=name)


def test_every_family_has_a_golden_and_a_table():
    assert {type(config) for config in weights.FAMILIES.values()} == set(get_args(Family))
    assert {type(weights.FAMILIES[name]) for name in TABLES} == set(get_args(Family))


@pytest.mark.parametrize("family", TABLES)
def test_the_key_table_names_every_parameter_that_the_family_can_have(family):
    table, options = TABLES[family]
    paths = set()
    for values in itertools.product((False, True), repeat=len(options)):
        config = type(weights.FAMILIES[family])(
            vocab=8, width=8, depth=1, heads=2, **dict(zip(options, values, strict=True))
        )
        paths |= tree.leaves(Blueprint(config.build(), Precision.float32()).shapes).keys()
    assert paths == table.keys()
    assert len(set(table.values())) == len(table), "two of ours have one name"


def shapes_by_name(family, blueprint):
    """The Hugging Face shape of each name, from ours."""
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), blueprint.shapes)
    return {name: array.shape for name, array in weights.theirs(family, zeros).items()}
