"""Our models equal what transformers computed for the same weights (files of tests/parity)."""

import json
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from jaxlm.core import config
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.families.hub import Attributes
from jaxlm.models.families.union import Family
from tests.parity import weights

GOLDENS = Path(__file__).parents[1] / "golden/transformers"
FIRST = {type(family): name for name, family in reversed(weights.FAMILIES.items())}
FIRST = set(FIRST.values())
# Between them they have each kind of norm, gate and position. The gradients of the others are slow
# tests, as a gradient compiles for twice the time of its logits; tests/nn has those of a router.
WITH_GRADIENTS = {"gpt2", "gemma2"}


def models(fast):
    """Return all names; those that are not `fast` are slow tests."""
    marks = {name: () if name in fast else pytest.mark.slow for name in weights.FAMILIES}
    return [pytest.param(name, marks=mark, id=name) for name, mark in marks.items()]


def test_every_family_has_a_golden():
    assert {type(family) for family in weights.FAMILIES.values()} == set(get_args(Family))
    assert {path.stem for path in GOLDENS.glob("*.json")} == set(weights.FAMILIES)


def opened(name):
    """Return the golden values, the parameters, and the loss with the logits as a function."""
    golden, family = json.loads((GOLDENS / f"{name}.json").read_text()), weights.FAMILIES[name]
    blueprint = Blueprint(family.build(), Precision.float32())
    ids = weights.tokens()

    def loss(params):
        logits = weights.forward(blueprint.merge(params), family)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        picked = jax.numpy.take_along_axis(log_p, ids[:, 1:, None], axis=-1)
        return -picked.mean(), logits

    return golden, weights.params(family, blueprint.shapes), loss


def check(value, logits, golden):
    np.testing.assert_allclose(value, golden["loss"], rtol=1e-6)
    np.testing.assert_allclose(logits[:, ::8], golden["logits"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", models(FIRST - WITH_GRADIENTS))
def test_loss_and_logits_are_those_of_transformers(name):
    golden, params, loss = opened(name)
    check(*jax.jit(loss)(params), golden)


@pytest.mark.parametrize("name", models(WITH_GRADIENTS))
def test_loss_logits_and_gradients_are_those_of_transformers(name):
    golden, params, loss = opened(name)
    (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    check(value, logits, golden)
    family = weights.FAMILIES[name]
    mine = weights.gradients(family, gradient)
    assert mine.keys() == golden["gradient_norms"].keys()
    largest = max(golden["gradient_norms"].values())
    for key, norm in golden["gradient_norms"].items():
        if weights.is_nothing(norm, largest):
            assert np.linalg.norm(mine[key]) < 1e-6 * largest, key
            continue
        np.testing.assert_allclose(np.linalg.norm(mine[key]), norm, rtol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", models(FIRST))
def test_tensors_and_attributes_come_back_as_they_were(name):
    family = weights.FAMILIES[name]
    blueprint = Blueprint(family.build(), Precision.float32())
    for key, array in weights.theirs(family, weights.params(family, blueprint.shapes)).items():
        np.testing.assert_array_equal(array, weights.weight(key, array.shape), err_msg=key)
    attributes = Attributes(json.loads(json.dumps(family.to_hub())), "config.json")
    read_back = type(family).from_hub(attributes)
    attributes.check()
    checked = config.from_json(type(family), config.to_json(read_back))
    assert checked.build() == family.build()
    assert checked.to_hub() == family.to_hub()
