"""Attention in float64, from its formulas: what every kernel is compared with."""

import numpy as np

SCALE = 0.7


def operands(length, heads, kv_heads, *, rows=2, size=4, seed=0):
    """Random queries, keys, values, and weights of the results.

    Args:
      length, heads, kv_heads: slots, heads of queries, heads of keys.
      rows, size: number of rows, channels of a head.
      seed: seed of the draw.
    """
    draw = np.random.default_rng(seed)
    return [
        draw.standard_normal((rows, length, n, size)) for n in (heads, kv_heads, kv_heads, heads)
    ]


def segments_of(length):
    """Segments of two rows: two documents and padding; and one document."""
    cuts = np.array([[length // 3, length - length // 4], [length, length]])
    at = np.arange(length)[None]
    return np.where(at < cuts[:, :1], 1, np.where(at < cuts[:, 1:], 2, 0)).astype(np.int32)


def reach_of(length):
    """Reach of each slot of two rows: prefixes of both documents, and half of a row.

    The documents are those of `segments_of`.
    """
    at = np.arange(length)
    cuts = [(0, length // 4), (length // 3, length // 2)], [(0, length // 2)]
    rows = []
    for row in cuts:
        reach = at.copy()
        for begin, end in row:
            reach[begin : end + 1] = end
        rows.append(reach)
    return np.array(rows, np.int32)


def exact(query, key, value, weights, *, causal, window, softcap, segments, reach=None):
    """sum(out x weights) and its gradients by q, k and v in float64, row by row and head by head.

    Args:
      query, key, value: operands.
      weights: factors of the outputs in the sum.
      causal, window, softcap: settings of the attention.
      segments, reach: documents of the slots, and the last visible slot of each.
    """
    out = np.zeros(query.shape)
    grads = [np.zeros(x.shape) for x in (query, key, value)]
    groups = query.shape[2] // key.shape[2]
    t, s = np.mgrid[: query.shape[1], : key.shape[1]]
    for row, head in np.ndindex(query.shape[0], query.shape[2]):
        seen = (s <= t) | (not causal)
        if reach is not None:
            seen = s <= reach[row][:, None]
        if window is not None:
            seen = seen & ((t - s if reach is None else abs(t - s)) < window)
        if segments is not None:
            seen = seen & (segments[row][:, None] == segments[row][None])
        q, k, v = query[row, :, head], key[row, :, head // groups], value[row, :, head // groups]
        scores, slope = SCALE * q @ k.T, 1.0
        if softcap is not None:
            scores, slope = softcap * np.tanh(scores / softcap), 1 - np.tanh(scores / softcap) ** 2
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        out[row, :, head] = shares @ v
        by_share = weights[row, :, head] @ v.T
        by_score = shares * (by_share - (shares * by_share).sum(-1, keepdims=True)) * slope
        grads[0][row, :, head] += SCALE * by_score @ k
        grads[1][row, :, head // groups] += SCALE * by_score.T @ q
        grads[2][row, :, head // groups] += shares.T @ weights[row, :, head]
    return out, *grads
