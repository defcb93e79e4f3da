"""Qwen 2, 2.5, 3 and 3-MoE (arXiv:2407.10671, 2412.15115, 2505.09388): Llamas and Mixtrals."""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.experts import ROUTED, Experts
from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub
from jaxlm.models.families.llama_like import LLAMA, QK_NORMS, LlamaLike, UnusedWindow
from jaxlm.models.families.mistral import Mixtral

SMALL = {"vocab": 151_936, "norm_eps": 1e-6, "tied": True}
MAPPINGS = (*llama_like.STREAM, *llama_like.NORMS, *llama_like.ATTENTION, *QK_NORMS, *ROUTED)
QWEN3: dict[str, Any] = dict(
    vocab=151_936, max_positions=40_960, head_dim=128, rope_theta=1e6, norm_eps=1e-6
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2(UnusedWindow, LlamaLike):
    """A Qwen2-style decoder: a Llama with biases on queries, keys and values."""

    family: Literal["qwen2"] = "qwen2"

    QKV_BIAS = True
    HF_DEFAULTS = {"max_positions": 32_768}
    EXPECTED = {"use_mrope": (False,)}
    HUB = Hub(model_type="qwen2", architecture="Qwen2ForCausalLM", mappings=LLAMA)
    SIZES = size_table(
        "max_positions depth width heads kv_heads hidden",
        {
            "qwen2.5-0.5b": (32_768, 24, 896, 14, 2, 4864, SMALL),
            "qwen2.5-1.5b": (131_072, 28, 1536, 12, 2, 8960, SMALL),
            "qwen2.5-3b": (32_768, 36, 2048, 16, 2, 11_008, SMALL),
            "qwen2.5-7b": (131_072, 28, 3584, 28, 4, 18_944, {"norm_eps": 1e-6}),
            "qwen2.5-14b": (131_072, 48, 5120, 40, 8, 13_824),
            "qwen2.5-32b": (131_072, 64, 5120, 40, 8, 27_648),
            "qwen2.5-72b": (131_072, 80, 8192, 64, 8, 29_568),
        },
        vocab=152_064,
        rope_theta=1e6,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3(UnusedWindow, LlamaLike):
    """A Qwen3-style decoder: a Llama with RMS norms on queries and keys."""

    family: Literal["qwen3"] = "qwen3"

    QK_NORM = "head"
    HF_DEFAULTS = {"max_positions": 32_768, "head_dim": 128}
    EXPECTED = {"attention_bias": (False,)}
    HUB = Hub(model_type="qwen3", architecture="Qwen3ForCausalLM", mappings=(*LLAMA, *QK_NORMS))
    SIZES = size_table(
        "depth width heads hidden",
        {
            "qwen3-0.6b": (28, 1024, 16, 3072, {"tied": True}),
            "qwen3-1.7b": (28, 2048, 16, 6144, {"tied": True}),
            "qwen3-4b": (36, 2560, 32, 9728, {"tied": True}),
            "qwen3-8b": (36, 4096, 32, 12_288),
            "qwen3-14b": (40, 5120, 40, 17_408),
            "qwen3-32b": (64, 5120, 64, 25_600),
        },
        kv_heads=8,
        **QWEN3,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Moe(UnusedWindow, Mixtral):
    """A Qwen3-MoE-style decoder: Mixtral's experts, many and small, and Qwen3's attention."""

    family: Literal["qwen3_moe"] = "qwen3_moe"  # type: ignore[assignment]
    experts: int = setting(128, **setting_docs.EXPERTS)
    top_k: int = setting(8, **setting_docs.TOP_K)
    hidden: int = setting(768, **setting_docs.EXPERT_HIDDEN)  # type: ignore[assignment]

    QK_NORM = "head"
    ATTRIBUTES = {
        **LlamaLike.ATTRIBUTES,
        "hidden": ConfigKey("moe_intermediate_size", 768),
        "top_k": ConfigKey("num_experts_per_tok", 8),
    } | dict(normalize_top_k=ConfigKey("norm_topk_prob", False, kind=bool))
    COMPUTED = Experts.COMPUTED
    HF_DEFAULTS = {"max_positions": 32_768}
    CONSTANTS = {**UnusedWindow.CONSTANTS, "decoder_sparse_step": 1}
    EXPECTED = {"attention_bias": (False,), "mlp_only_layers": ([], None)}
    IGNORED = ("router_aux_loss_coef", *UnusedWindow.IGNORED)
    HUB = Hub("qwen3_moe", "Qwen3MoeForCausalLM", MAPPINGS)
    SIZES = size_table(
        "depth width heads hidden",
        {"qwen3-30b-a3b": (48, 2048, 32, 768), "qwen3-235b-a22b": (94, 4096, 64, 1536)},
        kv_heads=4,
        **QWEN3,
    )

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        attributes.get("intermediate_size")  # required, and of no layer
        experts = attributes.get("num_experts", attributes.get("num_local_experts", 128))
        return super().hub_settings(attributes) | {"experts": experts}

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        return super().to_hub() | {
            "intermediate_size": self.hidden,
            "num_experts": self.experts,
            "mlp_only_layers": [],
        }
