"""What a model is made of: frozen, hashable, and free of JAX."""

import dataclasses
from typing import Literal

from jaxlm.core.config import setting
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
    embedding_noise: float = 0.0  # NEFTune's alpha
    width_ratio: float = (
        1.0  # the width over the one at which this parametrization is the standard one
    )
    layer_drop: float = 0.0  # rate of stochastic depth at the last layer
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegularisationConfig:
    """What disturbs a model in training, and keeps it steady; evaluation and generation know none of it.

    Source: Huang et al. 2016, arXiv:1603.09382, section 3 (stochastic depth, linear in depth); Jain et al. 2023,
    arXiv:2310.05914, algorithm 1 (NEFTune); Kimi Team 2025, arXiv:2507.20534, section 2.1 (QK-clip).
    """

    embedding_dropout: float | None = setting(
        None, "share of the embeddings that is dropped; None is what the model says", low=0, below=1
    )
    attention_dropout: float | None = setting(
        None,
        "share of the attention weights that is dropped; None is what the model says",
        low=0,
        below=1,
    )
    residual_dropout: float | None = setting(
        None,
        "share of what attention and MLP add to the stream that is dropped; None is what the model says",
        low=0,
        below=1,
    )
    layer_drop: float = setting(
        0.0,
        "stochastic depth: chance that a row passes by the last layer; by layer l of L with l/L of it",
        low=0,
        below=1,
    )
    embedding_noise: float = setting(
        0.0,
        "NEFTune: noise on the embeddings, uniform up to this over sqrt(tokens of a row x width)",
        low=0,
    )
    qk_clip: float | None = setting(
        None,
        "largest attention logit: after an update, heads that passed it have their query and key weights scaled back; None scales none",
        above=0,
    )

    def applied(self, model: Decoder) -> Decoder:
        """The model with these."""

        def block(config: BlockConfig) -> BlockConfig:
            attention = dataclasses.replace(
                config.attention,
                dropout=_or(self.attention_dropout, config.attention.dropout),
            )
            return dataclasses.replace(
                config, attention=attention, dropout=_or(self.residual_dropout, config.dropout)
            )

        return dataclasses.replace(
            model,
            pattern=tuple(map(block, model.pattern)),
            prefix=tuple(map(block, model.prefix)),
            dropout=_or(self.embedding_dropout, model.dropout),
            embedding_noise=self.embedding_noise,
            layer_drop=self.layer_drop,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupConfig:
    """muP: settings found at a small width are right at a large one.

    With m the width over the base width: matrices of layers are drawn with std / sqrt(m) and learn at lr / m, logits are
    divided by m, and attention's by head_dim over the base's instead of its root. At the base width nothing changes.

    Source: Yang et al. 2022, arXiv:2203.03466, table 8, column Adam, and definition 4.1 (attention).
    """

    base_width: int | None = setting(
        None,
        "the width at which the settings were found; None is the standard parametrization",
        low=1,
    )
    base_head_dim: int | None = setting(
        None, "size of a head there; None is what it is here, heads being more then", low=1
    )

    def applied(self, model: Decoder) -> Decoder:
        """The model in this parametrization."""
        if self.base_width is None:
            return model

        def block(config: BlockConfig) -> BlockConfig:
            attention = config.attention
            scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
            scale *= ((self.base_head_dim or attention.head_dim) / attention.head_dim) ** 0.5
            return dataclasses.replace(
                config, attention=dataclasses.replace(attention, scale=scale)
            )

        return dataclasses.replace(
            model,
            pattern=tuple(map(block, model.pattern)),
            prefix=tuple(map(block, model.prefix)),
            width_ratio=model.width / self.base_width,
        )


def _or(wanted: float | None, otherwise: float) -> float:
    return otherwise if wanted is None else wanted
