"""Configs of models: frozen, hashable, and free of JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, TypeVar

from jaxlm.core.config import setting
from jaxlm.nn.config import Activation, BlockConfig, Init, MoeConfig, NormConfig

HeadKind = Literal["sequential", "parallel"]
T = TypeVar("T", bound=Any)
Layers = TypeVar("Layers", bound="BackboneConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Multi-token-prediction heads; see `models.heads`."""

    tokens: int  # predicted beyond the next one, each by a head
    kind: HeadKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The layers of a model: layer i after the `prefix` is `pattern[i % len(pattern)]`."""

    width: int
    depth: int
    pattern: tuple[BlockConfig, ...]
    prefix: tuple[BlockConfig, ...] = ()
    final_norm: NormConfig | None = None
    dropout: float = 0.0  # of the embeddings
    embedding_noise: float = 0.0  # NEFTune's alpha
    width_ratio: float = 1.0  # width / muP's base width
    layer_drop: float = 0.0  # rate of stochastic depth at the last layer
    init: Init = "normal"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Raise ValueError if the pattern has no layers, or layers differ in relative bias."""
        if not self.pattern or self.depth <= len(self.prefix):
            raise ValueError(
                f"no layers for the pattern: depth = {self.depth}, a prefix of {len(self.prefix)}, "
                f"and a pattern of {len(self.pattern)}"
            )
        if len({layer.attention.relative for layer in self.layers}) > 1:
            raise ValueError("layers of one stack must have the same relative bias")

    @property
    def layers(self) -> tuple[BlockConfig, ...]:
        """Configs of all layers, first to last."""
        repeated = self.depth - len(self.prefix)
        return self.prefix + tuple(self.pattern[i % len(self.pattern)] for i in range(repeated))

    @property
    def heads(self) -> tuple[BlockConfig, ...]:
        """Configs of the layers of multi-token-prediction heads; only a decoder has any."""
        return ()

    @property
    def has_ring(self) -> bool:
        """If any layer uses ring attention."""
        return any(layer.attention.kernel == "ring" for layer in self.layers)

    def map_blocks(self, of: Callable[[BlockConfig], BlockConfig]) -> Self:
        """Return a config with `of(block)` for each block."""
        return dataclasses.replace(
            self, pattern=tuple(map(of, self.pattern)), prefix=tuple(map(of, self.prefix))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(BackboneConfig):
    """A decoder-only transformer."""

    vocab: int
    positions: int | None = None  # rows of a learned position table
    inner_positions: int | None = None  # rows of a table of GLM's block positions
    mtp: MtpConfig | None = None  # multi-token-prediction heads
    tied: bool = True
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits z become cap * tanh(z / cap)

    @property
    def heads(self) -> tuple[BlockConfig, ...]:
        """Configs of the layers of multi-token-prediction heads: that of the last layer."""
        return self.layers[-1:] * (self.mtp.tokens if self.mtp else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Head of masked-token prediction: dense, activation, norm; a bias after the unembedding."""

    activation: Activation
    norm: NormConfig
    bias: bool = True  # of the dense layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(BackboneConfig):
    """An encoder-only transformer, in which every token sees its whole document."""

    vocab: int
    head: HeadConfig
    positions: int | None = None  # of a learned position table
    first_position: int = 0  # rows of the table before that of position 0
    token_types: int | None = None  # rows of a token-type table
    embedding_norm: NormConfig | None = None
    tied: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """An encoder and a decoder with cross attention that share an embedding."""

    vocab: int
    encoder: BackboneConfig
    decoder: BackboneConfig  # each layer with cross attention, and no prefix
    tied: bool = True
    output_scale: float = 1.0  # factor on the input of the unembedding
    embed_std: float = 1.0  # standard deviation of the initial embedding

    positions: ClassVar[None] = None
    heads: ClassVar[tuple[BlockConfig, ...]] = ()
    has_ring: ClassVar[bool] = False
    width_ratio: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError if the decoder has a prefix or a layer without cross attention."""
        if self.decoder.prefix or any(layer.cross is None for layer in self.decoder.layers):
            raise ValueError("the decoder needs cross attention in every layer, and no prefix")

    @property
    def width(self) -> int:
        """Hidden size of both sides."""
        return self.encoder.width

    @property
    def depth(self) -> int:
        """Number of layers of both sides."""
        return self.encoder.depth + self.decoder.depth

    @property
    def layers(self) -> tuple[BlockConfig, ...]:
        """Configs of all layers, the encoder's first."""
        return self.encoder.layers + self.decoder.layers

    def map_blocks(self, of: Callable[[BlockConfig], BlockConfig]) -> Self:
        """Return a config with `of(block)` for each block."""
        return dataclasses.replace(
            self, encoder=self.encoder.map_blocks(of), decoder=self.decoder.map_blocks(of)
        )


OneStack = DecoderConfig | EncoderConfig
ModelConfig = OneStack | EncoderDecoderConfig


def balance_rate(model: ModelConfig) -> float:
    """Return the step of the routers' load-balancing biases in all layers; 0 without any."""
    mlps = (block.mlp for block in model.layers)
    return max((mlp.bias_rate or 0.0 for mlp in mlps if isinstance(mlp, MoeConfig)), default=0.0)


def is_sum_over_rows(model: ModelConfig) -> bool:
    """Return if training treats each row alone: without random numbers, and without experts.

    Experts are balanced over all rows.
    """
    sides = (model.encoder, model.decoder) if isinstance(model, EncoderDecoderConfig) else (model,)
    if any(side.dropout or side.embedding_noise or side.layer_drop for side in sides):
        return False
    return not any(
        isinstance(block.mlp, MoeConfig)
        or block.dropout
        or block.attention.dropout
        or (block.cross and block.cross.dropout)
        for block in (*model.layers, *model.heads)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegularizationConfig:
    """Regularization in training; evaluation and generation use none of it.

    Source: Huang et al. 2016, arXiv:1603.09382, section 3 (stochastic depth, linear in depth); Jain
    et al. 2023, arXiv:2310.05914, algorithm 1 (NEFTune); Kimi Team 2025, arXiv:2507.20534, section
    2.1 (QK-clip).
    """

    embedding_dropout: float | None = setting(
        None, "dropout rate of the embeddings (None: the model's)", low=0, below=1
    )
    attention_dropout: float | None = setting(
        None, "dropout rate of the attention weights (None: the model's)", low=0, below=1
    )
    residual_dropout: float | None = setting(
        None, "dropout rate of outputs of attention and MLP (None: the model's)", low=0, below=1
    )
    layer_drop: float = setting(
        0.0,
        "stochastic depth: probability to skip the last layer of L; l/L of it for layer l",
        low=0,
        below=1,
    )
    embedding_noise: float = setting(
        0.0,
        "NEFTune: uniform noise on the embeddings, up to this / sqrt(sequence length x width)",
        low=0,
    )
    qk_clip: float | None = setting(
        None,
        "QK-clip: after an update, query and key weights of heads whose largest attention logit "
        "exceeded this are scaled down (None: off)",
        above=0,
    )

    def applied(self, model: ModelConfig) -> ModelConfig:
        """Return the model with this regularization, on both sides of an encoder-decoder."""

        def dropout(config: T, rate: float | None) -> T:
            return config if rate is None else dataclasses.replace(config, dropout=rate)

        def block(config: BlockConfig) -> BlockConfig:
            return dataclasses.replace(
                dropout(config, self.residual_dropout),
                attention=dropout(config.attention, self.attention_dropout),
                cross=config.cross and dropout(config.cross, self.attention_dropout),
            )

        def side(layers: Layers) -> Layers:
            return dataclasses.replace(
                dropout(layers.map_blocks(block), self.embedding_dropout),
                embedding_noise=self.embedding_noise,
                layer_drop=self.layer_drop,
            )

        if not isinstance(model, EncoderDecoderConfig):
            return side(model)
        return dataclasses.replace(model, encoder=side(model.encoder), decoder=side(model.decoder))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupConfig:
    """muP: hyperparameters tuned at a small width transfer to a large one.

    With m = width / base width, matrices of layers are initialized with std / sqrt(m) and trained
    at lr / m, logits are divided by m, and attention scores by head_dim / base head_dim instead of
    its square root. At the base width nothing changes.

    Source: Yang et al. 2022, arXiv:2203.03466, table 8 (column Adam), definition 4.1 (attention).
    """

    base_width: int | None = setting(
        None,
        "width at which the hyperparameters were tuned (None: the standard parametrization)",
        low=1,
    )
    base_head_dim: int | None = setting(
        None, "size of a head at the base width (None: this model's, with fewer heads)", low=1
    )

    def applied(self, model: DecoderConfig) -> DecoderConfig:
        """Return the model in this parametrization."""
        if self.base_width is None:
            return model

        def block(config: BlockConfig) -> BlockConfig:
            attention = config.attention
            scale = (
                attention.score_scale
                * ((self.base_head_dim or attention.head_dim) / attention.head_dim) ** 0.5
            )
            return dataclasses.replace(
                config, attention=dataclasses.replace(attention, scale=scale)
            )

        return dataclasses.replace(
            model.map_blocks(block), width_ratio=model.width / self.base_width
        )
