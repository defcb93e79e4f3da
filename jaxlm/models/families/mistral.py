"""Mistral (Jiang et al. 2023, arXiv:2310.06825): a Llama whose tokens see a window, in its first version."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import Rotated
from jaxlm.nn.config import AttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral(Rotated):
    """A Mistral-style decoder."""

    family: Literal["mistral"] = "mistral"
    window: int | None = setting(None, **setting_docs.WINDOW)

    HUB: ClassVar[Hub] = Hub(
        model_type="mistral",
        architecture="MistralForCausalLM",
        rows=(*llama_like.STREAM, *llama_like.NORMS, *llama_like.ATTENTION, *llama_like.MLP),
    )

    def attention(self) -> AttentionConfig:
        """That of Llama, within the window."""
        return dataclasses.replace(super().attention(), window=self.window)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it. transformers takes a window of 4,096 where it names none."""
        shared = cls.shared_settings(given)
        is_silent = not given.has("sliding_window")
        return cls(**shared, window=4096 if is_silent else given.get("sliding_window", None))

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {"sliding_window": self.window}


SIZES: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": dict(
        vocab=32_000,
        context=32_768,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        window=4096,
    ),
    "mistral-7b-v0.3": dict(
        vocab=32_768,
        context=32_768,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        rope_theta=1e6,
    ),
}
