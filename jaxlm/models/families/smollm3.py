"""SmolLM3 (Bakouch et al. 2025): a Llama in which every fourth layer has no positions (NoPE, arXiv:2501.18795)."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import Rotated
from jaxlm.models.families.qwen2 import refuse_windows
from jaxlm.nn.config import BlockConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3(Rotated):
    """A SmolLM3-style decoder: layer i has rotary positions but where i + 1 divides by `nope_every`."""

    family: Literal["smollm3"] = "smollm3"
    nope_every: int = setting(4, "layers, of which the last has no positions", low=2)

    ABSENT: ClassVar[dict[str, Any]] = {
        "context": 32_768,
        "tied": True,
        "rope_theta": 2_000_000.0,
    }
    HUB: ClassVar[Hub] = Hub(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        rows=(*llama_like.STREAM, *llama_like.NORMS, *llama_like.ATTENTION, *llama_like.MLP),
    )

    def pattern(self) -> tuple[BlockConfig, ...]:
        """All rotated but the last."""
        block = self.block()
        bare = dataclasses.replace(block.attention, rotary=None)
        last = dataclasses.replace(block, attention=bare)
        return (block,) * (self.nope_every - 1) + (last,)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        given.expect("attention_bias", False)
        given.expect("mlp_bias", False)
        refuse_windows(given)
        every = given.get("no_rope_layer_interval", 4)
        found = cls(**cls.shared_settings(given), nope_every=max(every, 2))
        named = given.get("no_rope_layers", found.rotated, kind=list)
        if named != found.rotated:
            given.reject("no_rope_layers", f"0 in every {every}th place")
        return found

    @property
    def rotated(self) -> list[int]:
        """1 for each layer with positions, 0 for each without."""
        return [int((layer + 1) % self.nope_every != 0) for layer in range(self.depth)]

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {
            "no_rope_layers": self.rotated,
            "no_rope_layer_interval": self.nope_every,
            "use_sliding_window": False,
        }


SIZES: dict[str, dict[str, Any]] = {
    "smollm3-3b": dict(
        vocab=128_256,
        context=65_536,
        depth=36,
        width=2048,
        heads=16,
        kv_heads=4,
        hidden=11_008,
        rope_theta=5e6,
        norm_eps=1e-6,
        tied=True,
    ),
}
