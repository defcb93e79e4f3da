"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783): pre-norm, rotary positions, gated SiLU.

SmolLM2 (arXiv:2502.02737) and TinyLlama (arXiv:2401.02385) are Llamas.
"""

import dataclasses
from typing import Any, Literal

from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import LLAMA, LlamaLike
from jaxlm.nn.rotary import Llama3Scaling

EPS_1 = {"norm_eps": 1e-6}  # of the first Llamas but the largest
LLAMA_3 = {"rope_theta": 5e5}
LLAMA_3_1 = LLAMA_3 | {"rope_scaling": Llama3Scaling()}
LLAMA_3_2 = LLAMA_3 | {"rope_scaling": Llama3Scaling(factor=32.0), "tied": True}
SMOL = {"rope_theta": 1e5, "tied": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama(LlamaLike):
    """A Llama-style decoder."""

    family: Literal["llama"] = "llama"

    HUB = Hub("llama", "LlamaForCausalLM", LLAMA, buffer_suffixes=("rotary_emb.inv_freq",))
    EXPECTED = {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "is_llama_config": (True,),  # this and the next are in SmolLM2's files
        "rope_interleaved": (False,),
    }
    SIZES = size_table(
        "vocab context depth width heads kv_heads hidden",
        {
            "tinyllama-1.1b": (32_000, 2048, 22, 2048, 32, 4, 5632),
            "llama-7b": (32_000, 2048, 32, 4096, 32, 32, 11_008, EPS_1),
            "llama-13b": (32_000, 2048, 40, 5120, 40, 40, 13_824, EPS_1),
            "llama-33b": (32_000, 2048, 60, 6656, 52, 52, 17_920, EPS_1),
            "llama-65b": (32_000, 2048, 80, 8192, 64, 64, 22_016),
            "llama2-7b": (32_000, 4096, 32, 4096, 32, 32, 11_008),
            "llama2-13b": (32_000, 4096, 40, 5120, 40, 40, 13_824),
            "llama2-70b": (32_000, 4096, 80, 8192, 64, 8, 28_672),
            "llama3-8b": (128_256, 8192, 32, 4096, 32, 8, 14_336, LLAMA_3),
            "llama3-70b": (128_256, 8192, 80, 8192, 64, 8, 28_672, LLAMA_3),
            "llama3.2-1b": (128_256, 131_072, 16, 2048, 32, 8, 8192, LLAMA_3_2),
            "llama3.1-8b": (128_256, 131_072, 32, 4096, 32, 8, 14_336, LLAMA_3_1),
            "llama3.1-70b": (128_256, 131_072, 80, 8192, 64, 8, 28_672, LLAMA_3_1),
            "llama3.1-405b": (128_256, 131_072, 126, 16_384, 128, 8, 53_248, LLAMA_3_1),
            "llama3.2-3b": (128_256, 131_072, 28, 3072, 24, 8, 8192, LLAMA_3_2),
            "smollm2-135m": (49_152, 8192, 30, 576, 9, 3, 1536, SMOL),
            "smollm2-360m": (49_152, 8192, 32, 960, 15, 5, 2560, SMOL),
            "smollm2-1.7b": (49_152, 8192, 24, 2048, 32, 32, 8192, SMOL | {"rope_theta": 1.3e5}),
        },
    )

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        settings = super().hub_settings(attributes)
        attributes.expect("max_sequence_length", settings["context"])  # in the first files
        return settings
