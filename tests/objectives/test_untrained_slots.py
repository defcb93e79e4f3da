"""A slot of weight 0 has no part in the loss or in any gradient, for every target."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.config import MtpConfig
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from tests.models.parameters import draw_params
from tests.objectives.test_mtp import MODEL, VOCAB, WEIGHTS, batch


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize(
    "mtp", [None, MtpConfig(tokens=2, kind="sequential")], ids=["next token", "heads"]
)
def test_the_target_of_an_untrained_slot_changes_no_bit(mtp, chunk):
    blueprint = Blueprint(dataclasses.replace(MODEL.build(), mtp=mtp), Precision.float32())
    params = draw_params(blueprint)
    rows = batch()
    others = np.where(rows.weights > 0, rows.targets, (rows.targets + 7) % VOCAB)
    config = LossConfig(chunk=chunk, z_loss=0.01, label_smoothing=0.1)
    heads = () if mtp is None else WEIGHTS

    @jax.jit
    def gradient(params, targets, weights):
        changed = rows._replace(targets=targets, weights=weights)

        def value(params):
            model = blueprint.merge(params)
            return token_nll(model, changed, None, config, mtp_weights=heads).objective.total

        return jax.value_and_grad(value)(params)

    one, other = (gradient(params, each, rows.weights) for each in (rows.targets, others))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    trained = np.where(rows.weights > 0, others + 1, rows.targets) % VOCAB
    assert gradient(params, trained, rows.weights)[0] != one[0]
    nothing = gradient(params, rows.targets, np.zeros_like(rows.weights))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(nothing))
