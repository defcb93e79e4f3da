"""By gradient: each prediction depends on exactly those slots that its objective lets it see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import (
    Blank,
    Causal,
    LossConfig,
    Masked,
    Mixture,
    Prefix,
    Span,
    Weights,
)
from tests.models.parameters import draw_params
from tests.objectives.reading import loader_of, shards_of

SEQUENCE = 32


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return shards_of(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def dependence():
    """Dependence of the predictions of slots on the tokens of slots, for one row.

    Each slot has an id, and so an embedding, of its own.
    """
    family = Llama(vocab=SEQUENCE, width=8, depth=1, heads=2, kv_heads=1)
    blueprint = Blueprint(family.build(), Precision.float32())
    params = draw_params(blueprint, std=0.1)
    slots = jnp.arange(SEQUENCE, dtype=jnp.int32)[None]
    weights = jax.random.normal(jax.random.key(1), (SEQUENCE,))

    def predictions(table, segments, reach):
        embedding = params["embedding"] | {"table": table}
        model = blueprint.merge(params | {"embedding": embedding})
        hidden = model.hidden(slots, positions=slots, segments=segments, visible_until=reach)
        return model.logits(hidden.values)[0] @ weights

    def of(batch):
        reach = np.asarray(slots) if batch.visible_until is None else batch.visible_until
        slopes = jacobian(params["embedding"]["table"], batch.segments, reach)
        return np.abs(slopes).max(-1) > 0

    jacobian = jax.jit(jax.jacrev(predictions))
    return of


@pytest.mark.parametrize(
    "arm",
    [Causal(), Prefix(), Masked(), Span(), Blank(), Mixture(weights=Weights(causal=1, fim=1))],
    ids=lambda arm: arm.name,
)
def test_a_prediction_depends_on_what_its_objective_lets_it_see(arm, shards, tmp_path, dependence):
    read = build(arm, LossConfig()).prepare(Bytes(), SEQUENCE)
    loader = loader_of(shards, tmp_path, read.train, sequence=SEQUENCE)
    batch = next(b for b in loader.evaluation(batch=1) if b.segments.max() > 1)
    depends = dependence(batch)
    at, segments = np.arange(SEQUENCE), batch.segments[0]
    same = segments[:, None] == segments[None]
    for t in np.flatnonzero(segments):
        if isinstance(arm, Masked):
            seen = same[t]
        elif not batch.weights[0, t] and arm.bidirectional:
            # All up to the slot of the first prediction; a blank begins with a slot of its own.
            is_blank = batch.block_positions is not None and batch.block_positions[0][same[t]].any()
            last = np.flatnonzero(same[t] & (batch.weights[0] > 0))[0] - is_blank
            seen = same[t] & (at <= last)
        else:
            seen = same[t] & (at <= t)
        np.testing.assert_array_equal(depends[t], seen, str(t))
