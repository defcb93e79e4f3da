"""Qwen2 and 2.5 (arXiv:2407.10671, 2412.15115): a Llama with biases on queries, keys and values."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.models.families import llama_like
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import Rotated
from jaxlm.nn.config import AttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2(Rotated):
    """A Qwen2-style decoder: biases on queries, keys and values."""

    family: Literal["qwen2"] = "qwen2"

    ABSENT: ClassVar[dict[str, Any]] = {"context": 32_768}
    HUB: ClassVar[Hub] = Hub(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        rows=(*llama_like.STREAM, *llama_like.NORMS, *llama_like.ATTENTION, *llama_like.MLP),
    )

    def attention(self) -> AttentionConfig:
        """That of Llama, with biases."""
        return dataclasses.replace(super().attention(), bias=True)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        refuse_windows(given)
        given.expect("use_mrope", False)
        return super().from_hub(given)

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {"use_sliding_window": False}


def refuse_windows(given: Attributes) -> None:
    """Notes a problem where layers see a window. A window that is named and not used says nothing."""
    given.expect("use_sliding_window", False)
    given.ignore("sliding_window", "max_window_layers")
    if given.get("use_sliding_window", False, kind=bool) is False:
        kinds = given.get("layer_types", [], kind=list)
        if any(kind != "full_attention" for kind in kinds):
            given.reject("layer_types", "full_attention in every layer")


_SMALL: dict[str, Any] = dict(vocab=151_936, rope_theta=1e6, norm_eps=1e-6, kv_heads=2, tied=True)
_LARGE: dict[str, Any] = dict(vocab=152_064, context=131_072, rope_theta=1e6)
SIZES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _SMALL | dict(context=32_768, depth=24, width=896, heads=14, hidden=4864),
    "qwen2.5-1.5b": _SMALL | dict(context=131_072, depth=28, width=1536, heads=12, hidden=8960),
    "qwen2.5-3b": _SMALL | dict(context=32_768, depth=36, width=2048, heads=16, hidden=11_008),
    "qwen2.5-7b": _LARGE
    | dict(depth=28, width=3584, heads=28, kv_heads=4, hidden=18_944, norm_eps=1e-6),
    "qwen2.5-14b": _LARGE | dict(depth=48, width=5120, heads=40, kv_heads=8, hidden=13_824),
    "qwen2.5-32b": _LARGE | dict(depth=64, width=5120, heads=40, kv_heads=8, hidden=27_648),
    "qwen2.5-72b": _LARGE | dict(depth=80, width=8192, heads=64, kv_heads=8, hidden=29_568),
}
