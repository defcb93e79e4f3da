"""Multi-head attention with its projections: self-attention, cross-attention, latent attention."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core.precision import Precision
from jaxlm.nn import intermediates
from jaxlm.nn.cache import AnyCache, BlockedCache, EncoderKV, LayerCache, VisibleKV
from jaxlm.nn.config import AttentionConfig, RelativeBias
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import HeadLinear, Linear, parameter
from jaxlm.nn.norm import Norm
from jaxlm.ops import rope
from jaxlm.ops.attention import attention, attention_figures, attention_weights
from jaxlm.ops.cached import blocked_attention
from jaxlm.ops.kernels import Kernel
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain

HEADS = ("batch", "length", "heads", "head_dim")
KV_HEADS = ("batch", "length", "kv_heads", "head_dim")
LATENT = ("batch", "length", "rank")


# Queries [B, T, N, H], keys [B, S, K, H] and values [B, S, K, U].
QKV = tuple[Array, Array, Array]
Projected = tuple[Any, Array, Array]  # the same, or queries, shared key and latent of MLA
# Operands of the products, and the indices of the keys, of a part of the cache.
ReadKV = Callable[[VisibleKV], tuple[Array, Array, Array]]
Finish = Callable[[Array], Array]  # the heads' results from weighted sums of values


class CrossInputs(NamedTuple):
    """Outputs of an encoder, and their visibility, for a decoder's cross-attention."""

    mask: Mask
    values: Float[Array, "B S D"] | None = None
    # Without values: the keys and values of every layer, by kind.
    layers: dict[str, tuple[EncoderKV, ...]] | None = None


class LayerInputs(NamedTuple):
    """Inputs that all layers of a stack share, besides the stream."""

    positions: Int[Array, "B T"]
    mask: Mask
    memory: CrossInputs | None = None
    start: Int[Array, "B"] | None = None  # slot of each row for new tokens in a KV cache
    reach: Int[Array, ""] | None = None  # see `KVCache`


class LeadingKV(nnx.Module):
    """Keys and values of virtual tokens before every row; keys are those after norm and rotation.

    Args:
      keys: [n, K, H]; in a stack with a first axis of layers.
      values: [n, K, U], likewise.
    """

    def __init__(self, keys: nnx.Param, values: nnx.Param):
        self.keys, self.values = keys, values

    def rows(self, like: tuple[Array, Array]) -> tuple[Array, Array]:
        """Return them for each row of keys and values [B, T, K, H], in the same dtypes."""

        def row(leaf: nnx.Param, like: Array) -> Array:
            each = jnp.broadcast_to(leaf[...].astype(like.dtype), (len(like), *leaf.shape))
            return constrain(each, "batch", None, "kv_heads", "head_dim")

        return row(self.keys, like[0]), row(self.values, like[1])


