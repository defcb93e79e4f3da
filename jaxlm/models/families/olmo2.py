"""OLMo 2 (arXiv:2501.00656): norms after each part, inside of the residual, and over all queries and keys of a token together."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.models.families import llama_like
from jaxlm.models.families.hub import Attributes, Hub, norms
from jaxlm.models.families.llama_like import Rotated
from jaxlm.nn.config import AttentionConfig, BlockConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OLMo2(Rotated):
    """An OLMo-2-style decoder."""

    family: Literal["olmo2"] = "olmo2"

    ABSENT: ClassVar[dict[str, Any]] = {"norm_eps": 1e-5}
    HUB: ClassVar[Hub] = Hub(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        rows=(
            *llama_like.STREAM,
            *norms(
                "model.layers.{i}.{}",
                post_attention_layernorm="attention_out_norm",
                post_feedforward_layernorm="mlp_out_norm",
            ),
            *llama_like.ATTENTION,
            *llama_like.QK_NORMS,
            *llama_like.MLP,
        ),
    )

    def attention(self) -> AttentionConfig:
        """That of Llama, with queries and keys normed before they are cut into heads."""
        return dataclasses.replace(super().attention(), qk_norm=self.norm, qk_norm_over="heads")

    def block(self) -> BlockConfig:
        """A layer."""
        return dataclasses.replace(super().block(), residual="output")

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        given.expect("attention_bias", False)
        return super().from_hub(given)


_ALL: dict[str, Any] = dict(vocab=100_352, context=4096, rope_theta=5e5, norm_eps=1e-6)
SIZES: dict[str, dict[str, Any]] = {
    "olmo-2-1b": _ALL | dict(depth=16, width=2048, heads=16, kv_heads=16, hidden=8192),
    "olmo-2-7b": _ALL | dict(depth=32, width=4096, heads=32, kv_heads=32, hidden=11_008),
    "olmo-2-13b": _ALL | dict(depth=40, width=5120, heads=40, kv_heads=40, hidden=13_824),
    "olmo-2-32b": _ALL | dict(depth=64, width=5120, heads=40, kv_heads=8, hidden=27_648),
}
