"""SmolLM3 (Bakouch et al. 2025): a Llama with every fourth layer NoPE (arXiv:2501.18795)."""

import dataclasses
from typing import Any, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import LLAMA, LlamaLike, UnusedWindow
from jaxlm.nn.config import BlockConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3(UnusedWindow, LlamaLike):
    """A SmolLM3-style decoder: layer i has rotary positions unless `nope_every` divides i + 1."""

    family: Literal["smollm3"] = "smollm3"
    nope_every: int = setting(4, "period of layers; the last of each has no positions", low=2)

    HF_DEFAULTS = {"context": 32_768, "tied": True, "rope_theta": 2e6}
    EXPECTED = {"attention_bias": (False,), "mlp_bias": (False,)}
    HUB = Hub(model_type="smollm3", architecture="SmolLM3ForCausalLM", mappings=LLAMA)
    SIZES = size_table(
        "vocab context depth width heads kv_heads hidden",
        {"smollm3-3b": (128_256, 65_536, 36, 2048, 16, 4, 11_008)},
        rope_theta=5e6,
        norm_eps=1e-6,
        tied=True,
    )

    def pattern(self) -> tuple[BlockConfig, ...]:
        """Return one period of layers, the last without rotary positions."""
        block = self.block()
        attention = dataclasses.replace(block.attention, rotary=None)
        last = dataclasses.replace(block, attention=attention)
        return (block,) * (self.nope_every - 1) + (last,)

    @classmethod
    def from_hub(cls, attributes: Attributes) -> Self:
        """Return the family that a config.json describes; problems are noted in `attributes`."""
        every = attributes.get("no_rope_layer_interval", 4)
        family = cls(**cls.hub_settings(attributes), nope_every=max(every, 2))
        if attributes.get("no_rope_layers", family.rotated, kind=list) != family.rotated:
            attributes.reject("no_rope_layers", f"0 in every {every}th place")
        return family

    @property
    def rotated(self) -> list[int]:
        """1 for each layer with positions, 0 for each without."""
        return [int((layer + 1) % self.nope_every != 0) for layer in range(self.depth)]

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json."""
        return super().to_hub() | {
            "no_rope_layers": self.rotated,
            "no_rope_layer_interval": self.nope_every,
        }
