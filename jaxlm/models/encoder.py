"""The encoder: every token sees its whole document."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import random
from jaxlm.data.batch import Tokens
from jaxlm.models import backbone
from jaxlm.models import config as configs
from jaxlm.models.backbone import Backbone, Execution, Hidden, Unembedder
from jaxlm.nn.dropout import dropout, noise, noise_key
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear, parameter
from jaxlm.nn.mlp import ACTIVATIONS
from jaxlm.nn.norm import Norm
from jaxlm.ops import masks
from jaxlm.parallel.rules import constrain


class MaskedHead(nnx.Module):
    """norm(act(dense(x))) before the unembedding, a bias after it: BERT's `cls.predictions`."""

    def __init__(self, config: configs.EncoderConfig, *, key: Array, init: Initializer):
        self.config = config.head
        self.dense = Linear(
            {"embed": config.width},
            {"features": config.width},
            key=key,
            init=init.exact,
            bias=config.head.bias,
        )
        self.norm = Norm({"features": config.width}, config.head.norm, dtype=init.dtype)
        self.bias = parameter(jnp.zeros((config.vocab,), init.dtype), "vocab")

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the input of the unembedding."""
        return self.norm(ACTIVATIONS[self.config.activation](self.dense(x)))


class Encoder(Backbone, Unembedder):
    """Embedding, bidirectional layers, and a head for masked-token prediction.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3; without next-sentence prediction.
    """

    def __init__(self, config: configs.EncoderConfig, execution: Execution, *, key: Array):
        super().__init__(config, execution, key=key)
        self.config: configs.EncoderConfig = config
        init = backbone.initializer(config, execution.precision)
        tables = backbone.EmbeddingBuilder(config.width, key, init)
        rows = None if config.positions is None else config.first_position + config.positions
        self.embedding = tables.table("embedding", config.vocab, "vocab")
        self.positions = tables.positions("positions", rows)
        self.types = tables.positions("types", config.token_types)
        self.embedding_norm = backbone.optional_norm(config.width, config.embedding_norm, init)
        self.head = MaskedHead(config, key=random.stream(key, "head"), init=init)
        self.unembedding = tables.unembedding(config.vocab, tied=config.tied)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        types: Int[Array, "B T"] | None = None,
        key: Array | None = None,
        parts: int = 1,
    ) -> Hidden:
        """Read each segment in both directions.

        Args:
          tokens: ids.
          positions: of the tokens in their documents.
          segments: documents packed into a row, from 1; 0 is padding.
          types: token types; None for 0.
          key: turns dropout on.
          parts: devices over which `parallel.context` sharded the tokens of each row in zigzag.
        """
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        x = self.embedding(tokens)
        x = noise(x, self.config.embedding_noise, noise_key(key))
        if self.positions is not None:
            x = x + self.positions(positions + self.config.first_position)
        if self.types is not None:
            x = x + self.types(jnp.zeros_like(tokens) if types is None else types)
        x = constrain(x.astype(self.precision.activations), "batch", "length", None)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = dropout(x, self.config.dropout, keys[0])
        mask = masks.both_ways(tokens.shape[1], segments, parts=parts)
        return self.apply_layers(x, positions=positions, mask=mask, keys=(keys[1], keys[2]))

    def read(self, batch: Tokens, *, key: Array | None, parts: int = 1) -> Hidden:
        """Return the output for a batch, see `hidden`."""
        return self.hidden(
            batch.tokens, positions=batch.positions, segments=batch.segments, key=key, parts=parts
        )

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits, float32, of all rows or of a chunk of them."""
        out = self.unembed(self.head(hidden))
        out = out + self.head.bias[...].astype(out.dtype)[None, None]
        return constrain(out, "batch", "length", "vocab")
