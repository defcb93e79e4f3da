"""An encoder that reads a text, and a decoder that writes another with cross attention to it."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models import backbone
from jaxlm.models import config as configs
from jaxlm.models.backbone import Backbone, Execution, Hidden, Unembedder
from jaxlm.models.decoder import cache_mask
from jaxlm.nn.attention import CrossInputs
from jaxlm.nn.cache import CrossKV, KVCache
from jaxlm.nn.dropout import dropout, noise, noise_key
from jaxlm.ops import masks
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class EncoderDecoder(nnx.Module, Unembedder):
    """One embedding, the layers of the encoder and of the decoder, and the unembedding.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1; as in T5, arXiv:1910.10683.
    """

    def __init__(self, config: configs.EncoderDecoderConfig, execution: Execution, *, key: Array):
        if execution.schedule is not None:
            raise ValueError("an encoder-decoder has no pipeline schedule")
        self.config, self.precision = config, execution.precision
        init = backbone.initializer(config.encoder, execution.precision)

        output = backbone.EmbeddingBuilder(config.width, key, init)
        wide = dataclasses.replace(output, init=dataclasses.replace(init, std=config.embed_std))

        def side(name: str, layers: configs.BackboneConfig) -> Backbone:
            return Backbone(layers, execution, key=random.stream(key, name), side=f"{name}/")

        self.embedding = wide.table("embedding", config.vocab, "vocab")
        self.encoder, self.decoder = (
            side("encoder", config.encoder),
            side("decoder", config.decoder),
        )
        self.unembedding = output.unembedding(config.vocab, tied=config.tied)

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None,
        key: Array | None = None,
    ) -> Hidden:
        """Return the encoder's output; each segment is read by itself, in both directions."""
        mask = masks.both_ways(source.shape[1], segments)
        return self._apply_side(self.encoder, source, mask, None, None, key)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        source: Int[Array, "B S"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        source_segments: Int[Array, "B S"] | None = None,
        cache: KVCache | None = None,
        key: Array | None = None,
    ) -> Hidden:
        """Read `tokens` from left to right, with cross attention to the source's same segment.

        Args:
          tokens: ids.
          positions: unused, as relative biases depend on distances in slots.
          source: ids that the encoder reads.
          segments: documents packed into a row of tokens, from 1; 0 is padding.
          source_segments: the documents of the source.
          cache: KV cache from `init_cache`, instead of a source.
          key: turns dropout on.

        Raises:
          ValueError: unless there is either a source or a cache.
        """
        if (source is None) == (cache is None):
            raise ValueError("an encoder-decoder needs either a source or a cache of one")
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        losses: dict[str, Mean] = {}
        if source is not None:
            encoded = self.encode(source, source_segments, keys[0])
            mask, losses = masks.causal(tokens.shape[1], segments), encoded.losses
            cross = _cross_mask(tokens, source, segments, source_segments)
            memory = CrossInputs(cross, values=encoded.values)
        else:
            assert cache is not None
            assert cache.source is not None
            mask, cached = cache_mask(cache, tokens.shape[1]), cache.source.segments
            cross = _cross_mask(tokens, cached, jnp.ones_like(tokens), cached)
            memory = CrossInputs(cross, layers=cache.source.layers)
        hidden = self._apply_side(self.decoder, tokens, mask, memory, cache, keys[1])
        return hidden._replace(losses=Mean.merged(losses, hidden.losses))

    def read(self, batch: Tokens, *, key: Array | None, parts: int = 1) -> Hidden:
        """Return the decoder's output for a batch. Raises ValueError if the batch has no source."""
        return self.hidden(
            batch.tokens,
            positions=batch.positions,
            source=batch.source,
            segments=batch.segments,
            source_segments=batch.source_segments,
            key=key,
        )

    def init_cache(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"],
        slots: int,
        *,
        is_int8: bool = False,
    ) -> KVCache:
        """Return a KV cache for up to `slots` tokens a row, with the source's keys and values.

        Args:
          source, segments: ids that the encoder reads, and their documents.
          slots: as in `Backbone.empty_cache`.
          is_int8: round keys and values of tokens to int8; the source's have `Precision.cached`.
        """
        layers = self.decoder.stack.cross_kv(self.encode(source, segments).values)
        cross = jax.tree.map(lambda x: x.astype(self.precision.cached), layers)
        cache = self.decoder.empty_cache(source.shape[0], slots, is_int8=is_int8)
        return cache._replace(source=CrossKV(cross, segments))

    def relayout_for_decode(self) -> Self:
        """Relayout decoder and unembedding in place for decoding, see `Backbone.unstack_layers`."""
        self.decoder.unstack_layers()
        self.relayout_unembedding()
        return self

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits, float32, of all rows or of a chunk of them."""
        out = self.unembed(hidden * self.config.output_scale)
        return constrain(out, "batch", "length", "vocab")

    def _apply_side(
        self,
        side: Backbone,
        tokens: Array,
        mask: Mask,
        memory: CrossInputs | None,
        cache: KVCache | None,
        key: Array | None,
    ) -> Hidden:
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        x = noise(self.embedding(tokens), side.config.embedding_noise, noise_key(key))
        x = constrain(x.astype(self.precision.activations), "batch", "length", None)
        x = dropout(x, side.config.dropout, keys[0])
        slots = jnp.broadcast_to(mask.query_index, tokens.shape)
        return side.apply_layers(
            x, positions=slots, mask=mask, memory=memory, cache=cache, keys=(None, keys[1])
        )


def _cross_mask(
    tokens: Array, source: Array, segments: Array | None, source_segments: Array | None
) -> Mask:
    """Return the mask of cross attention: each token sees the source's same segment."""
    return Mask(
        query_index=jnp.arange(tokens.shape[1], dtype=jnp.int32)[None],
        key_index=jnp.arange(source.shape[1], dtype=jnp.int32)[None],
        query_segments=segments,
        key_segments=source_segments,
        causal=False,
    )
