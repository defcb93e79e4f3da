"""Settings of fine-tuning: all parameters, or the few of an adapter. Free of JAX."""

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from jaxlm.core.config import setting

StoredFormat = Literal["int8", "fp8", "int4", "int4_zero", "nf4", "nf4_double", "w8a8", "w4a8"]
PROJECTIONS = ("*/attention/*", "*/mlp/*")


def is_at(pattern: str, path: str) -> bool:
    """Return whether a pattern of `tune.at` matches the path of a weight.

    A router, whose choices a small change turns, is matched only by a pattern with its name.
    """
    is_named = "/router/" not in path or "router" in pattern
    return is_named and fnmatch.fnmatchcase(path, pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full:
    """All parameters are trained, except those of `optim.freeze`."""

    # Flags of methods that are settings of an adapter, by name.
    METHODS: ClassVar[Mapping[str, str]] = {
        "rslora": "--config.tune.name=lora --config.tune.scale=root",
        "pissa": "--config.tune.name=lora --config.tune.init=pissa",
    }

    name: Literal["full"] = "full"
    unmerged: ClassVar[str] = ""
    virtual_tokens: ClassVar[int] = 0
    virtual_rows: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Settings that adapters of layers share: the places, and leaves that are trained whole.

    `unmerged` is the reason why an adapter cannot be merged into weights; empty if it can.
    """

    unmerged: ClassVar[str] = ""
    virtual_tokens: ClassVar[int] = 0  # before every text
    virtual_rows: ClassVar[int] = 0  # those of them that all layers compute

    at: tuple[str, ...] = setting(
        PROJECTIONS, "patterns over paths of parameters: adapted linear layers"
    )
    also: tuple[str, ...] = setting(
        (), "patterns over paths of parameters of the base that are trained whole"
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield a problem if no place is named."""
        if not self.at:
            yield "at", "an adapter needs a place", f"'--config.tune.at={','.join(PROJECTIONS)}'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(AdapterConfig):
    """Low-rank update: y = x W + s (x A) B, with s = alpha / rank; A and B are trained.

    With `init=kaiming` A begins uniform within 1 / sqrt(inputs), as in PEFT, and B at 0. With
    `init=pissa` s A B begins at the leading singular vectors of W, and y = x W + s (x A) B
    - s (x A0) B0 with their first values A0 and B0, which are kept and not trained.

    Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732 (rank's root);
    Hayou et al. 2024, arXiv:2402.12354 (rate of B); Meng et al. 2024, arXiv:2404.02948 (PiSSA).
    """

    name: Literal["lora"] = "lora"
    rank: int = setting(16, "columns of A and rows of B", low=1)
    alpha: float = setting(32.0, "numerator of the scale of the update", above=0)
    scale: Literal["rank", "root"] = setting(
        "rank", "denominator of the scale: rank, or its square root (rsLoRA)"
    )
    dropout: float = setting(0.0, "dropout rate of the adapter's input", low=0, below=1)
    b_lr: float = setting(1.0, "learning rate of B over that of A (LoRA+)", above=0)
    init: Literal["kaiming", "pissa"] = setting(
        "kaiming", "first values of A and B: random and 0, or leading singular vectors of W (PiSSA)"
    )

    @property
    def factor(self) -> float:
        """The scale s of the update."""
        return self.alpha / (self.rank if self.scale == "rank" else self.rank**0.5)

    @property
    def terms(self) -> int:
        """Number of products A B in the update: that which is trained, and the first one."""
        return 2 if self.init == "pissa" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class QLora(Lora):
    """LoRA on a base whose adapted layers are stored in four or eight bits.

    Source: Dettmers et al. 2023, arXiv:2305.14314.
    """

    name: Literal["qlora"] = "qlora"  # type: ignore[assignment]
    base: Literal["nf4", "nf4_double", "int8"] = setting(
        "nf4_double",
        "format of the base's adapted weights: NormalFloat of 4 bits, also with scales of 8 bits, "
        "or integers of 8 bits",
    )
    block: int = setting(64, "inputs of one output that share a scale", low=2)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield a problem if no place is named, or the base cannot be quantized."""
        yield from super().problems()
        if self.init == "pissa":
            why = "PiSSA quantizes the weight less its leading part, and this base keeps all of it"
            yield "init", why, "--config.tune.init=kaiming\n--config.tune.name=lora"

    def unquantized(self) -> Lora:
        """Return the same adapter of a base that is not quantized."""
        fields = dataclasses.fields(Lora)
        return Lora(
            **{each.name: getattr(self, each.name) for each in fields if each.name != "name"}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """Weights stored in four or eight bits, and none trained: the model of `jaxlm quantize`.

    The checkpoints of the run have the codes. It is evaluated and continues text as any other.
    """

    name: Literal["quantized"] = "quantized"
    unmerged: ClassVar[str] = (
        "its weights are codes, and the numbers before rounding are not stored"
    )
    virtual_tokens: ClassVar[int] = 0
    virtual_rows: ClassVar[int] = 0

    at: tuple[str, ...] = setting(
        PROJECTIONS,
        "patterns over paths of parameters: quantized weights of linear layers, experts and "
        "tables; a router only by its name",
    )
    base: StoredFormat = setting(
        "int8",
        "format of the weights: integers of 8 bits, e4m3 floats, integers of 4 bits from -7 to 7 "
        "or with a zero point, NormalFloat of 4 bits, also with scales of 8 bits, or integers of 8 "
        "or 4 bits in products of integers",
    )
    block: int | Literal["all"] = setting(
        "all", "inputs of one output that share a scale, or all of them", low=2
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dora(Lora):
    """LoRA with a trained magnitude for each output: y = x m (W + s A B) / |W + s A B|.

    The norm is that of each output's column, and a constant in the backward pass.

    Source: Liu et al. 2024, arXiv:2402.09353, section 4.3.
    """

    name: Literal["dora"] = "dora"  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ia3(AdapterConfig):
    """A trained factor for each output of keys and values, and for each input of the MLP's last.

    Source: Liu et al. 2022, arXiv:2205.05638, section 3.3.
    """

    name: Literal["ia3"] = "ia3"
    at: tuple[str, ...] = setting(
        ("*/attention/key/*", "*/attention/value/*", "*/mlp/down/*"),
        "patterns over paths of parameters: adapted linear layers",
    )
    inputs: tuple[str, ...] = setting(
        ("*/mlp/down/*",), "patterns over paths: layers whose inputs are scaled, not outputs"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bottleneck(AdapterConfig):
    """A small MLP after each adapted layer: y + up(act(down(y))); `up` begins at 0.

    Source: Houlsby et al. 2019, arXiv:1902.00751, section 2.1.
    """

    name: Literal["bottleneck"] = "bottleneck"
    unmerged: ClassVar[str] = "it is no linear map, and the base's layers are"
    at: tuple[str, ...] = setting(
        ("*/attention/out/*", "*/mlp/down/*"),
        "patterns over paths of parameters: adapted linear layers",
    )
    hidden: int = setting(64, "hidden units of the small MLP", low=1)
    activation: Literal["relu", "gelu", "silu"] = setting("gelu", "activation of the small MLP")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualConfig:
    """Settings of virtual tokens, which come before every text and have no ids.

    Each text of a row sees them, and its positions begin after them.
    """

    unmerged: ClassVar[str] = ""

    length: int = setting(16, "virtual tokens before every text", low=1)
    also: tuple[str, ...] = setting(
        (), "patterns over paths of parameters of the base that are trained whole"
    )

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens before every text."""
        return self.length

    @property
    def virtual_rows(self) -> int:
        """Number of virtual tokens that all layers compute, as they compute those of the text."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixTuning(VirtualConfig):
    """Trained keys and values of virtual tokens in each layer, which begin near 0.

    Source: Li and Liang 2021, arXiv:2101.00190; without the MLP that makes them.
    """

    name: Literal["prefix"] = "prefix"
    unmerged: ClassVar[str] = "its keys and values depend on no token, and weights cannot make them"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTuning(VirtualConfig):
    """Trained embeddings of virtual tokens.

    Source: Lester et al. 2021, arXiv:2104.08691.
    """

    name: Literal["prompt"] = "prompt"
    unmerged: ClassVar[str] = "its rows come before the ids of a text, and weights cannot add them"
    text: str = setting(
        "",
        "text whose embeddings are the initial ones, repeated or cut; without it those of random "
        "ids",
    )

    @property
    def virtual_rows(self) -> int:
        """Number of virtual tokens that all layers compute, as they compute those of the text."""
        return self.length


Tune = Full | Lora | QLora | Quantized | Dora | Ia3 | Bottleneck | PrefixTuning | PromptTuning


FIRST = ("lora_a0", "lora_b0")  # leaves with the first values of PiSSA


def kept_leaves(tune: Any) -> tuple[str, ...]:
    """Return entries of `optim.freeze` for an adapter's leaves that are not trained."""
    return tuple(f"*/{name}" for name in FIRST) if getattr(tune, "terms", 1) > 1 else ()


def b_rates(tune: Any) -> tuple[str, ...]:
    """Return entries of `optim.lr_scale` for an adapter's matrices."""
    rate = getattr(tune, "b_lr", 1.0)
    return () if rate == 1.0 else (f"*/lora_b={rate:g}",)
