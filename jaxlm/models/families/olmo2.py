"""OLMo 2 (arXiv:2501.00656): norms on each part's output, and over all heads of a token."""

import dataclasses
from typing import Literal

from jaxlm.models.families import llama_like
from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Hub, norms
from jaxlm.models.families.llama_like import LlamaLike

MAPPINGS = (
    *llama_like.STREAM,
    *norms(
        "model.layers.{i}.{}",
        post_attention_layernorm="attention_out_norm",
        post_feedforward_layernorm="mlp_out_norm",
    ),
    *(*llama_like.ATTENTION, *llama_like.QK_NORMS, *llama_like.MLP),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OLMo2(LlamaLike):
    """An OLMo-2-style decoder."""

    family: Literal["olmo2"] = "olmo2"

    RESIDUAL = "output"
    QK_NORM = "heads"
    HF_DEFAULTS = {"norm_eps": 1e-5}
    EXPECTED = {"attention_bias": (False,)}
    HUB = Hub("olmo2", "Olmo2ForCausalLM", MAPPINGS)
    SIZES = size_table(
        "depth width heads kv_heads hidden",
        {
            "olmo-2-1b": (16, 2048, 16, 16, 8192),
            "olmo-2-7b": (32, 4096, 32, 32, 11_008),
            "olmo-2-13b": (40, 5120, 40, 40, 13_824),
            "olmo-2-32b": (64, 5120, 40, 8, 27_648),
        },
        vocab=100_352,
        context=4096,
        rope_theta=5e5,
        norm_eps=1e-6,
    )
