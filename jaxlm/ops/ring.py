"""Attention over keys that go round the devices of the `context` axis."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxlm.ops.blocks import (
    S_AXIS,
    T_AXIS,
    Keys,
    Queries,
    Residuals,
    Slice,
    Softmax,
    StaticArgs,
    by_head,
    by_token,
    gradients,
    online_softmax_update,
    operands,
)
from jaxlm.ops.masks import Mask
from jaxlm.parallel import context


def ring_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    cap: float | None = None,
) -> Float[Array, "B T N U"]:
    """softmax(cap(scale x Q K^T) + mask) V, each of C devices meeting the keys of one device at a time.

    The keys move C - 1 times forward, and again backward, where their float32 gradients go round with them and the
    scores are made again from the saved normalizers. So a device holds the keys of T / C slots and (T / C)^2 scores,
    whatever C is. Where `context.deal` dealt the slots and the mask is causal, each hop computes the half of its
    products that is not hidden: the same amount on every device. Queries that see further have no such half.

    Raises:
      ValueError: where the slots cannot be split evenly.

    Source: Liu et al. 2023, arXiv:2310.01889; balance by dealing Brandon et al. 2023, arXiv:2311.09431, there token by
    token; running softmax and backward pass Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B.2.
    """
    terms = StaticArgs.of(mask, compute, scale=scale, cap=cap)
    if query.shape[1] % (parts := context.context_size()):
        raise ValueError(f"{query.shape[1]} slots do not divide over {parts} devices")
    asking = (mask.query_index, mask.query_segments, mask.query_reach)
    held = (mask.key_index, mask.key_segments)
    return _ring(terms, query, key, value, asking, held)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    terms: StaticArgs, query: Array, key: Array, value: Array, query_meta: Any, key_meta: Any
) -> Array:
    return _forward(terms, query, key, value, query_meta, key_meta)[0]


def _forward(
    terms: StaticArgs, query: Array, key: Array, value: Array, query_meta: Any, key_meta: Any
) -> tuple[Array, Any]:
    parts = context.context_size()

    def local(query: Array, key: Array, value: Array, asking: Any, held: Any) -> Any:
        queries, keys = operands(terms, query, key, value, asking, held)
        nothing = Softmax.of_none(queries, value.shape[-1])

        def over(keys: Keys, seen: Softmax, number: Array | int) -> Softmax:
            for q_cut, k_cut in _cuts(terms, queries, keys, number):
                more = online_softmax_update(
                    terms, q_cut.of(queries), k_cut.of(keys), q_cut.of(seen)
                )
                seen = q_cut.into(seen, more)
            return seen

        def hop(carry: tuple[Softmax, Keys], number: Array) -> tuple[Any, None]:
            seen, here = carry
            return (over(here, seen, number), context.ring_permute(here, parts)), None

        # Keys are sent on while the device computes with them.
        begun = (
            online_softmax_update(terms, queries, keys, nothing),
            context.ring_permute(keys, parts),
        )
        (seen, last), _ = lax.scan(hop, begun, jnp.arange(1, parts - 1))
        seen = over(last, seen, parts - 1)
        out = by_token(seen.out / seen.total[..., None], query)
        return out, seen.peak + jnp.log(seen.total)

    given = (query, key, value, query_meta, key_meta)
    specs, stats = _specs(*given)
    out, log_normalizer = context.on_each(local, specs, (specs[0], stats))(*given)
    return out, (*given, out, log_normalizer)


def _backward(terms: StaticArgs, kept: Any, out_grad: Array) -> tuple[Any, ...]:
    parts = context.context_size()

    def local(
        query: Array, key: Array, value: Array, asking: Any, held: Any, *rest: Array
    ) -> tuple[Array, ...]:
        queries, keys = operands(terms, query, key, value, asking, held)
        out, log_normalizer, grad = rest
        wide = by_head(grad.astype(jnp.float32), key)
        mean = (wide * by_head(out.astype(jnp.float32), key)).sum(-1)
        known = Residuals(wide.astype(terms.compute), log_normalizer, mean)

        def hop(carry: tuple[Array, Any], number: Array) -> tuple[Any, None]:
            q_grad, (keys, grads) = carry[0], context.ring_permute(carry[1], parts)
            for q_cut, k_cut in _cuts(terms, queries, keys, number):
                one, *two = gradients(terms, q_cut.of(queries), k_cut.of(keys), q_cut.of(known))
                q_grad = q_cut.into(q_grad, q_cut.of(q_grad) + one)
                grads = k_cut.into(grads, jax.tree.map(jnp.add, k_cut.of(grads), tuple(two)))
            return (q_grad, (keys, grads)), None

        q_grad, *own = gradients(terms, queries, keys, known)
        carry, _ = lax.scan(hop, (q_grad, (keys, tuple(own))), jnp.arange(1, parts))
        q_grad, (_, grads) = carry
        k_grad, v_grad = context.ring_permute(grads, parts)  # home again
        return (
            by_token(q_grad * terms.scale, query),
            k_grad.astype(key.dtype),
            v_grad.astype(value.dtype),
        )

    *given, out, log_normalizer = kept
    specs, stats = _specs(*given)
    run = context.on_each(local, (*specs, specs[0], stats, specs[0]), specs[:3])
    return (*run(*given, out, log_normalizer, out_grad), None, None)


_ring.defvjp(_forward, _backward)


def _cuts(
    terms: StaticArgs, queries: Queries, keys: Keys, number: Array | int
) -> list[tuple[Slice, Slice]]:
    """The runs of queries and of keys that meet in a hop.

    Dealt, a device holds an early and a late chunk. Its late queries see the early keys of every other device. From a
    device before it, the early queries see the early keys; from one after it, the late queries see the late keys.
    """
    t, s = queries.q.shape[T_AXIS], keys.k.shape[S_AXIS]
    if not (terms.causal and terms.is_dealt) or queries.reach is not None:
        return [(Slice(T_AXIS, 0, t), Slice(S_AXIS, 0, s))]
    is_after = jnp.asarray(number > context.shard_index(), jnp.int32)
    t, s = t // 2, s // 2
    return [
        (Slice(T_AXIS, t, t), Slice(S_AXIS, 0, s)),
        (Slice(T_AXIS, is_after * t, t), Slice(S_AXIS, is_after * s, s)),
    ]


def _specs(
    _query: Array, key: Array, _value: Array, query_meta: Any, key_meta: Any
) -> tuple[Any, Any]:
    """The layouts of the arguments, and of what is known of each query and head."""

    def slots(x: Array) -> Any:
        return context.spec(x.shape, "batch", "length")

    vectors = context.spec(key.shape, "batch", "length", "kv_heads", "head_dim")
    batch, length, heads, _ = vectors
    stats = PartitionSpec(batch, heads, None, length)
    return (*(vectors,) * 3, jax.tree.map(slots, query_meta), jax.tree.map(slots, key_meta)), stats
