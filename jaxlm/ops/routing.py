"""Expert routing: the experts of each token, and the balance of their load."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Router = Literal["softmax", "sigmoid"]


class Routes(NamedTuple):
    """Each token's experts, best first, their shares of its result, and all experts' scores."""

    choices: Int[Array, "B T k"]
    shares: Float[Array, "B T k"]
    scores: Float[Array, "B T E"]


class Spread(NamedTuple):
    """Balance loss, largest load and all loads of each row's experts."""

    balance: Float[Array, "B"]
    largest: Float[Array, "B"]
    loads: Float[Array, "B E"]


def route(
    logits: Float[Array, "B T E"],
    bias: Float[Array, "E"] | None,
    *,
    top_k: int,
    router: Router,
    normalized: bool,
    scale: float,
    groups: int = 1,
    top_groups: int = 1,
) -> Routes:
    """Choose the `top_k` experts with the largest s + bias; their shares are scale s. Float32.

    s is the softmax of the logits over all experts, or their sigmoid.

    Args:
      bias: added to s for the choice only.
      top_k: experts of a token.
      router: function from logits to s.
      normalized: divide the shares by their sum.
      scale: multiplier of the shares.
      groups: equal runs of consecutive experts.
      top_groups: number of groups to choose from. A softmax group ranks by its best expert, a
        sigmoid group by the sum of its best two, which it must have.

    Source: Shazeer et al. 2017, arXiv:1701.06538, section 2.1; Jiang et al. 2024,
    arXiv:2401.04088, section 2.1 (softmax); DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2
    (sigmoid, scale, bias); groups DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2, and
    arXiv:2412.19437, section 2.1.2, both there as nodes.
    """
    scores = jax.nn.softmax(logits) if router == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias[None, None]
    ranked = lax.stop_gradient(ranked)
    if top_groups < groups:
        ranked = _keep_best_groups(ranked, groups, top_groups, 1 if router == "softmax" else 2)
    choices = _top(ranked, top_k)
    shares = jnp.sum(scores[..., None, :] * is_chosen(choices, logits.shape[-1]), axis=-1)
    if normalized:
        shares = shares / jnp.maximum(shares.sum(-1, keepdims=True), 1e-20)
    return Routes(choices, scale * shares, scores)


def _keep_best_groups(
    ranked: Float[Array, "B T E"], groups: int, top_groups: int, counted: int
) -> Float[Array, "B T E"]:
    """Replace scores by -inf outside of the groups with the largest sum of `counted` scores."""
    grouped = ranked.reshape(*ranked.shape[:2], groups, -1)
    is_counted = is_chosen(_top(grouped, counted), grouped.shape[-1])
    best = jnp.sum(grouped[..., None, :] * is_counted, axis=(-1, -2))
    is_in = is_chosen(_top(best, top_groups), groups).sum(-2) > 0
    return jnp.where(is_in[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def _top(values: Float[Array, "... E"], count: int) -> Int[Array, "... n"]:
    """Return the indices of the `count` largest values, the first of equal ones first.

    By repeated maxima: XLA does not split a top-k over devices.
    """
    indices = []
    for _ in range(count):
        indices.append(jnp.argmax(values, axis=-1).astype(jnp.int32))
        values = jnp.where(is_chosen(indices[-1], values.shape[-1]) > 0, -jnp.inf, values)
    return jnp.stack(indices, axis=-1)


def is_chosen(choices: Int[Array, "..."], experts: int) -> Float[Array, "... E"]:
    """Return 1 at each choice. Compared, not gathered: rows stay on their devices."""
    return jax.nn.one_hot(choices, experts, dtype=jnp.float32)


def spread(routes: Routes, counted: Float[Array, "B T"]) -> Spread:
    """Measure the balance of each row's experts over its counted tokens (1, others 0).

        balance = E sum_e f_e P_e,  f_e = (tokens sent to e) / (k n),  P_e = mean of s_e / sum s

    1 for an even load, E / k if all n tokens choose the same k experts. Only P has a gradient.
    By rows, so that the mesh and the number of micro-batches do not change it.

    Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, there over a device's batch; by
    rows as in DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20.
    """
    experts, top_k = routes.scores.shape[-1], routes.choices.shape[-1]
    chosen = is_chosen(routes.choices, experts)
    loads = jnp.sum(chosen * counted[..., None, None], axis=(1, 2))  # B E
    count = jnp.maximum(counted.sum(-1, keepdims=True), 1.0)
    parts = routes.scores / jnp.maximum(routes.scores.sum(-1, keepdims=True), 1e-20)
    mean = jnp.sum(parts * counted[..., None], axis=1) / count
    shares = loads / (top_k * count)
    return Spread(experts * jnp.sum(shares * mean, axis=-1), experts * shares.max(-1), loads)
