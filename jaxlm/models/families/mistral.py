"""Mistral (arXiv:2310.06825): a Llama, with a sliding window in its first version."""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.families import setting_docs
from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import AttributeMapping, Attributes, Hub
from jaxlm.models.families.llama_like import LLAMA, LlamaLike
from jaxlm.nn.config import AttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral(LlamaLike):
    """A Mistral-style decoder."""

    family: Literal["mistral"] = "mistral"
    window: int | None = setting(None, **setting_docs.WINDOW)

    ATTRIBUTES = {
        **LlamaLike.ATTRIBUTES,
        "window": AttributeMapping("sliding_window", None),
    }
    HUB = Hub(model_type="mistral", architecture="MistralForCausalLM", rows=LLAMA)
    SIZES = size_table(
        "vocab context depth width heads kv_heads hidden",
        {
            "mistral-7b-v0.1": (32_000, 32_768, 32, 4096, 32, 8, 14_336, {"window": 4096}),
            "mistral-7b-v0.3": (32_768, 32_768, 32, 4096, 32, 8, 14_336, {"rope_theta": 1e6}),
        },
    )

    def attention(self) -> AttentionConfig:
        """Return Llama's attention within the window."""
        return dataclasses.replace(super().attention(), window=self.window)

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of a config.json; transformers' default for the window is 4,096."""
        settings = super().hub_settings(attributes)
        is_absent = not attributes.has("sliding_window")
        return settings | ({"window": 4096} if is_absent else {})
