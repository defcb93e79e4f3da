"""Gemma 2 (arXiv:2408.00118): layers see a window and the whole row in turn, norms on both sides of each part, soft caps."""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.gemma import Gemma
from jaxlm.models.families.hub import Attributes, Hub, norms
from jaxlm.nn.config import AttentionConfig, BlockConfig

SANDWICH = norms(
    "model.layers.{i}.{}",
    input_layernorm="attention_norm",
    post_attention_layernorm="attention_out_norm",
    pre_feedforward_layernorm="mlp_norm",
    post_feedforward_layernorm="mlp_out_norm",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2(Gemma):
    """A Gemma-2-style decoder: the first of two layers is local."""

    family: Literal["gemma2"] = "gemma2"  # type: ignore[assignment]
    window: int = setting(4096, **setting_docs.LOCAL_WINDOW)
    query_scale: int | None = setting(
        None, "scores are divided by the root of this; None is the size of a head", low=1
    )
    attention_cap: float | None = setting(50.0, **setting_docs.ATTENTION_CAP)
    logit_cap: float | None = setting(30.0, **setting_docs.LOGIT_CAP)

    HUB: ClassVar[Hub] = Hub(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        rows=(*llama_like.STREAM, *SANDWICH, *llama_like.ATTENTION, *llama_like.MLP),
    )
    TURN: ClassVar[int] = 2  # layers, of which the last is global

    def attention(self) -> AttentionConfig:
        """Of a global layer."""
        scale = None if self.query_scale is None else self.query_scale**-0.5
        return dataclasses.replace(super().attention(), scale=scale, cap=self.attention_cap)

    def local(self) -> AttentionConfig:
        """Of a local layer."""
        return dataclasses.replace(self.attention(), window=self.window)

    def pattern(self) -> tuple[BlockConfig, ...]:
        """Local layers, then a global one."""
        whole = dataclasses.replace(self.block(), residual="sandwich")
        local = dataclasses.replace(whole, attention=self.local())
        return (local,) * (self.TURN - 1) + (whole,)

    def build(self) -> Decoder:
        """The blocks, and the cap of the logits."""
        return dataclasses.replace(super().build(), logit_cap=self.logit_cap)

    @classmethod
    def shared_settings(cls, given: Attributes) -> dict[str, Any]:
        """The settings that all these families have, and those of Gemma 2 and 3."""
        found = super().shared_settings(given)
        local, whole = "sliding_attention", "full_attention"
        given.ignore("sliding_window_pattern", "_sliding_window_pattern")
        kinds = [whole if (i + 1) % cls.TURN == 0 else local for i in range(found["depth"])]
        if given.get("layer_types", kinds, kind=list) != kinds:
            given.reject("layer_types", f"one {whole} after {cls.TURN - 1} {local}")
        return found | dict(
            window=given.get("sliding_window", 4096),
            query_scale=given.get("query_pre_attn_scalar", 256),
            attention_cap=given.get("attn_logit_softcapping", None, kind=float),
            logit_cap=given.get("final_logit_softcapping", None, kind=float),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {
            "sliding_window": self.window,
            "query_pre_attn_scalar": self.query_scale or self.size_of_head,
            "attn_logit_softcapping": self.attention_cap,
            "final_logit_softcapping": self.logit_cap,
        }


SIZES: dict[str, dict[str, Any]] = {
    "gemma-2-2b": dict(
        vocab=256_000,
        context=8192,
        depth=26,
        width=2304,
        heads=8,
        kv_heads=4,
        head_dim=256,
        hidden=9216,
    ),
    "gemma-2-9b": dict(
        vocab=256_000,
        context=8192,
        depth=42,
        width=3584,
        heads=16,
        kv_heads=8,
        head_dim=256,
        hidden=14_336,
    ),
    "gemma-2-27b": dict(
        vocab=256_000,
        context=8192,
        depth=46,
        width=4608,
        heads=32,
        kv_heads=16,
        head_dim=128,
        hidden=36_864,
        query_scale=144,
    ),
}
