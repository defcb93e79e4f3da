"""The encoder: every token sees its whole document."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import random
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models import config as configs
from jaxlm.models.backbone import Backbone, EmbeddingBuilder, Execution, Hidden, initializer
from jaxlm.nn.dropout import dropout, noise, noise_key
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear, parameter
from jaxlm.nn.mlp import ACTIVATIONS
from jaxlm.nn.norm import Norm
from jaxlm.ops import masks
from jaxlm.parallel.rules import constrain


class Head(nnx.Module):
    """norm(act(dense(x))), which is unembedded, and the bias of each id: BERT's `cls.predictions`."""

    def __init__(
        self,
        width: int,
        vocab: int,
        config: configs.HeadConfig,
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
    ):
        self.config = config
        self.dense = Linear(
            {"embed": width},
            {"features": width},
            key=key,
            init=init,
            precision=precision,
            bias=config.bias,
        )
        self.norm = Norm({"features": width}, config.norm, dtype=init.dtype)
        self.bias = parameter(jnp.zeros((vocab,), init.dtype), "vocab")

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What is unembedded."""
        return self.norm(ACTIVATIONS[self.config.activation](self.dense(x)))


class Encoder(Backbone):
    """Embedding, blocks that read both ways, and a head that predicts hidden tokens where they stand.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3; without its second task, the next sentence.
    """

    def __init__(self, config: configs.Encoder, execution: Execution, *, key: Array):
        super().__init__(config, execution, key=key)
        self.config: configs.Encoder = config
        precision = execution.precision
        init = initializer(config, precision)
        ends = EmbeddingBuilder(config.width, key, init, precision)
        self.embedding = ends.table("embedding", config.vocab, "vocab")
        self.positions = (
            None
            if config.positions is None
            else ends.table("positions", config.first_position + config.positions, "positions")
        )
        self.types = (
            None
            if config.token_types is None
            else ends.table("types", config.token_types, "positions")
        )
        self.embedding_norm = (
            None
            if config.embedding_norm is None
            else Norm({"embed": config.width}, config.embedding_norm, dtype=init.dtype)
        )
        self.head = Head(
            config.width,
            config.vocab,
            config.head,
            key=random.stream(key, "head"),
            init=init,
            precision=precision.exact,
        )
        self.unembedding = None if config.tied else ends.unembedding(config.vocab)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        types: Int[Array, "B T"] | None = None,
        key: Array | None = None,
        dealt: int = 1,
    ) -> Hidden:
        """Reads each segment both ways, within the windows of its layers. `types` says of which kind of text a token is.

        Without `types` all are of kind 0. `dealt` and `key` are as those of `Decoder`.
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
        mask = masks.both_ways(tokens.shape[1], segments, parts=dealt)
        return self.apply_layers(x, positions=positions, mask=mask, keys=(keys[1], keys[2]))

    def read(self, batch: Tokens, *, key: Array | None, dealt: int = 1) -> Hidden:
        """What it makes of a batch, see `__call__`; how far its slots reach is the same for every encoder."""
        return self(
            batch.tokens,
            positions=batch.positions,
            segments=batch.segments,
            key=key,
            dealt=dealt,
        )

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Scores of every id where it stands, float32; apart from the call so that a loss may take the rows in chunks."""
        hidden = self.head(hidden)
        out = (
            self.embedding.unembed(hidden) if self.unembedding is None else self.unembedding(hidden)
        )
        out = out + self.head.bias[...].astype(out.dtype)[None, None]
        return constrain(out, "batch", "length", "vocab")
