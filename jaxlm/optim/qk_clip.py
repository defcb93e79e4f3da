"""QK-clip: scale down the query and key weights of heads with large attention logits."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxlm.core import tree

LOGIT_MAX = "logit_max"  # name of the intermediate of attention: each head's largest logit


def qk_clip(
    params: Any, peaks: Mapping[str, Array], max_logit: float
) -> tuple[Any, dict[str, Array]]:
    """Return the clipped parameters, and the metrics `attention_logit_max` and `qk_clipped_heads`.

    With S the largest logit of a head in the step's forward pass and g = min(1, max_logit / S):

        query <- sqrt(g) query,  key <- sqrt(g) key     if each head has keys of its own
        query <- g query                                if heads share keys

    In latent attention, the first rule applies to the part of a head whose keys are projected from
    the latent, and the second to the part with the shared rotary key. Both apply to weights and
    biases.

    `params` are those after the update; `peaks` are the largest logits of the heads,
    [layers, heads], by `STACK/KIND/logit_max`.

    Source: Kimi Team 2025, arXiv:2507.20534, section 2.1 and algorithm 1.
    """
    leaves = tree.leaves(params)
    scales: dict[str, Array] = {}
    for path, peak in peaks.items():
        stem = path.removesuffix(LOGIT_MAX) + "attention"
        factor = max_logit / jnp.maximum(peak, max_logit)
        heads, kv_heads = (leaves[f"{stem}/{name}/weight"].shape[-2] for name in ("query", "key"))
        has_own_keys, factor = heads == kv_heads, factor[..., None]
        scales[f"{stem}/query"] = jnp.sqrt(factor) if has_own_keys else factor
        if has_own_keys:
            scales[f"{stem}/key"] = jnp.sqrt(factor)
        if (rotary := leaves.get(f"{stem}/rotary_key/weight")) is not None:
            size, rotary_size = leaves[f"{stem}/query/weight"].shape[-1], rotary.shape[-1]
            is_rotary = jnp.arange(size) >= size - rotary_size
            scales[f"{stem}/query"] = jnp.where(is_rotary, factor, jnp.sqrt(factor))

    def scaled(path: str, leaf: Array) -> Array:
        scale = scales.get(path.rpartition("/")[0])
        if scale is None:
            return leaf
        middle = (1,) * (leaf.ndim - 3)  # the hidden dimension of a weight
        shape = (scale.shape[0], *middle, *scale.shape[1:])
        return leaf * scale.reshape(shape).astype(leaf.dtype)

    logits = jnp.concatenate([peak.ravel() for peak in peaks.values()])
    return tree.map_with_path(scaled, params), {
        "attention_logit_max": logits.max(),
        "qk_clipped_heads": jnp.sum(logits > max_logit).astype(jnp.float32),
    }
