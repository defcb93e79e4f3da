"""`model(ids)`: logits with positions by default, of packed rows, and with a KV cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from tests.models.parameters import draw_params

IDS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 8)), jnp.int32)
FAMILIES = {
    "rotary": Llama(vocab=32, width=16, depth=2, heads=2, kv_heads=1),
    "table of positions": GPT2(vocab=32, width=16, depth=2, heads=2, max_positions=8),
}


@pytest.fixture(params=FAMILIES, scope="module")
def model(request):
    blueprint = Blueprint(FAMILIES[request.param].build(), Precision.float32())
    return blueprint.merge(draw_params(blueprint))


@pytest.mark.few(1)
def test_logits_are_those_of_the_hidden_states_at_positions_from_0(model):
    positions = jnp.broadcast_to(jnp.arange(8), IDS.shape)
    expected = model.logits(model.hidden(IDS, positions=positions).values)
    np.testing.assert_array_equal(model(IDS), expected)
    assert expected.shape == (2, 8, 32)


@pytest.mark.slow
@pytest.mark.few(1)
def test_positions_of_packed_documents_begin_anew(model):
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]] * 2)
    packed = model(IDS, segments=segments)
    np.testing.assert_allclose(packed[:, :3], model(IDS[:, :3]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed[:, 3:7], model(IDS[:, 3:7]), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.few(1)
def test_a_cache_continues_where_the_last_call_ended(model):
    cache = model.empty_cache(2, 8)
    parts = []
    for part in (IDS[:, :3], IDS[:, 3:4], IDS[:, 4:]):
        logits, cache = model(part, cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), model(IDS), rtol=1e-4, atol=1e-5)
    assert cache.length.tolist() == [8, 8]
