"""Gemma 3 (arXiv:2503.19786): five local layers to a global one, with a rotary base each; norms on queries and keys, no caps."""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, rope, setting_docs
from jaxlm.models.families.gemma2 import SANDWICH, Gemma2
from jaxlm.models.families.hub import Attributes, Hub, WrapperConfig
from jaxlm.nn.config import AttentionConfig
from jaxlm.nn.rotary import LinearScaling, Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma2):
    """A Gemma-3-style decoder of text: the last of six layers is global. It is a part of those that see images too."""

    family: Literal["gemma3"] = "gemma3"  # type: ignore[assignment]
    rope_theta: float = setting(1e6, **setting_docs.GLOBAL_ROPE_THETA)
    local_rope_theta: float = setting(10_000.0, **setting_docs.LOCAL_ROPE_THETA)
    window: int = setting(1024, **setting_docs.LOCAL_WINDOW)
    attention_cap: float | None = setting(None, **setting_docs.ATTENTION_CAP)
    logit_cap: float | None = setting(None, **setting_docs.LOGIT_CAP)

    ABSENT: ClassVar[dict[str, Any]] = {
        "context": 131_072,
        "tied": True,
        "head_dim": 256,
        "rope_theta": 1e6,
    }
    HUB: ClassVar[Hub] = Hub(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        rows=(
            *llama_like.STREAM,
            *SANDWICH,
            *llama_like.ATTENTION,
            *llama_like.QK_NORMS,
            *llama_like.MLP,
        ),
        whole=WrapperConfig(
            model_type="gemma3",
            attribute="text_config",
            absent={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
            own=(
                *("vision_config", "mm_tokens_per_image"),
                *("boi_token_index", "eoi_token_index", "image_token_index"),
                *("boi_token_id", "eoi_token_id", "image_token_id"),
            ),
            names=(("", "language_model."), ("model.", "model.language_model.")),
            beside=(
                *("vision_tower.", "multi_modal_projector."),
                *("model.vision_tower.", "model.multi_modal_projector."),
            ),
        ),
    )
    TURN: ClassVar[int] = 6

    def attention(self) -> AttentionConfig:
        """Of a global layer, with each head's queries and keys normed."""
        return dataclasses.replace(super().attention(), qk_norm=self.norm)

    def local(self) -> AttentionConfig:
        """Of a local layer, whose positions are never stretched."""
        return dataclasses.replace(super().local(), rotary=Rope(theta=self.local_rope_theta))

    @classmethod
    def shared_settings(cls, given: Attributes) -> dict[str, Any]:
        """The settings of Gemma 2, and a rotary base for either kind of layer.

        transformers 4 has `rope_local_base_freq`, transformers 5 both in `rope_parameters`, by kind of layer.
        """
        theta = given.get("rope_local_base_freq", 10_000.0, kind=float)
        both = given.split("rope_parameters", "sliding_attention", "full_attention")
        found = super().shared_settings(given)
        if both is not None:
            local, whole = both
            theta = local.get("rope_theta", theta, kind=float)
            local.expect("rope_type", "default")
            found["rope_theta"] = whole.get("rope_theta", 1e6, kind=float)
            found["rope_scaling"] = rope.scaling_of(whole, given)
            local.note_unused()
            whole.note_unused()
        return found | {"local_rope_theta": theta}

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {"rope_local_base_freq": self.local_rope_theta}


# Those that see images too have rows for them; their global layers read eight times as far as they were trained to.
_SEEING: dict[str, Any] = dict(
    vocab=262_208,
    context=131_072,
    window=1024,
    head_dim=256,
    rope_scaling=LinearScaling(factor=8.0),
)
SIZES: dict[str, dict[str, Any]] = {
    "gemma-3-270m": dict(
        vocab=262_144,
        context=32_768,
        depth=18,
        width=640,
        heads=4,
        kv_heads=1,
        head_dim=256,
        hidden=2048,
        window=512,
    ),
    "gemma-3-1b": dict(
        vocab=262_144,
        context=32_768,
        depth=26,
        width=1152,
        heads=4,
        kv_heads=1,
        head_dim=256,
        hidden=6912,
        window=512,
    ),
    "gemma-3-4b": _SEEING | dict(depth=34, width=2560, heads=8, kv_heads=4, hidden=10_240),
    "gemma-3-12b": _SEEING | dict(depth=48, width=3840, heads=16, kv_heads=8, hidden=15_360),
    "gemma-3-27b": _SEEING
    | dict(
        depth=62, width=5376, heads=32, kv_heads=16, hidden=21_504, head_dim=128, query_scale=168
    ),
}
