"""QK-clip: a head that passed the limit comes back to it, the others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.attention import Attention, LatentAttention, LayerInputs
from jaxlm.nn.config import AttentionConfig, LatentConfig, NormConfig
from jaxlm.nn.intermediates import capture
from jaxlm.ops import masks
from jaxlm.optim.qk_clip import qk_clip
from tests.nn import reference

WIDTH, LENGTH = 12, 9


def peaks(module, x):
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], x.shape[:2])
    with capture(("logits",)) as notes:
        module(x, LayerInputs(positions, masks.causal(LENGTH)))
    return np.asarray(notes.peaks["logit_max"])


LATENT = LatentConfig(rank=6, query_rank=5, rotary_dim=2, value_dim=3, norm=NormConfig())


@pytest.mark.few(1)
@pytest.mark.parametrize(("kv_heads", "latent"), [(4, None), (2, None), (4, LATENT)])
def test_heads_past_the_limit_come_back_to_it(kv_heads, latent):
    config = AttentionConfig(
        heads=4, kv_heads=kv_heads, head_dim=4, bias=latent is None, latent=latent
    )
    attention = Attention if latent is None else LatentAttention
    module, params = reference.moved(lambda key, init: attention(WIDTH, config, key=key, init=init))
    x = jax.random.normal(jax.random.key(5), (2, LENGTH, WIDTH))
    before = peaks(module, x)
    limit = float(np.sort(before)[1:3].mean())
    layer = {"stack": {"0": {"attention": jax.tree.map(lambda p: jnp.float32(p)[None], params)}}}
    clipped, metrics = qk_clip(layer, {"stack/0/logit_max": jnp.asarray(before)[None]}, limit)
    now = clipped["stack"]["0"]["attention"]
    for name in ("query", "key"):
        for part, value in now[name].items():
            getattr(getattr(module, name), part)[...] = value[0]
    np.testing.assert_allclose(peaks(module, x), np.minimum(before, limit), rtol=1e-5)
    assert int(metrics["qk_clipped_heads"]) == (before > limit).sum() == 2
    np.testing.assert_allclose(metrics["attention_logit_max"], before.max(), rtol=1e-6)
    for name in params.keys() - {"query", "key"}:
        if "weight" not in params[name]:
            continue
        np.testing.assert_array_equal(now[name]["weight"][0], np.float32(params[name]["weight"]))
    unchanged = np.asarray(now["key"]["weight"][0]) == np.float32(params["key"]["weight"])
    # Keys that heads share stay; others take half of the way.
    assert unchanged.all() == (kv_heads == 2)
    stays = before <= limit
    query = np.asarray(now["query"]["weight"][0]) == np.float32(params["query"]["weight"])
    assert query[:, stays].all()
    assert not query[:, ~stays].any()
