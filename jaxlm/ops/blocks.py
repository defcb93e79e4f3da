"""Attention over one block of keys after another: a running softmax, and its gradients block by block."""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlm.ops.masks import HIDDEN, Mask

Tree = TypeVar("Tree")
T_AXIS, S_AXIS = 3, 1  # of every array of queries, and of keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticArgs:
    """What is fixed when the program is compiled."""

    scale: float
    cap: float | None
    compute: jnp.dtype
    causal: bool
    window: int | None
    is_dealt: bool

    @classmethod
    def of(cls, mask: Mask, compute: jnp.dtype, *, scale: float, cap: float | None) -> "StaticArgs":
        """Those of attention under a mask."""
        return cls(
            scale=scale,
            cap=cap,
            compute=compute,
            causal=mask.causal,
            window=mask.window,
            is_dealt=mask.is_dealt,
        )


class Queries(NamedTuple):
    """A device's queries, scaled, in the compute dtype; each of K key heads serves G."""

    q: Float[Array, "B K G T H"]
    slots: Int[Array, "B 1 1 T"]
    segments: Int[Array, "B 1 1 T"] | None
    reach: Int[Array, "B 1 1 T"] | None


class Keys(NamedTuple):
    """The keys that are with a device, and go on to the next."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K U"]
    slots: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None


class Softmax(NamedTuple):
    """The softmax over the keys so far, in float32."""

    out: Float[Array, "B K G T U"]  # sum of exp(score - peak) x value
    peak: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]  # sum of exp(score - peak)

    @classmethod
    def of_none(cls, queries: Queries, size: int) -> "Softmax":
        """That of these queries before they have met a key, of values of this size."""
        shape = queries.q.shape[:-1]
        return cls(
            jnp.zeros((*shape, size), jnp.float32),
            jnp.full(shape, HIDDEN, jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )


class Residuals(NamedTuple):
    """What the backward pass knows of each query beside its own vector."""

    grad: Float[Array, "B K G T U"]
    log_normalizer: Float[Array, "B K G T"]
    mean: Float[Array, "B K G T"]  # of the gradients of its weights, weighed: sum_h grad x out


class Slice(NamedTuple):
    """A run of slots: `size` from `start` on, along one axis of every array."""

    axis: int
    start: Any
    size: int

    def of(self, tree: Tree) -> Tree:
        """The run of every array."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, self.start, self.size, self.axis), tree
        )

    def into(self, tree: Tree, part: Tree) -> Tree:
        """The arrays with this run of them replaced."""
        return jax.tree.map(
            lambda x, y: lax.dynamic_update_slice_in_dim(x, y, self.start, self.axis), tree, part
        )


def operands(
    terms: StaticArgs, query: Array, key: Array, value: Array, query_meta: Any, key_meta: Any
) -> tuple[Queries, Keys]:
    """Queries by key head and keys by slot, in the compute dtype.

    `asking` is (slots, segments, reach) of the queries, `held` (slots, segments) of the keys.
    """
    scaled = by_head((query * terms.scale).astype(terms.compute), key)
    return Queries(scaled, *jax.tree.map(lambda x: x[:, None, None], query_meta)), Keys(
        key.astype(terms.compute), value.astype(terms.compute), *key_meta
    )


def by_head(x: Array, key: Array) -> Array:
    """[B, T, N, H] as [B, K, G, T, H]."""
    grouped = x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[3])
    return grouped.transpose(0, 2, 3, 1, 4)


def by_token(x: Array, like: Array) -> Array:
    """[B, K, G, T, H] as [B, T, N, H], in the dtype of another."""
    batch, kv_heads, groups, length, size = x.shape
    turned = x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, size)
    return turned.astype(like.dtype)


def online_softmax_update(
    terms: StaticArgs, queries: Queries, keys: Keys, before: Softmax
) -> Softmax:
    """The softmax with some more keys in it."""
    scores, _ = _scores(terms, queries, keys)
    peak = jnp.maximum(before.peak, scores.max(-1))
    weights = jnp.exp(scores - peak[..., None])
    kept = jnp.exp(before.peak - peak)
    added = _scaled_product("bkgts,bskh->bkgth", weights.astype(terms.compute), keys.v)
    return Softmax(
        before.out * kept[..., None] + added, peak, before.total * kept + weights.sum(-1)
    )


def gradients(
    terms: StaticArgs, queries: Queries, keys: Keys, known: Residuals
) -> tuple[Array, Array, Array]:
    """What these queries and keys add to the gradients of q, k and v."""
    scores, slope = _scores(terms, queries, keys)
    weights = jnp.exp(scores - known.log_normalizer[..., None])
    v_grad = _scaled_product("bkgts,bkgth->bskh", weights.astype(terms.compute), known.grad)
    weights_grad = _scaled_product("bkgth,bskh->bkgts", known.grad, keys.v)
    scores_grad = weights * (weights_grad - known.mean[..., None]) * slope
    low = scores_grad.astype(terms.compute)
    return (
        _scaled_product("bkgts,bskh->bkgth", low, keys.k),
        _scaled_product("bkgts,bkgth->bskh", low, queries.q),
        v_grad,
    )


def _scores(terms: StaticArgs, queries: Queries, keys: Keys) -> tuple[Array, Array | float]:
    """Capped and masked, and the slope of the cap."""
    scores = _scaled_product("bkgth,bskh->bkgts", queries.q, keys.k)
    slope: Array | float = 1.0
    if terms.cap is not None:
        bent = jnp.tanh(scores / terms.cap)
        scores, slope = terms.cap * bent, 1.0 - jnp.square(bent)
    mask = Mask(
        query_index=queries.slots[:, 0, 0],
        key_index=keys.slots,
        query_segments=None if queries.segments is None else queries.segments[:, 0, 0],
        key_segments=keys.segments,
        query_reach=None if queries.reach is None else queries.reach[:, 0, 0],
        causal=terms.causal,
        window=terms.window,
    )
    return jnp.where(mask.materialise()[:, None, None], scores, HIDDEN), slope


def _scaled_product(terms: str, x: Array, y: Array) -> Array:
    return jnp.einsum(terms, x, y, preferred_element_type=jnp.float32)
