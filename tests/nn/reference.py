"""The parts of a block in float64 numpy, one query at a time: the reference of these tests."""

import jax
import numpy as np
from flax import nnx

from jaxlm.core.precision import Precision
from jaxlm.nn.init import Initializer
from tests.models.parameters import draw_like

FLOAT32 = Precision.float32()


def moved(make, *, std=0.3, seed=0, precision=FLOAT32):
    """`make(key, init)` with every parameter moved off one and zero; and its arrays."""
    init = Initializer("normal", std, 1, precision)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(seed), init)))
    module = nnx.merge(graphdef, draw_like(state, seed, (std**2 + 0.04) ** 0.5, spread=0.2))
    return module, arrays(module)


def arrays(module):
    """The parameters of a module as nested dicts of float64 arrays."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(module)))


def linear(x, params, dims=1):
    return np.tensordot(x, params["weight"], dims) + params.get("bias", 0.0)


def norm(x, params, config):
    over = tuple(range(-params["scale"].ndim, 0))
    if config.kind == "layer":
        x = x - x.mean(over, keepdims=True)
    x = x / np.sqrt((x**2).mean(over, keepdims=True) + config.eps)
    return x * (params["scale"] + config.offset) + params.get("bias", 0.0)


def rotated(x, positions, theta, *, dims=None, factors=1.0, amplitude=1.0):
    """Rotate pairs (i, i + h) of the first 2h = `dims` channels by position x theta ** (-i / h).

    Args:
      x: the channels.
      positions: position of each slot.
      theta: base of the frequencies.
      dims: number of rotated channels.
      factors: factors of the frequencies.
      amplitude: factor of the result.
    """
    half = (x.shape[-1] if dims is None else dims) // 2
    frequencies = theta ** (-np.arange(half) / half) * factors
    turns = amplitude * np.exp(1j * positions[:, :, None, None] * frequencies)
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turns
    return np.concatenate((pairs.real, pairs.imag, x[..., 2 * half :]), axis=-1)


def _factors(rope, size, positions):
    """Factors of the frequencies, the same for all or others in documents that reach far."""
    factors = rope.factors(size) or 1.0
    if rope.beyond is None:
        return factors
    first, others = rope.beyond
    is_beyond = np.zeros(positions.shape, bool)
    for row, at in enumerate(positions):
        for document in np.split(np.arange(at.size), np.flatnonzero(np.diff(at) < 0) + 1):
            is_beyond[row, document] = (at[document] >= first).any()
    return np.where(is_beyond[..., None, None], others, factors)


def attention(x, params, config, positions):
    """Causal attention of every row, query by query over the keys that it may see."""
    query, key, value = (linear(x, params[name]) for name in ("query", "key", "value"))
    if config.qk_norm is not None:
        query = norm(query, params["query_norm"], config.qk_norm)
        key = norm(key, params["key_norm"], config.qk_norm)
    if config.rotary is not None:
        rope, size = config.rotary, config.head_dim
        turns = dict(
            dims=rope.dims(size),
            factors=_factors(rope, size, positions),
            amplitude=rope.scaling.amplitude,
        )
        query, key = (rotated(each, positions, rope.theta, **turns) for each in (query, key))
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    out = np.zeros(query.shape)
    for row, t, head in np.ndindex(query.shape[:3]):
        shared = head * config.kv_heads // config.heads
        first = 0 if config.window is None else max(0, t + 1 - config.window)
        scores = scale * key[row, first : t + 1, shared] @ query[row, t, head]
        if config.softcap is not None:
            scores = config.softcap * np.tanh(scores / config.softcap)
        weights = np.exp(scores - scores.max())
        out[row, t, head] = weights @ value[row, first : t + 1, shared] / weights.sum()
    return linear(out, params["out"], 2)


def gated_silu(x, params):
    gate, up = linear(x, params["gate"]), linear(x, params["up"])
    return linear(gate / (1 + np.exp(-gate)) * up, params["down"])
