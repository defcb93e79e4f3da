"""An encoder that reads a text both ways, and a decoder that writes another, attending to what was read."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models import config as configs
from jaxlm.models.backbone import Backbone, EmbeddingBuilder, Execution, Hidden, initializer
from jaxlm.models.decoder import cache_mask
from jaxlm.nn.attention import CrossInputs
from jaxlm.nn.cache import CrossKV, KVCache
from jaxlm.nn.dropout import dropout, noise, noise_key
from jaxlm.ops import masks
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class EncoderDecoder(nnx.Module):
    """One embedding, the blocks of the encoder and of the decoder, and the unembedding.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1; as in T5, arXiv:1910.10683.
    """

    def __init__(self, config: configs.EncoderDecoder, execution: Execution, *, key: Array):
        if execution.schedule is not None:
            raise ValueError("a pipeline of an encoder-decoder")
        self.config, self.precision = config, execution.precision
        init = initializer(config.encoder, execution.precision)

        def ends(std: float) -> EmbeddingBuilder:
            drawn = dataclasses.replace(init, std=std)
            return EmbeddingBuilder(config.width, key, drawn, execution.precision)

        def side(name: str, backbone: configs.Backbone) -> Backbone:
            return Backbone(backbone, execution, key=random.stream(key, name), at=f"{name}/")

        self.embedding = ends(config.embed_std).table("embedding", config.vocab, "vocab")
        self.encoder = side("encoder", config.encoder)
        self.decoder = side("decoder", config.decoder)
        self.unembedding = (
            None if config.tied else ends(config.encoder.init_std).unembedding(config.vocab)
        )

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None,
        key: Array | None = None,
    ) -> Hidden:
        """Reads `source` both ways, each segment for itself."""
        mask = masks.both_ways(source.shape[1], segments)
        return self._through(self.encoder, source, mask, None, None, key)

    def __call__(
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
        """Reads `tokens` from left to right, each after its own segment of `source`; or after those in a cache that `begun`.

        `positions` say nothing here: distances do, in slots. `key` turns dropout on.

        Raises:
          ValueError: where there is neither a source nor a cache, or both.
        """
        if (source is None) == (cache is None):
            raise ValueError("either a source or a cache that knows one")
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        losses: dict[str, Mean] = {}
        if source is not None:
            read = self.encode(source, source_segments, keys[0])
            mask, losses = masks.causal(tokens.shape[1], segments), read.losses
            across = _across(tokens, source, segments, source_segments)
            memory = CrossInputs(across, values=read.values)
        else:
            assert cache is not None
            assert cache.source is not None
            mask, seen = cache_mask(cache, tokens.shape[1]), cache.source.segments
            across = _across(tokens, seen, jnp.ones_like(tokens), seen)
            memory = CrossInputs(across, layers=cache.source.layers)
        hidden = self._through(self.decoder, tokens, mask, memory, cache, keys[1])
        return hidden._replace(losses=Mean.merged(losses, hidden.losses))

    def read(self, batch: Tokens, *, key: Array | None, dealt: int = 1) -> Hidden:
        """What the decoder makes of a batch, see `__call__`. Raises ValueError where the batch has no source."""
        return self(
            batch.tokens,
            positions=batch.positions,
            source=batch.source,
            segments=batch.segments,
            source_segments=batch.source_segments,
            key=key,
        )

    def begun(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"],
        slots: int,
        *,
        is_int8: bool = False,
        spare: int = 0,
    ) -> KVCache:
        """A cache for up to `slots` tokens a row, with the keys and values of what the encoder makes of `source`.

        With `is_int8` those of the tokens are rounded; those of the source are as activations are. `spare` is that of
        `Backbone.empty_cache`.
        """
        values = self.encode(source, segments).values
        known = jax.tree.map(
            lambda x: x.astype(self.precision.activations), self.decoder.stack.across(values)
        )
        cache = self.decoder.empty_cache(source.shape[0], slots, is_int8=is_int8, spare=spare)
        return cache._replace(source=CrossKV(known, segments))

    def unstacked(self) -> Self:
        """The same model as a loop over tokens reads it, see `Backbone.unstacked`: the decoder and the unembedding."""
        self.decoder.unstack_layers()
        if self.unembedding is None:
            self.embedding.settle()
        else:
            self.unembedding.relayout_for_decode()
        return self

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Scores of every id, float32; apart from the call so that a loss may take the rows in chunks."""
        hidden = hidden * self.config.output_scale
        out = (
            self.embedding.unembed(hidden) if self.unembedding is None else self.unembedding(hidden)
        )
        return constrain(out, "batch", "length", "vocab")

    def _through(
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
        places = jnp.broadcast_to(mask.query_index, tokens.shape)
        return side.apply_layers(
            x, positions=places, mask=mask, memory=memory, cache=cache, keys=(None, keys[1])
        )


def _across(
    tokens: Array, source: Array, segments: Array | None, source_segments: Array | None
) -> Mask:
    """What each token sees of the source: its segment."""
    return Mask(
        query_index=jnp.arange(tokens.shape[1], dtype=jnp.int32)[None],
        key_index=jnp.arange(source.shape[1], dtype=jnp.int32)[None],
        query_segments=segments,
        key_segments=source_segments,
        causal=False,
    )
