"""Qwen3-MoE (arXiv:2505.09388): Mixtral's form of experts, many and small, and Qwen3's normed queries and keys."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.experts import PLAIN, ROUTED, refuse_others
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.mixtral import Mixtral
from jaxlm.models.families.qwen2 import refuse_windows
from jaxlm.nn.config import AttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Mixtral):
    """A Qwen3-MoE-style decoder."""

    family: Literal["qwen3_moe"] = "qwen3_moe"  # type: ignore[assignment]
    experts: int = setting(128, **setting_docs.EXPERTS)
    top_k: int = setting(8, **setting_docs.TOP_K)
    hidden: int = setting(768, **setting_docs.EXPERT_HIDDEN)  # type: ignore[assignment]

    ABSENT: ClassVar[dict[str, Any]] = {"context": 32_768}
    HUB: ClassVar[Hub] = Hub(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        rows=(
            *llama_like.STREAM,
            *llama_like.NORMS,
            *llama_like.ATTENTION,
            *llama_like.QK_NORMS,
            *ROUTED,
        ),
    )

    def attention(self) -> AttentionConfig:
        """That of Qwen3."""
        return dataclasses.replace(super().attention(), qk_norm=self.norm)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        given.expect("attention_bias", False)
        given.expect("decoder_sparse_step", 1)
        given.expect("mlp_only_layers", [], None)
        given.ignore("router_aux_loss_coef")
        refuse_windows(given)
        shared = cls.shared_settings(given)
        return cls(
            **shared | {"hidden": given.get("moe_intermediate_size", 768)},
            experts=given.get("num_experts", given.get("num_local_experts", 128)),
            top_k=given.get("num_experts_per_tok", 8),
            normalised=given.get("norm_topk_prob", False, kind=bool),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        refuse_others(self, **PLAIN)
        return super(Mixtral, self).to_hub() | {
            "moe_intermediate_size": self.hidden,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": self.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        }


_ALL: dict[str, Any] = dict(
    vocab=151_936,
    context=40_960,
    kv_heads=4,
    head_dim=128,
    experts=128,
    top_k=8,
    rope_theta=1e6,
    norm_eps=1e-6,
)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _ALL | dict(depth=48, width=2048, heads=32, hidden=768),
    "qwen3-235b-a22b": _ALL | dict(depth=94, width=4096, heads=64, hidden=1536),
}