class AttentionBase(nnx.Module):
    """Attention over given queries, keys and values; subclasses project them and set `out`.

    With `leading` every query sees its keys too; the mask, or the KV cache, has room for them.
    """

    config: AttentionConfig
    precision: Precision
    out: Linear
    leading: LeadingKV | None = None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: LayerInputs,
        *,
        cache: AnyCache | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], AnyCache | None]:
        """Attend over `x`, or over the cache after `x` is appended to it."""
        projected = self._project(x, inputs.positions)
        if isinstance(cache, BlockedCache):
            heads, cache = self._attend_blocks(projected, cache, inputs)
            return self._out_projection(heads), cache
        query, keys, values = projected
        mask, is_cached = inputs.mask, cache is not None
        leading = None if self.leading is None else self.leading.rows((keys, values))
        if cache is not None:
            cache = cache if leading is None else cache.preceded(*leading)
            cache, keys, values, mask = self._append(cache, keys, values, inputs)
        elif leading is not None:
            pairs = zip(leading, (keys, values), strict=True)
            keys, values = (jnp.concatenate(pair, axis=1) for pair in pairs)
        mask = dataclasses.replace(mask, window=self.config.window)
        heads = self._self_attend((query, keys, values), mask, key, is_cached=is_cached)
        return self._out_projection(heads), cache

    def _attend_blocks(
        self, projected: Projected, cache: BlockedCache, inputs: LayerInputs
    ) -> tuple[Float[Array, "B T N U"], BlockedCache]:
        """Append to the cache, and attend over its blocks up to `inputs.reach`."""
        assert inputs.start is not None
        query, keys, values = projected
        cache = cache.written(*self._entries(keys, values), inputs.start)
        query, operands, finish = self._cached_operands(query)
        heads = blocked_attention(
            query,
            lambda number: operands(cache.visible(number)),
            cache.starts,
            jnp.int32(cache.slots) if inputs.reach is None else inputs.reach,
            dataclasses.replace(inputs.mask, window=self.config.window),
            self._cache_precision,
            scale=self.config.score_scale,
            softcap=self.config.softcap,
        )
        return finish(heads), cache

    def _entries(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Return what `_project` returned as a cache stores it."""
        return keys, values

    def _cached_operands(self, query: Any) -> tuple[Array, ReadKV, Finish]:
        """Return queries over cached keys, their operands of a block, and the end of the heads."""
        return query, lambda block: block, lambda heads: heads

    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Projected:
        """Return queries, and keys and values as they are cached."""
        raise NotImplementedError

    def _apply_rope(self, positions: Int[Array, "B T"], size: int, *vectors: Array) -> list[Array]:
        """Rotate heads of this size by their positions, if the config has rotary embeddings."""
        rotary = self.config.rotary
        if rotary is None:
            return list(vectors)
        angles = rope.angles(
            positions,
            rotary.dims(size),
            rotary.theta,
            factors=rotary.factors(size),
            amplitude=rotary.scaling.amplitude,
            beyond=rotary.beyond,
        )
        return [rope.rotate(each, *angles, interleaved=rotary.interleaved) for each in vectors]

    def _append(
        self, cache: LayerCache, keys: Array, values: Array, inputs: LayerInputs
    ) -> tuple[LayerCache, Array, Array, Mask]:
        """Append to the KV cache; return it with the visible keys and values, and their mask."""
        assert inputs.start is not None
        count = inputs.mask.query_count
        cache, (keys, values, index) = cache.append(keys, values, inputs.start, count)
        mask = dataclasses.replace(inputs.mask, key_index=index, leading=cache.leading)
        return cache, keys, values, mask

    @property
    def _cache_precision(self) -> Precision:
        return dataclasses.replace(self.precision, compute=self.precision.cached)

    def _attend(
        self, qkv: QKV, mask: Mask, key: Array | None, *, kernel: Kernel, is_cached: bool
    ) -> Float[Array, "B T N U"]:
        return attention(
            *qkv,
            mask,
            self._cache_precision if is_cached else self.precision,
            scale=self.config.score_scale,
            softcap=self.config.softcap,
            dropout=self.config.dropout,
            dropout_key=key,
            kernel=kernel,
        )

    def _self_attend(
        self, qkv: Projected, mask: Mask, key: Array | None, *, is_cached: bool
    ) -> Float[Array, "B T N U"]:
        """Attend by the config's kernel, or over a cache by the reference."""
        self._record(*qkv[:2], mask)
        kernel = "reference" if is_cached else self.config.kernel
        return self._attend(qkv, mask, key, kernel=kernel, is_cached=is_cached)

    def _out_projection(self, heads: Float[Array, "B T N U"]) -> Float[Array, "B T D"]:
        return self.out(constrain(heads, *HEADS))

    def _record(self, query: Array, keys: Array, mask: Mask) -> None:
        """Record each head's largest score and entropy, over queries that are not padding.

        Record all weights if they are captured.
        """
        inputs = query, keys, mask, self.precision.compute
        scale, softcap = self.config.score_scale, self.config.softcap
        if intermediates.is_captured("weights"):
            weights = attention_weights(*inputs, scale=scale, softcap=softcap)
            intermediates.record_sum("weights", weights)
        entropy = intermediates.is_captured("entropy")
        if not (entropy or intermediates.is_captured("logits")):
            return
        peak, spread, queries = attention_figures(
            *inputs, scale=scale, softcap=softcap, entropy=entropy
        )
        intermediates.record_peak("logit_max", peak)
        if spread is not None:
            intermediates.record_sum("entropy", spread)
            intermediates.record_sum("queries", queries)


class Attention(AttentionBase):
    """Self-attention, with grouped heads, rotary embeddings, norms and softcap by the config."""

    def __init__(self, width: int, config: AttentionConfig, *, key: Array, init: Initializer):
        self.config, self.precision = config, init.precision
        keys = jax.random.split(key, 4)
        linear = functools.partial(Linear, init=init)
        stream = {"embed": width}
        queries = {"heads": config.heads, "head_dim": config.head_dim}
        shared = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        self.query = linear(stream, queries, key=keys[0], bias=config.bias)
        self.key = linear(stream, shared, key=keys[1], bias=config.bias)
        self.value = linear(stream, shared, key=keys[2], bias=config.bias)
        self.out = linear(queries, stream, key=keys[3], bias=config.out_bias, init=init.residual)

        def norm(dims: dict[str, int]) -> Norm | None:
            if config.qk_norm is None:
                return None
            axes = {"head_dim": config.head_dim} if config.qk_norm_over == "head" else dims
            return Norm(axes, config.qk_norm, dtype=init.dtype)

        self.query_norm, self.key_norm = norm(queries), norm(shared)

    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> QKV:
        query = constrain(self.query(x), *HEADS)
        keys, values = self._keys_values(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, keys = self.query_norm(query), self.key_norm(keys)
        query, keys = self._apply_rope(positions, self.config.head_dim, query, keys)
        return query, keys, values

    def _keys_values(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        return constrain(self.key(x), *KV_HEADS), constrain(self.value(x), *KV_HEADS)


class CrossAttention(Attention):
    """Queries of a decoder's tokens, keys and values of an encoder's outputs, no positions."""

    def cross_kv(self, values: Float[Array, "B S D"]) -> EncoderKV:
        """Return keys and values of the encoder's outputs."""
        return self._keys_values(values)

    def cross_attend(
        self,
        x: Float[Array, "B T D"],
        memory: CrossInputs,
        cross_kv: EncoderKV | None,
        key: Array | None,
    ) -> Float[Array, "B T D"]:
        """Attend over the encoder's outputs; `cross_kv` are their keys and values if cached."""
        is_cached = cross_kv is not None
        if cross_kv is None:
            assert memory.values is not None
            cross_kv = self.cross_kv(memory.values)
        query = constrain(self.query(x), *HEADS)
        qkv = query, *cross_kv
        heads = self._attend(qkv, memory.mask, key, kernel="reference", is_cached=is_cached)
        return self._out_projection(heads)


class LatentAttention(AttentionBase):
    """Multi-head latent attention (MLA): R numbers a token make keys and values of all heads.

        c = norm(x latent),   keys_n = [c key_n; rotated(x rotary_key)],   values_n = c value_n
        q = norm(x query_latent), or x,   queries_n = q query_n, whose last features are rotated

    The KV cache holds c and the rotated key, which all heads share. A few new tokens attend to c
    directly (weight absorption): a score is (key_n queries_n) . c, and a head's result is value_n
    times the weighted sum of c. For many tokens, as of a prompt, it is less work to project keys
    and values from c.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and appendix C.
    """

    def __init__(self, width: int, config: AttentionConfig, *, key: Array, init: Initializer):
        latent = config.latent
        assert latent is not None
        self.config, self.precision, self.latent_config = config, init.precision, latent
        names = ("query_latent", "query", "latent", "rotary_key", "key", "value", "out")
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        linear = functools.partial(Linear, init=init)
        stream, rank = {"embed": width}, latent.query_rank

        def heads(size: int) -> dict[str, int]:
            return {"heads": config.heads, "head_dim": size}

        # Its two ways of computing a head multiply other operands.
        unrounded = dataclasses.replace(
            init, precision=dataclasses.replace(init.precision, qat="none")
        )

        def per_head(name: str, size: int) -> HeadLinear:
            ins = {"latent": latent.rank}
            return HeadLinear(ins, heads(size), key=keys[name], init=unrounded)

        query_ins = stream if rank is None else {"latent": rank}
        rank_dims = {} if rank is None else {"rank": rank}
        self.query_latent = (
            linear(stream, rank_dims, key=keys["query_latent"]) if rank_dims else None
        )
        self.query_norm = Norm(rank_dims, latent.norm, dtype=init.dtype) if rank_dims else None
        self.query = linear(query_ins, heads(config.head_dim), key=keys["query"])
        self.latent = linear(stream, {"rank": latent.rank}, key=keys["latent"])
        self.latent_norm = Norm({"rank": latent.rank}, latent.norm, dtype=init.dtype)
        self.rotary_key = linear(stream, {"rank": latent.rotary_dim}, key=keys["rotary_key"])
        self.key = per_head("key", config.head_dim - latent.rotary_dim)
        self.value = per_head("value", latent.value_dim)
        self.out = linear(heads(latent.value_dim), stream, key=keys["out"], init=init.residual)

    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Projected:
        """Return queries without and with rotation, the rotated key, and the latent."""
        size = self.latent_config.rotary_dim
        query_in = x
        if self.query_latent is not None and self.query_norm is not None:
            query_in = self.query_norm(constrain(self.query_latent(x), *LATENT))
        query = constrain(self.query(query_in), *HEADS)
        latent = self.latent_norm(constrain(self.latent(x), *LATENT))
        rotary_key = constrain(self.rotary_key(x), *LATENT)[:, :, None]
        plain, rotated = query[..., :-size], query[..., -size:]
        rotated, rotary_key = self._apply_rope(positions, size, rotated, rotary_key)
        return (plain, rotated), rotary_key, latent

    def _entries(self, keys: Array, values: Array) -> tuple[Array, Array]:
        return keys, values[:, :, None]

    def _append(
        self, cache: LayerCache, keys: Array, values: Array, inputs: LayerInputs
    ) -> tuple[LayerCache, Array, Array, Mask]:
        cache, keys, values, mask = super()._append(cache, *self._entries(keys, values), inputs)
        return cache, keys, values[:, :, 0], mask

    def _self_attend(
        self, qkv: Projected, mask: Mask, key: Array | None, *, is_cached: bool
    ) -> Float[Array, "B T N U"]:
        query, rotary_key, latent = qkv
        if is_cached and self._is_absorbed(query[0].shape[1]):
            absorbed = self._absorbed(query), *_shared_head(rotary_key, latent[:, :, None])
            heads = self._attend(absorbed, mask, key, kernel="reference", is_cached=True)
            return self.value.project_heads(heads)
        keys, values = self._keys_values(latent, rotary_key, None if is_cached else "length")
        query = jnp.concatenate(query, axis=-1)
        return super()._self_attend((query, keys, values), mask, key, is_cached=is_cached)

    def _cached_operands(self, query: Any) -> tuple[Array, ReadKV, Finish]:
        if self._is_absorbed(query[0].shape[1]):

            def latents(block: VisibleKV) -> tuple[Array, Array, Array]:
                return (*_shared_head(block.keys, block.values), block.indices)

            return self._absorbed(query), latents, self.value.project_heads

        def operands(block: VisibleKV) -> tuple[Array, Array, Array]:
            keys, values = self._keys_values(block.values[:, :, 0], block.keys, None)
            return keys, values, block.indices

        return jnp.concatenate(query, axis=-1), operands, lambda heads: heads

    def _absorbed(self, query: tuple[Array, Array]) -> Float[Array, "B T N R+h"]:
        plain, rotated = query
        return jnp.concatenate((self.key.absorb_query(plain), rotated), axis=-1)

    def _keys_values(
        self, latent: Float[Array, "B S R"], rotary_key: Float[Array, "B S 1 h"], length: str | None
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N U"]]:
        """Project keys and values of all heads; `length` is the logical axis of S."""
        axes = ("batch", length, "heads", "head_dim")
        keys, values = constrain(self.key(latent), *axes), constrain(self.value(latent), *axes)
        # Broadcast in float32: the gradient of the shared key is the sum over all heads.
        shape = (*keys.shape[:3], rotary_key.shape[-1])
        shared = jnp.broadcast_to(rotary_key.astype(jnp.float32), shape).astype(keys.dtype)
        return jnp.concatenate((keys, shared), axis=-1), values

    def _is_absorbed(self, length: int) -> bool:
        """Return whether weight absorption costs `length` queries fewer FLOPs than projection.

        For each cached latent and head: 2 T (2 R + h) against 2 R (H - h + U) + 2 T (H + U).
        """
        latent, size = self.latent_config, self.config.head_dim
        plain = size - latent.rotary_dim + latent.value_dim
        return length * (2 * latent.rank - plain) < latent.rank * plain


def _shared_head(
    rotary_key: Float[Array, "B S 1 h"], latent: Float[Array, "B S 1 R"]
) -> tuple[Float[Array, "B S 1 R+h"], Float[Array, "B S 1 R"]]:
    """Return keys and values of the one head that absorbed queries read."""
    return jnp.concatenate((latent, rotary_key), axis=-1), latent


class RelativePositions(nnx.Module):
    """A bias for each head and bucket of distances; all layers of a stack share the table.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    def __init__(self, heads: int, config: RelativeBias, *, key: Array, init: Initializer):
        self.config = config
        self.table = parameter(init.table(key, (config.buckets, heads)), "positions", "heads")

    def __call__(self, query: Int[Array, "B T"], key: Int[Array, "B S"]) -> Float[Array, "B N T S"]:
        """Return the biases of these indices, float32; the batch axis is 1 if all rows agree."""
        distance = key[:, None, :] - query[:, :, None]
        table = self.table[...].astype(jnp.float32)
        biases = table.at[bucket(distance, self.config)].get(mode="promise_in_bounds")
        rows = "batch" if distance.shape[0] > 1 else None
        return constrain(jnp.moveaxis(biases, -1, 1), rows, "heads", None, None)


def bucket(distance: Int[Array, "..."], config: RelativeBias) -> Int[Array, "..."]:
    """Return the bucket of each distance, key minus query.

    Of n buckets for one direction, a distance d below n / 2 has its own; larger ones share
    floor(n/2 + n/2 log(d / (n/2)) / log(max_distance / (n/2))), at most n - 1. With `both_ways`
    each direction has half of the buckets; otherwise a key after its query counts as distance 0.
    """
    count = config.buckets // 2 if config.both_ways else config.buckets
    first = jnp.where(distance > 0, count, 0) if config.both_ways else jnp.zeros_like(distance)
    distance = jnp.abs(distance) if config.both_ways else jnp.maximum(-distance, 0)
    exact = count // 2
    share = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact)
    share = share / math.log(config.max_distance / exact) * (count - exact)
    shared = jnp.minimum(exact + share.astype(jnp.int32), count - 1)
    return first + jnp.where(distance < exact, distance, shared)
