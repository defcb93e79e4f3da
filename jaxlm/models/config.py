"""What a model is made of: frozen, hashable, and free of JAX."""

import dataclasses
from typing import Literal

from jaxlm.nn.config import BlockConfig, Init, NormConfig

HeadKind = Literal["sequential", "parallel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """The heads that predict tokens beyond the next; `models.heads` says what each kind computes."""

    tokens: int  # beyond the next: one head each
    kind: HeadKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder-only transformer: layer i after the `prefix` is `pattern[i % len(pattern)]`."""

    vocab: int
    width: int
    depth: int
    pattern: tuple[BlockConfig, ...]
    prefix: tuple[BlockConfig, ...] = ()
    positions: int | None = None  # rows of a learned position table; None has none
    inner_positions: int | None = None  # rows of a table of second positions; None has none
    ahead: Ahead | None = None  # heads for further tokens; None predicts the next alone
    final_norm: NormConfig | None = None
    tied: bool = True
    embed_scale: float = 1.0
    logit_cap: float | None = None
    dropout: float = 0.0  # of the embeddings
    init: Init = "normal"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Raises ValueError where the pattern, or all that is left to it after the prefix, is empty."""
        if not self.pattern or self.depth <= len(self.prefix):
            raise ValueError(
                f"no layers for the pattern: depth = {self.depth}, of which the prefix has {len(self.prefix)}, "
                f"and a pattern of {len(self.pattern)}"
            )

    @property
    def layers(self) -> tuple[BlockConfig, ...]:
        """Every layer's config, first to last."""
        repeated = self.depth - len(self.prefix)
        return self.prefix + tuple(self.pattern[i % len(self.pattern)] for i in range(repeated))

    @property
    def heads(self) -> tuple[BlockConfig, ...]:
        """The config of each further head's layer, which is of the last layer's kind."""
        return self.layers[-1:] * (self.ahead.tokens if self.ahead else 0)

    @property
    def has_ring(self) -> bool:
        """Whether keys go round the devices that share a row, in any layer."""
        return any(layer.attention.kernel == "ring" for layer in self.layers)
