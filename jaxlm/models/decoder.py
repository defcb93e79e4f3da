"""The decoder-only language model."""

from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models import backbone
from jaxlm.models import config as configs
from jaxlm.models.backbone import Backbone, Execution, Hidden, Unembedder
from jaxlm.models.heads import Heads, ScoreHead
from jaxlm.nn.attention import LayerInputs
from jaxlm.nn.cache import AnyCache, KVCache
from jaxlm.nn.dropout import dropout, noise, noise_key
from jaxlm.ops import masks
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class Decoder(Backbone, Unembedder):
    """Embedding, layers, norm, unembedding."""

    reward: ScoreHead | None = None  # of a reward model
    value: ScoreHead | None = None  # of PPO

    def __init__(self, config: configs.DecoderConfig, execution: Execution, *, key: Array):
        super().__init__(config, execution, key=key)
        self.config: configs.DecoderConfig = config
        init = backbone.initializer(config, execution.precision)
        tables = backbone.EmbeddingBuilder(config.width, key, init)
        self.embedding = tables.table("embedding", config.vocab, "vocab")
        self.positions = tables.positions("positions", config.positions)
        self.inner = tables.positions("inner", config.inner_positions)
        remat = execution.remat.partition("/")[0]
        self.heads = (
            Heads(config, config.mtp, key=random.stream(key, "heads"), init=init, remat=remat)
            if config.mtp
            else None
        )
        self.unembedding = tables.unembedding(config.vocab, tied=config.tied)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        visible_until: Int[Array, "B T"] | None = None,
        prefix_segments: Int[Array, "B T"] | None = None,
        block_positions: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        count: Int[Array, "B"] | None = None,
        key: Array | None = None,
        parts: int = 1,
    ) -> Hidden:
        """Read `tokens` from left to right, each segment by itself, or after the tokens of `cache`.

        Args:
          tokens: ids.
          positions: of the tokens in their documents.
          segments: documents packed into a row, from 1; 0 is padding.
          visible_until: last slot of row or cache that each token sees, instead of its own.
          prefix_segments: second segment that each token sees, see `ops.masks.Mask`.
          block_positions: GLM's block positions, 0 by default, for a model with a table of them.
          cache: KV cache; it is returned with these tokens, and the caller advances its `length`.
          count: real tokens of each row that is written to the cache; the others are padding.
          key: turns dropout on.
          parts: devices over which `parallel.context` sharded the tokens of each row in zigzag.

        Raises:
          ValueError: if there are segments and a cache, which stores no segments.
        """
        if segments is not None and cache is not None:
            raise ValueError("segments with a cache: each row of a cache is one sequence")
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        x = self.embedding(tokens) * self.config.embed_scale
        x = noise(x, self.config.embedding_noise, noise_key(key))
        blocks = jnp.zeros_like(tokens) if block_positions is None else block_positions
        positions = positions + self.leading
        mask = (
            masks.causal(
                tokens.shape[1],
                segments,
                visible_until,
                prefix_segments=prefix_segments,
                parts=parts,
            )
            if cache is None
            else cache_mask(cache, tokens.shape[1], visible_until, count)
        )
        before = None
        if cache is None and self.virtual is not None:
            before = self._virtual_rows(len(tokens))
            mask = mask.preceded(self.leading, is_queried=before is not None)
        if before is not None:
            x, positions, blocks = (
                jnp.concatenate((first, then.astype(first.dtype)), axis=1)
                for first, then in zip(before, (x, positions, blocks), strict=True)
            )
        x = dropout(self._add_tables(x, positions, blocks), self.config.dropout, keys[0])
        hidden = self.apply_layers(
            x, positions=positions, mask=mask, cache=cache, keys=(keys[1], keys[2])
        )
        if before is None:
            return hidden
        values, stream = (each[:, self.leading :] for each in (hidden.values, hidden.stream))
        return hidden._replace(values=values, stream=stream)

    @property
    def text_positions(self) -> int | None:
        """See `Unembedder.text_positions`; virtual tokens have positions of their own."""
        rows = super().text_positions
        return None if rows is None else rows - self.leading

    def _add_tables(self, x: Array, positions: Array, block_positions: Array) -> Array:
        """Return the stream before the first layer, in the dtype of activations."""
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.inner is not None:
            x = x + self.inner(block_positions)
        return constrain(x.astype(self.precision.activations), "batch", "length", None)

    def _virtual_rows(self, rows: int) -> tuple[Array, Array, Array] | None:
        """Return embeddings, positions and block positions of virtual tokens that have a stream."""
        if self.virtual is None or self.virtual.rows is None:
            return None
        positions = jnp.broadcast_to(
            jnp.arange(self.leading, dtype=jnp.int32), (rows, self.leading)
        )
        stream = self.virtual.rows[...].astype(jnp.float32)
        stream = jnp.broadcast_to(stream, (rows, *stream.shape))
        return stream, positions, jnp.zeros_like(positions)

    def empty_cache(
        self,
        rows: int,
        slots: int,
        *,
        is_int8: bool = False,
        spare: int = 0,
        block: int | None = None,
    ) -> KVCache:
        """Return a KV cache that has read the virtual tokens alone.

        Args: as in `Backbone.empty_cache`.
        """
        cache = super().empty_cache(rows, slots, is_int8=is_int8, spare=spare, block=block)
        virtual = self._virtual_rows(rows)
        if virtual is None:
            return cache
        length = cache.length
        before = cache._replace(length=length - self.leading)
        hidden = self.apply_layers(
            self._add_tables(*virtual),
            positions=virtual[1],
            mask=cache_mask(before, self.leading),
            cache=before,
        )
        assert hidden.cache is not None
        return hidden.cache._replace(length=length)

    def read(self, batch: Tokens, *, key: Array | None, parts: int = 1) -> Hidden:
        """Return the output for a batch, see `hidden`."""
        return self.hidden(
            batch.tokens,
            positions=batch.positions,
            segments=batch.segments,
            visible_until=batch.visible_until,
            prefix_segments=batch.prefix_segments,
            block_positions=batch.block_positions,
            key=key,
            parts=parts,
        )

    def mtp_hidden(
        self,
        stream: Float[Array, "B T D"],
        ahead: list[tuple[Int[Array, "B T"], Bool[Array, "B T"]]],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        key: Array | None = None,
        parts: int = 1,
    ) -> tuple[list[Float[Array, "B T D"]], dict[str, Mean]]:
        """Return inputs of the unembedding for the tokens 2, 3, ... ahead, and auxiliary losses.

        Args:
          stream: `Hidden.stream` of the same tokens.
          ahead: ids and existence of the tokens 1, 2, ... ahead, see `heads.Heads`.
          positions, segments, key, parts: as in `hidden`.
        """
        assert self.heads is not None

        def embed(ids: Array) -> Array:
            return self.embedding(ids) * self.config.embed_scale

        mask = masks.causal(stream.shape[1], segments, parts=parts)
        return self.heads(stream, embed, ahead, LayerInputs(positions, mask), key=key)

    def empty_head_caches(
        self, rows: int, slots: int, *, spare: int, block: int | None
    ) -> tuple[AnyCache, ...]:
        """Return the KV cache of each head.

        Args: as in `Backbone.empty_cache`; virtual tokens are not read by heads.
        """
        sizes, dtype = (rows, slots, spare, 0), self.precision.cached
        return tuple(
            backbone.layer_cache(layer, sizes, dtype, block) for layer in self.config.heads
        )

    def read_head(
        self,
        number: int,
        stream: Float[Array, "B T D"],
        ahead: Int[Array, "B T"],
        inputs: LayerInputs,
        cache: AnyCache,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], AnyCache]:
        """Read tokens with a head and its cache.

        Return the stream that the next head reads, the input of the unembedding, and the cache.

        Args:
          number: the head; it predicts the token `number` + 2 ahead.
          stream: what `Hidden.stream`, or the head before, has at the tokens.
          ahead: ids of the tokens `number` + 1 ahead.
          inputs: positions, mask and slots of the tokens, as those of a layer.
          cache: KV cache of the head.
        """
        assert self.heads is not None
        head = self.heads.head(number)

        def token() -> Array:
            return self.embedding(ahead) * self.config.embed_scale

        x, written, _ = head(stream, token, inputs, None, cache)
        assert written is not None
        return stream if self.heads.kind == "parallel" else x, head.normed(x), written

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits, float32, of all rows or of a chunk of them."""
        out = constrain(self.unembed(hidden), "batch", "length", "vocab")
        if self.config.width_ratio != 1:
            out = out / self.config.width_ratio
        if self.config.logit_scale != 1:
            out = out * self.config.logit_scale
        cap = self.config.logit_softcap
        return out if cap is None else cap * jnp.tanh(out / cap)

    def relayout_for_decode(self) -> Self:
        """Relayout the model in place for decoding, see `Backbone.unstack_layers`."""
        self.relayout_unembedding()
        if self.heads is not None:
            self.heads.relayout_for_decode()
        return self.unstack_layers()


def cache_mask(
    cache: KVCache,
    length: int,
    visible_until: Int[Array, "B T"] | None = None,
    count: Int[Array, "B"] | None = None,
) -> Mask:
    """Return the mask of `length` new tokens in row b's slots from length[b] on.

    Each sees every slot up to its own or to `visible_until`. Each layer's cache sets key indices.
    """
    query = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return Mask(query_index=query, key_index=query, visible_until=visible_until, query_count=count)
