"""Log-probabilities of a few ids and of all others together, from logits.

Example:
  >>> import jax.numpy as jnp
  >>> parts = top_parts(jnp.log(jnp.array([[[1.0, 2.0, 4.0, 1.0]]])), jnp.array([[[2, 1]]]))
  >>> jnp.exp(parts).round(3).tolist()
  [[[0.5, 0.25, 0.25]]]
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

LEAST = -1e4  # log-probability that stands for 0, in nats


@jax.custom_vjp
def top_parts(logits: Float[Array, "B T V"], ids: Int[Array, "B T K"]) -> Float[Array, "B T K+1"]:
    """Return log softmax(logits) of each id and, as the last, of all other ids together, float32.

    That of no other id is `LEAST`. The ids of a slot are distinct. Both passes compute one
    exponential of a logit: half of the time of log_softmax, a copy without the ids, and its sum.
    """
    return _forward(logits, ids)[0]


def _forward(logits: Array, ids: Array) -> tuple[Array, Any]:
    wide = logits.astype(jnp.float32)
    others = jnp.where(_is_other(logits.shape, ids), wide, -jnp.inf)
    most = jnp.maximum(others.max(-1), jnp.finfo(jnp.float32).min)
    rest = most + jnp.log(jnp.exp(others - most[..., None]).sum(-1))
    chosen = jnp.take_along_axis(wide, ids, -1)
    whole = jnp.logaddexp(jax.nn.logsumexp(chosen, axis=-1), rest)
    last = jnp.maximum(rest - whole, LEAST)
    parts = jnp.concatenate((chosen - whole[..., None], last[..., None]), -1)
    return parts, (logits, ids, whole, last)


def _backward(residuals: Any, grad: Array) -> tuple[Array, None]:
    """With p of an id, P of all others, and the sum G of all gradients g, p g_id - p G.

    An id of the others has the gradient p / P (g_others - G P), in which p / P is at most 1.
    """
    logits, ids, whole, last = residuals
    wide, total = logits.astype(jnp.float32), grad.sum(-1)
    share = grad[..., -1] - total * jnp.exp(last)
    others = jnp.exp(wide - (whole + last)[..., None]) * share[..., None]
    chosen = jnp.exp(jnp.take_along_axis(wide, ids, -1) - whole[..., None])
    chosen = grad[..., :-1] - chosen * total[..., None]

    def replaced(row: Array, ids: Array, values: Array) -> Array:
        return row.at[ids].set(values, unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(jax.vmap(replaced))(others, ids, chosen).astype(logits.dtype), None


top_parts.defvjp(_forward, _backward)


def _is_other(shape: tuple[int, ...], ids: Int[Array, "B T K"]) -> Bool[Array, "B T V"]:
    def without(row: Array, ids: Array) -> Array:
        return row.at[ids].set(False, mode="promise_in_bounds")

    # A scatter with batch axes, which meshes split; that of put_along_axis gathers all ids.
    return jax.vmap(jax.vmap(without))(jnp.ones(shape, bool), ids)
