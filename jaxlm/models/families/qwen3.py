"""Qwen3 (arXiv:2505.09388): a Llama with norms on queries and keys."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.models.families import llama_like
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import Rotated
from jaxlm.models.families.qwen2 import refuse_windows
from jaxlm.nn.config import AttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3(Rotated):
    """A Qwen3-style decoder: RMS norms on queries and keys (arXiv:2302.05442)."""

    family: Literal["qwen3"] = "qwen3"

    ABSENT: ClassVar[dict[str, Any]] = {"context": 32_768, "head_dim": 128}
    HUB: ClassVar[Hub] = Hub(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        rows=(
            *llama_like.STREAM,
            *llama_like.NORMS,
            *llama_like.ATTENTION,
            *llama_like.QK_NORMS,
            *llama_like.MLP,
        ),
    )

    def attention(self) -> AttentionConfig:
        """That of Llama, with each head's queries and keys normed."""
        return dataclasses.replace(super().attention(), qk_norm=self.norm)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        given.expect("attention_bias", False)
        refuse_windows(given)
        return super().from_hub(given)

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {"use_sliding_window": False}


_ALL: dict[str, Any] = dict(
    vocab=151_936, context=40_960, kv_heads=8, head_dim=128, rope_theta=1e6, norm_eps=1e-6
)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _ALL | dict(depth=28, width=1024, heads=16, hidden=3072, tied=True),
    "qwen3-1.7b": _ALL | dict(depth=28, width=2048, heads=16, hidden=6144, tied=True),
    "qwen3-4b": _ALL | dict(depth=36, width=2560, heads=32, hidden=9728, tied=True),
    "qwen3-8b": _ALL | dict(depth=36, width=4096, heads=32, hidden=12_288),
    "qwen3-14b": _ALL | dict(depth=40, width=5120, heads=40, hidden=17_408),
    "qwen3-32b": _ALL | dict(depth=64, width=5120, heads=64, hidden=25_600),
}
