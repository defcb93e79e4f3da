"""The decoder-only language model."""

from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.data.batch import Tokens
from jaxlm.models import config as configs
from jaxlm.models.backbone import Backbone, EmbeddingBuilder, Execution, Hidden, initializer
from jaxlm.models.heads import Heads
from jaxlm.nn.cache import KVCache
from jaxlm.nn.dropout import dropout, noise, noise_key
from jaxlm.ops import masks
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class Decoder(Backbone):
    """Embedding, blocks, norm, unembedding."""

    def __init__(self, config: configs.Decoder, execution: Execution, *, key: Array):
        super().__init__(config, execution, key=key)
        self.config: configs.Decoder = config
        precision = execution.precision
        init = initializer(config, precision)
        ends = EmbeddingBuilder(config.width, key, init, precision)
        self.embedding = ends.table("embedding", config.vocab, "vocab")
        self.positions = (
            None
            if config.positions is None
            else ends.table("positions", config.positions, "positions")
        )
        self.inner = (
            None
            if config.inner_positions is None
            else ends.table("inner", config.inner_positions, "positions")
        )
        self.heads = (
            None
            if config.ahead is None
            else Heads(
                config,
                config.ahead,
                key=random.stream(key, "heads"),
                init=init,
                precision=precision,
                remat=execution.remat.partition("/")[0],
            )
        )
        self.unembedding = None if config.tied else ends.unembedding(config.vocab)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        reach: Int[Array, "B T"] | None = None,
        inner: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        count: Int[Array, "B"] | None = None,
        key: Array | None = None,
        dealt: int = 1,
    ) -> Hidden:
        """Reads `tokens` from left to right, each segment for itself; after those in `cache`, where there is one.

        With a `reach`, each sees up to that slot of the row, or of the cache, instead of its own. `inner` are second
        positions, for a model that has a table of them; None is 0 for all.
        `dealt` is the number of devices to which `parallel.context.deal` dealt the tokens of each row, if it did.
        `key` turns dropout on. The cache comes back with these tokens in it; its `length` is the caller's to advance,
        who knows how many of a padded row are real: the first `count`, or all.

        Raises:
          ValueError: where both segments and a cache are given: a cache keeps no segments, so its keys would be seen by all.
        """
        if segments is not None and cache is not None:
            raise ValueError("segments with a cache: each row of a cache is one sequence")
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        x = self.embedding(tokens) * self.config.embed_scale
        x = noise(x, self.config.embedding_noise, noise_key(key))
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.inner is not None:
            x = x + self.inner(jnp.zeros_like(tokens) if inner is None else inner)
        x = dropout(
            constrain(x.astype(self.precision.activations), "batch", "length", None),
            self.config.dropout,
            keys[0],
        )
        mask = (
            masks.causal(tokens.shape[1], segments, reach, parts=dealt)
            if cache is None
            else cache_mask(cache, tokens.shape[1], reach, count)
        )
        return self.apply_layers(
            x, positions=positions, mask=mask, cache=cache, keys=(keys[1], keys[2])
        )

    def read(self, batch: Tokens, *, key: Array | None, dealt: int = 1) -> Hidden:
        """What it makes of a batch, see `__call__`."""
        return self(
            batch.tokens,
            positions=batch.positions,
            segments=batch.segments,
            reach=batch.visible_until,
            inner=batch.block_positions,
            key=key,
            dealt=dealt,
        )

    def ahead(
        self,
        stream: Float[Array, "B T D"],
        ahead: list[tuple[Int[Array, "B T"], Bool[Array, "B T"]]],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        key: Array | None = None,
        dealt: int = 1,
    ) -> tuple[list[Float[Array, "B T D"]], dict[str, Mean]]:
        """What is to be unembedded for the tokens 2, 3, ... ahead, from the stream of the same tokens; see `heads.Heads`."""
        assert self.heads is not None

        def embed(ids: Array) -> Array:
            return self.embedding(ids) * self.config.embed_scale

        mask = masks.causal(stream.shape[1], segments, parts=dealt)
        return self.heads(stream, embed, ahead, positions=positions, mask=mask, key=key)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Scores of every id, float32; apart from the call so that a loss may take the rows in chunks."""
        out = (
            self.embedding.unembed(hidden) if self.unembedding is None else self.unembedding(hidden)
        )
        out = constrain(out, "batch", "length", "vocab")
        if self.config.width_ratio != 1:
            out = out / self.config.width_ratio
        cap = self.config.logit_cap
        return out if cap is None else cap * jnp.tanh(out / cap)

    def unstacked(self) -> Self:
        """The same model as a loop over tokens reads it, see `Backbone.unstacked`; the unembedding too."""
        super().unstack_layers()
        if self.unembedding is None:
            self.embedding.settle()
        else:
            self.unembedding.relayout_for_decode()
        return self


def cache_mask(
    cache: KVCache,
    length: int,
    reach: Int[Array, "B T"] | None = None,
    count: Int[Array, "B"] | None = None,
) -> Mask:
    """Row b's new tokens lie at slots length[b] on, and see every slot up to their own, or to their reach.

    The indices of keys are for each layer's cache to say.
    """
    query = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return Mask(query_index=query, key_index=query, query_reach=reach, query_count=count)
