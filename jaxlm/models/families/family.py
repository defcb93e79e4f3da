"""Settings of every family, and their translation to and from a config.json. Free of JAX."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.core.nearest import nearest_divisors
from jaxlm.core.user_code import Interface
from jaxlm.models.config import DecoderConfig
from jaxlm.models.families import hub, setting_docs
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub
from jaxlm.nn import config as nn

Problems = Iterator[tuple[str, str, str]]  # setting, why, flag to paste
Table = Mapping[str, ConfigKey]  # by setting, in the order of reading
Sizes = Mapping[str, Mapping[str, Any]]  # settings by the name of a published model

# transformers' names of activations; the first name of an activation is written.
ACTIVATIONS: dict[str, nn.Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
SIZE_ATTRIBUTES: Table = {
    "vocab": ConfigKey("vocab_size"),
    "max_positions": ConfigKey("max_position_embeddings", 2048),
    "depth": ConfigKey("num_hidden_layers", most=hub.MAX_NESTING),
    "width": ConfigKey("hidden_size"),
    "heads": ConfigKey("num_attention_heads"),
    "hidden": ConfigKey("intermediate_size", value=lambda family: family.size_of_hidden),
}


def size_table(columns: str, rows: Mapping[str, tuple[Any, ...]], **shared: Any) -> Sizes:
    """Return settings by model name: those of the columns, `shared` ones, and a row's last dict.

    Example:
      >>> size_table("depth width", {"tiny": (2, 64, {"heads": 4})}, vocab=256)["tiny"]
      {'vocab': 256, 'depth': 2, 'width': 64, 'heads': 4}
    """
    names = columns.split()
    return {
        name: shared | dict(zip(names, row, strict=False)) | dict(*row[len(names) :])
        for name, row in rows.items()
    }


def problem(name: str, why: str, value: Any) -> tuple[str, str, str]:
    """Return a problem of a setting that the value repairs."""
    return name, why, f"--config.model.{name}={value}"


def unpaired(name: str, size: int, value: int) -> Problems:
    """Yield a problem of a setting if rotary positions cannot rotate a head in pairs."""
    if size % 2:
        yield problem(name, f"a head of {size} cannot be rotated in pairs", value)


def uneven(whole: str, size: int, part: str, parts: int) -> Problems:
    """Yield a problem if a size does not divide into parts: setting, why, nearest flag."""
    if size % parts:
        why = f"{whole} = {size} does not divide by {part} = {parts}"
        yield problem(part, why, nearest_divisors(size, parts)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilySettings:
    """Settings of every family, and the tables by which a config.json is read and written."""

    family: str = ""
    vocab: int | Literal["auto"] = setting("auto", **setting_docs.VOCAB)
    max_positions: int = setting(2048, **setting_docs.MAX_POSITIONS)
    depth: int = setting(8, **setting_docs.DEPTH)
    width: int = setting(512, **setting_docs.WIDTH)
    heads: int = setting(8, **setting_docs.HEADS)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.PLAIN_HIDDEN)
    activation: nn.Activation = setting("gelu", **setting_docs.PLAIN_ACTIVATION)
    norm_eps: float = setting(1e-5, **setting_docs.LAYER_NORM_EPS)
    dropout: float = setting(0.0, **setting_docs.OUTPUT_DROPOUT)
    init: nn.Init = setting("normal", **setting_docs.INIT)
    init_std: float = setting(0.02, **setting_docs.INIT_STD)

    PARTS: ClassVar = Interface("model", needs=("build",))
    RESIDUAL: ClassVar[nn.Residual] = "pre"
    IS_GATED: ClassVar[bool] = False
    HUB: ClassVar[Hub]
    SIZES: ClassVar[Sizes]
    ATTRIBUTES: ClassVar[Table] = SIZE_ATTRIBUTES
    HF_DEFAULTS: ClassVar[Mapping[str, Any]] = {}  # by setting, instead of the table's
    CONSTANTS: ClassVar[Mapping[str, Any]] = {}  # attributes with one accepted value, written
    EXPECTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # accepted values, not written
    IGNORED: ClassVar[tuple[str, ...]] = ()  # attributes that change nothing that is computed

    def problems(self) -> Problems:
        """Yield contradictions between settings: none that all families share."""
        yield from ()

    @property
    def size_of_hidden(self) -> int:
        """hidden; `auto` is 4 x width, or if gated 8/3 rounded up to 64: as many parameters."""
        if self.hidden != "auto":
            return self.hidden
        return -(-8 * self.width // 3 // 64) * 64 if self.IS_GATED else 4 * self.width

    @property
    def norm(self) -> nn.NormConfig:
        """Every norm of the stream."""
        return nn.NormConfig(kind="rms", eps=self.norm_eps)

    @property
    def size_of_head(self) -> int:
        """Features of a head; without a setting, or with `auto`, heads share the width evenly."""
        size: Any = getattr(self, "head_dim", "auto")
        return self.width // self.heads if size == "auto" else size

    @property
    def mlp(self) -> nn.MlpConfig:
        """The MLP of a layer."""
        return nn.MlpConfig(
            hidden=self.size_of_hidden, activation=self.activation, gated=self.IS_GATED
        )

    def backbone(self) -> dict[str, Any]:
        """Return the arguments that every model config takes. `vocab` must be resolved by now."""
        assert self.vocab != "auto"
        names = ("vocab", "width", "depth", "dropout", "init", "init_std")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_hub(cls, attributes: Attributes) -> Self:
        """Return the family that a config.json describes; problems are noted in `attributes`."""
        return cls(**cls.hub_settings(attributes))

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        for name, value in cls.CONSTANTS.items():
            attributes.expect(name, value)
        for name, values in cls.EXPECTED.items():
            attributes.expect(name, *values)
        attributes.ignore(*cls.IGNORED)
        return hub.read_settings(attributes, cls.ATTRIBUTES, cls.HF_DEFAULTS)

    def to_hub(self) -> dict[str, Any]:
        """Return config.json's attributes; ConfigError if transformers computes another model."""
        assert self.vocab != "auto"
        constants = {"initializer_range": self.init_std, **self.CONSTANTS}
        return hub.write_settings(self, self.ATTRIBUTES) | constants


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainSettings(FamilySettings):
    """Settings of families with layer norms, biases, and an MLP without a gate."""

    max_positions: int = setting(512, **setting_docs.POSITION_ROWS)
    depth: int = setting(12, **setting_docs.DEPTH)
    width: int = setting(768, **setting_docs.WIDTH)
    heads: int = setting(12, **setting_docs.HEADS)
    dropout: float = setting(0.0, **setting_docs.DROPOUT)

    def problems(self) -> Problems:
        """Yield a problem if heads do not share the width evenly."""
        yield from uneven("width", self.width, "heads", self.heads)

    @property
    def has_bias(self) -> bool:
        """If projections and norms have biases."""
        return True

    @property
    def norm(self) -> nn.NormConfig:
        """Every norm of the stream."""
        return nn.NormConfig(kind="layer", eps=self.norm_eps, bias=self.has_bias)

    def block(self, kv_heads: int, **attention: Any) -> nn.BlockConfig:
        """Return a layer; `attention` holds further arguments of its attention."""
        return nn.BlockConfig(
            attention=nn.AttentionConfig(
                heads=self.heads,
                kv_heads=kv_heads,
                head_dim=self.size_of_head,
                bias=self.has_bias,
                out_bias=self.has_bias,
                **attention,
            ),
            mlp=dataclasses.replace(self.mlp, bias=self.has_bias),
            norm=self.norm,
            residual=self.RESIDUAL,
            dropout=self.dropout,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainDecoder(PlainSettings):
    """Settings of decoders with layer norms and biases."""

    kv_heads: int | Literal["auto"] = setting("auto", **setting_docs.KV_HEADS)
    tied: bool = setting(True, **setting_docs.TIED)
    init: nn.Init = setting("gpt2", **setting_docs.INIT)

    def problems(self) -> Problems:
        """Yield a problem if heads do not share the width and the keys evenly."""
        yield from super().problems()
        if self.kv_heads != "auto":
            yield from uneven("heads", self.heads, "kv_heads", self.kv_heads)

    def decoder(self, *, positions: int | None = None, **attention: Any) -> DecoderConfig:
        """Return the model's config; `attention` holds further arguments of its attention."""
        kv_heads = self.heads if self.kv_heads == "auto" else self.kv_heads
        return DecoderConfig(
            **self.backbone(),
            pattern=(self.block(kv_heads, **attention),),
            positions=positions,
            final_norm=self.norm,
            tied=self.tied,
        )
