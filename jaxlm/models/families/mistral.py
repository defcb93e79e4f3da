"""Mistral (arXiv:2310.06825), Mixtral (arXiv:2401.04088) and DeepSeekMoE (arXiv:2401.06066)."""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxlm.models.families import llama_like
from jaxlm.models.families.experts import Experts
from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, TensorMapping
from jaxlm.models.families.llama_like import LLAMA, LlamaLike, Windowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral(Windowed):
    """A Mistral-style decoder: a Llama, with a sliding window in its first version."""

    family: Literal["mistral"] = "mistral"

    HUB = Hub(model_type="mistral", architecture="MistralForCausalLM", mappings=LLAMA)
    SIZES = size_table(
        "vocab max_positions depth width heads kv_heads hidden",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixtral(Experts, LlamaLike):
    """A Llama whose MLPs are experts in every layer but the first `dense_depth`."""

    family: Literal["mixtral"] = "mixtral"

    ATTRIBUTES = {
        **LlamaLike.ATTRIBUTES,
        "experts": ConfigKey("num_local_experts", 8),
        "top_k": ConfigKey("num_experts_per_tok", 2),
    }
    HF_DEFAULTS = {"max_positions": 131_072, "norm_eps": 1e-5, "rope_theta": 1e6}
    CONSTANTS = {"sliding_window": None}
    # transformers' balance loss has another scale, and matters in training only.
    IGNORED: ClassVar[tuple[str, ...]] = ("router_aux_loss_coef",)
    COMPUTED: ClassVar[dict[str, Any]] = dict(normalize_top_k=True) | Experts.COMPUTED
    HUB = Hub(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        mappings=(
            *llama_like.STREAM,
            *llama_like.NORMS,
            *llama_like.ATTENTION,
            *(
                TensorMapping(
                    f"model.layers.{{i}}.block_sparse_moe.{name}.weight",
                    (f"mlp/{path}/weight",),
                    "transposed",
                )
                for name, path in (
                    ("gate", "router"),
                    ("experts.{e}.w1", "gate"),
                    ("experts.{e}.w3", "up"),
                    ("experts.{e}.w2", "down"),
                )
            ),
        ),
    )
    SIZES = size_table(
        "vocab max_positions depth width heads kv_heads experts top_k hidden",
        {
            # The published balance losses, 0.02 and 0.001, pool all layers and are top_k at an even
            # load; ours is 1 there, in each layer.
            "mixtral-8x7b": (
                *(32_000, 32_768, 32, 4096, 32, 8, 8, 2, 14_336),
                {"balance_loss": 0.02 * 2 / 32, "rope_theta": 1e6},
            ),
            "mixtral-8x22b": (
                *(32_000, 65_536, 56, 6144, 48, 8, 8, 2, 16_384),
                {"balance_loss": 0.001 * 2 / 56, "rope_theta": 1e6},
            ),
            "deepseek-moe-16b": (
                *(102_400, 4096, 28, 2048, 16, 16, 64, 6, 1408),
                dict(shared=2816, dense_depth=1, dense_hidden=10_944, normalize_top_k=False)
                | dict(balance_loss=0.001, norm_eps=1e-6),
            ),
        },
    )
