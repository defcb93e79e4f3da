"""Latent attention against float64, with and without a cache, whichever way it is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.attention import LatentAttention, LayerInputs
from jaxlm.nn.cache import LayerCache
from jaxlm.nn.config import AttentionConfig, LatentConfig, NormConfig
from jaxlm.nn.rotary import Rope
from jaxlm.ops import masks
from jaxlm.ops.masks import Mask
from tests.nn import reference

WIDTH, ROWS, LENGTH = 16, 2, 11
LATENT = LatentConfig(rank=24, query_rank=7, rotary_dim=6, value_dim=5, norm=NormConfig(eps=1e-6))
CONFIG = AttentionConfig(
    heads=3, kv_heads=3, head_dim=10, latent=LATENT, rotary=Rope(theta=100.0, interleaved=True)
)
KINDS = {
    "queries of a latent": CONFIG,
    "queries of the stream, a window, a cap": dataclasses.replace(
        CONFIG,
        latent=dataclasses.replace(LATENT, query_rank=None),
        window=4,
        softcap=1.5,
        scale=0.6,
        rotary=Rope(theta=100.0),
    ),
    "nothing rotated": dataclasses.replace(CONFIG, rotary=None),
}
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
X = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH))


def built(config):
    return reference.moved(lambda key, init: LatentAttention(WIDTH, config, key=key, init=init))


def normed(x, params):
    return reference.norm(x, params, LATENT.norm)


def turned(x, rotary):
    """[T, N, h]; of neighbours the first of each come first."""
    if rotary is None:
        return x
    if rotary.interleaved:
        x = np.concatenate((x[..., 0::2], x[..., 1::2]), -1)
    return reference.rotated(x[None], POSITIONS[:1], rotary.theta)[0]


def expected(config, params):
    """Head by head, query by query."""
    latent = config.latent
    plain = config.head_dim - latent.rotary_dim
    out = np.zeros((ROWS, LENGTH, WIDTH))
    for row, x in enumerate(X):
        read = x
        if latent.query_rank is not None:
            read = normed(x @ params["query_latent"]["weight"], params["query_norm"])
        query = np.einsum("td,dnh->tnh", read, params["query"]["weight"])
        made = normed(x @ params["latent"]["weight"], params["latent_norm"])
        shared = turned((x @ params["rotary_key"]["weight"])[:, None], config.rotary)[:, 0]
        rotated_query = turned(query[..., plain:], config.rotary)
        for head in range(config.heads):
            keys = np.hstack((made @ params["key"]["weight"][:, head], shared))
            values = made @ params["value"]["weight"][:, head]
            asked = np.hstack((query[:, head, :plain], rotated_query[:, head]))
            scale = config.scale or config.head_dim**-0.5
            for t in range(LENGTH):
                first = 0 if config.window is None else max(0, t - config.window + 1)
                scores = scale * keys[first : t + 1] @ asked[t]
                if config.softcap is not None:
                    scores = config.softcap * np.tanh(scores / config.softcap)
                weights = np.exp(scores - scores.max())
                mixed = weights / weights.sum() @ values[first : t + 1]
                out[row, t] += mixed @ params["out"]["weight"][head]
    return out


@pytest.mark.parametrize("name", KINDS)
def test_a_whole_row_is_what_float64_says(name):
    module, params = built(KINDS[name])
    inputs = LayerInputs(POSITIONS, masks.causal(LENGTH))
    out, _ = jax.jit(lambda x: module(x, inputs))(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(out, expected(KINDS[name], params), rtol=1e-4, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", KINDS)
def test_a_cache_gives_the_same_whether_keys_are_made_of_it_or_not(name, dtype):
    """Keys of a prompt of seven are made, those of two tokens and of one are not.

    A window has a ring.
    """
    config = KINDS[name]
    module, params = built(config)
    assert [module._is_absorbed(length) for length in (7, 2, 1)] == [False, True, True]
    cache = LayerCache.empty(ROWS, LENGTH, config.cached, jnp.dtype(dtype), config.window)
    assert cache.slots == (config.window or LENGTH)
    numbers = sum(leaf.size for leaf in (cache.keys, cache.values))
    assert numbers == ROWS * cache.slots * (LATENT.rank + LATENT.rotary_dim)

    @jax.jit
    def run(x, at, cache):
        mask = Mask(query_index=at, key_index=at)
        return module(x, LayerInputs(at, mask, start=at[:, 0]), cache=cache)

    results = []
    for start, stop in ((0, 7), (7, 9), (9, 10), (10, 11)):
        x = jnp.asarray(X[:, start:stop], jnp.float32)
        out, cache = run(x, POSITIONS[:, start:stop], cache)
        results.append(out)
    reference = expected(config, params)
    bound = 1e-4 if dtype == "float32" else 0.03 * np.abs(reference).max()
    np.testing.assert_allclose(np.concatenate(results, 1), reference, rtol=1e-4, atol=bound)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kv_heads": 1}, "kv_heads = 1, heads = 3"),
        ({"bias": True}, "no biases and no query-key norms"),
        ({"qk_norm": NormConfig()}, "no biases and no query-key norms"),
    ],
)
def test_what_heads_of_a_latent_lack_is_refused(changed, why):
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(CONFIG, **changed)
