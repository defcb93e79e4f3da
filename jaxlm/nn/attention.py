"""Multi-head attention with its projections."""

import dataclasses
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core.precision import Precision
from jaxlm.nn import intermediates
from jaxlm.nn.cache import EncoderKV, LayerCache
from jaxlm.nn.config import AttentionConfig
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear
from jaxlm.nn.norm import Norm
from jaxlm.ops import attention as ops
from jaxlm.ops import rope
from jaxlm.ops.attention_figures import attention_figures
from jaxlm.ops.kernels import Kernel
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class CrossInputs(NamedTuple):
    """What a decoder attends to across: what an encoder made of its tokens, and which of it each query sees.

    Without `values` the keys and values of every layer are known already, by kind.
    """

    mask: Mask
    values: Float[Array, "B S D"] | None = None
    layers: dict[str, tuple[EncoderKV, ...]] | None = None


class AttentionBase(nnx.Module):
    """What every kind of attention does once there are queries, keys and values: a subclass has made them, and `out`."""

    config: AttentionConfig
    precision: Precision
    out: Linear

    @property
    def _scale(self) -> float:
        config = self.config
        return config.head_dim**-0.5 if config.scale is None else config.scale

    def _apply_rope(self, positions: Int[Array, "B T"], size: int, *vectors: Array) -> list[Array]:
        """Vectors of heads of this size, rotated by their positions where the config says so."""
        rotary = self.config.rotary
        if rotary is None:
            return list(vectors)
        turns = rope.angles(
            positions,
            rotary.dims(size),
            rotary.theta,
            factors=rotary.factors(size),
            amplitude=rotary.scaling.amplitude,
            beyond=rotary.beyond,
        )
        return [rope.rotate(each, *turns, pairs=rotary.pairs) for each in vectors]

    def _attend(
        self,
        query: Float[Array, "B T N H"],
        keys: Float[Array, "B S K H"],
        values: Float[Array, "B S K U"],
        mask: Mask,
        key: Array | None,
        *,
        kernel: Kernel,
        is_cached: bool,
    ) -> Float[Array, "B T N U"]:
        """What queries read of the values."""
        precision = self.precision
        if is_cached:
            # A cache is as activations are. On CPU casting it for every token costs more than it saves, and XLA has no
            # product of bfloat16 in batches there (jax 0.12).
            precision = dataclasses.replace(precision, compute=precision.activations)
        return ops.attention(
            query,
            keys,
            values,
            mask,
            precision,
            scale=self._scale,
            cap=self.config.cap,
            dropout=self.config.dropout,
            dropout_key=key,
            kernel=kernel,
        )

    def _self_attend(
        self,
        query: Float[Array, "B T N H"],
        keys: Float[Array, "B S K H"],
        values: Float[Array, "B S K U"],
        mask: Mask,
        key: Array | None,
        *,
        is_cached: bool,
    ) -> Float[Array, "B T D"]:
        """What queries of the same tokens read, on the stream; by the config's kernel, of a cache by the reference."""
        self._note(query, keys, mask)
        kernel = "reference" if is_cached else self.config.kernel
        read = self._attend(query, keys, values, mask, key, kernel=kernel, is_cached=is_cached)
        return self._out_projection(read)

    def _out_projection(self, heads: Float[Array, "B T N U"]) -> Float[Array, "B T D"]:
        """What heads have read, on the stream."""
        return self.out(constrain(heads, "batch", "length", "heads", "head_dim"))

    def _note(self, query: Array, keys: Array, mask: Mask) -> None:
        """Each head's largest score and its entropy, of queries that are not padding."""
        entropy = intermediates.is_captured("entropy")
        if not (entropy or intermediates.is_captured("logits")):
            return
        peak, spread, queries = attention_figures(
            query,
            keys,
            mask,
            self.precision.compute,
            scale=self._scale,
            cap=self.config.cap,
            entropy=entropy,
        )
        intermediates.record_peak("logit_max", peak)
        if spread is not None:
            intermediates.record_sum("entropy", spread)
            intermediates.record_sum("queries", queries)


class Attention(AttentionBase):
    """Queries, keys and values of the same tokens; grouped, rotated, normed and capped as the config says."""

    def __init__(
        self,
        width: int,
        config: AttentionConfig,
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
    ):
        self.config, self.precision = config, precision
        keys = jax.random.split(key, 4)
        stream = {"embed": width}
        queries = {"heads": config.heads, "head_dim": config.head_dim}
        shared = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        self.query = Linear(
            stream, queries, key=keys[0], init=init, precision=precision, bias=config.bias
        )
        self.key = Linear(
            stream, shared, key=keys[1], init=init, precision=precision, bias=config.bias
        )
        self.value = Linear(
            stream, shared, key=keys[2], init=init, precision=precision, bias=config.bias
        )
        self.out = Linear(
            queries,
            stream,
            key=keys[3],
            init=init,
            precision=precision,
            bias=config.out_bias,
            ends_on_residual=True,
        )

        def norm(dims: dict[str, int]) -> Norm | None:
            if config.qk_norm is None:
                return None
            over = {"head_dim": config.head_dim} if config.qk_norm_over == "head" else dims
            return Norm(over, config.qk_norm, dtype=init.dtype)

        self.query_norm, self.key_norm = norm(queries), norm(shared)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        cache: LayerCache | None = None,
        start: Int[Array, "B"] | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Attends over `x`, or over the cache once `x` is written into it from slot `start` on."""
        config = self.config
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        keys, values = self._keys(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, keys = self.query_norm(query), self.key_norm(keys)
        query, keys = self._apply_rope(positions, config.head_dim, query, keys)
        if cache is not None:
            assert start is not None
            cache, (keys, values, index) = cache.extended(keys, values, start, mask.query_count)
            mask = dataclasses.replace(mask, key_index=index)
        mask = dataclasses.replace(mask, window=config.window)
        return self._self_attend(query, keys, values, mask, key, is_cached=cache is not None), cache

    def _keys(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        """Keys and values, as they are projected."""
        axes = ("batch", "length", "kv_heads", "head_dim")
        return constrain(self.key(x), *axes), constrain(self.value(x), *axes)


class CrossAttention(Attention):
    """Queries of a decoder's tokens, keys and values of what an encoder has read; positions play no part."""

    def cross_kv(self, values: Float[Array, "B S D"]) -> EncoderKV:
        """The keys and values of what the encoder made of its tokens."""
        return self._keys(values)

    def cross_attend(
        self,
        x: Float[Array, "B T D"],
        memory: CrossInputs,
        known: EncoderKV | None,
        key: Array | None,
    ) -> Float[Array, "B T D"]:
        """What `x` reads of the memory, whose keys and values may be `known`."""
        is_cached = known is not None
        if known is None:
            assert memory.values is not None
            known = self.cross_kv(memory.values)
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        read = self._attend(
            query, *known, memory.mask, key, kernel="reference", is_cached=is_cached
        )
        return self._out_projection(read)
