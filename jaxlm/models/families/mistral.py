"""Mistral (arXiv:2310.06825): a Llama, with a sliding window in its first version."""

import dataclasses
from typing import Any, Literal

from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import LLAMA, Windowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral(Windowed):
    """A Mistral-style decoder."""

    family: Literal["mistral"] = "mistral"

    HUB = Hub(model_type="mistral", architecture="MistralForCausalLM", rows=LLAMA)
    SIZES = size_table(
        "vocab context depth width heads kv_heads hidden",
        {
            "mistral-7b-v0.1": (32_000, 32_768, 32, 4096, 32, 8, 14_336, {"window": 4096}),
            "mistral-7b-v0.3": (32_768, 32_768, 32, 4096, 32, 8, 14_336, {"rope_theta": 1e6}),
        },
    )

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of a config.json; transformers' default for the window is 4,096."""
        settings = super().hub_settings(attributes)
        is_absent = not attributes.has("sliding_window")
        return settings | ({"window": 4096} if is_absent else {})
