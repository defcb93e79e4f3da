"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783): pre-norm, rotary positions, gated SiLU.

SmolLM2 (arXiv:2502.02737) and TinyLlama (arXiv:2401.02385) are Llamas. OLMo 2 (arXiv:2501.00656)
has other norms, SmolLM3 (Bakouch et al. 2025) layers without positions (NoPE, arXiv:2501.18795).
"""

import dataclasses
from typing import Any, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like
from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Attributes, Hub, norms
from jaxlm.models.families.llama_like import LLAMA, LlamaLike, UnusedWindow
from jaxlm.nn.config import BlockConfig
from jaxlm.nn.rotary import Llama3Scaling

EPS_1 = {"norm_eps": 1e-6}  # of the first Llamas but the largest
LLAMA_3 = {"rope_theta": 5e5}
LLAMA_3_1 = LLAMA_3 | {"rope_scaling": Llama3Scaling()}
LLAMA_3_2 = LLAMA_3 | {"rope_scaling": Llama3Scaling(factor=32.0), "tied": True}
OLMO = (
    *llama_like.STREAM,
    *norms(
        "model.layers.{i}.{}",
        post_attention_layernorm="attention_out_norm",
        post_feedforward_layernorm="mlp_out_norm",
    ),
    *(*llama_like.ATTENTION, *llama_like.QK_NORMS, *llama_like.MLP),
)
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
        "vocab max_positions depth width heads kv_heads hidden",
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
        attributes.expect("max_sequence_length", settings["max_positions"])  # in the first files
        return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class OLMo2(LlamaLike):
    """An OLMo-2-style decoder: norms on each part's output, and over all heads of a token."""

    family: Literal["olmo2"] = "olmo2"

    RESIDUAL = "output"
    QK_NORM = "heads"
    HF_DEFAULTS = {"norm_eps": 1e-5}
    EXPECTED = {"attention_bias": (False,)}
    HUB = Hub("olmo2", "Olmo2ForCausalLM", OLMO)
    SIZES = size_table(
        "depth width heads kv_heads hidden",
        {
            "olmo-2-1b": (16, 2048, 16, 16, 8192),
            "olmo-2-7b": (32, 4096, 32, 32, 11_008),
            "olmo-2-13b": (40, 5120, 40, 40, 13_824),
            "olmo-2-32b": (64, 5120, 40, 8, 27_648),
        },
        vocab=100_352,
        max_positions=4096,
        rope_theta=5e5,
        norm_eps=1e-6,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3(UnusedWindow, LlamaLike):
    """A SmolLM3-style decoder: layer i has rotary positions unless `nope_every` divides i + 1."""

    family: Literal["smollm3"] = "smollm3"
    nope_every: int = setting(4, "period of layers; the last of each has no positions", low=2)

    HF_DEFAULTS = {"max_positions": 32_768, "tied": True, "rope_theta": 2e6}
    EXPECTED = {"attention_bias": (False,), "mlp_bias": (False,)}
    HUB = Hub("smollm3", "SmolLM3ForCausalLM", LLAMA)
    SIZES = size_table(
        "vocab max_positions depth width heads kv_heads hidden",
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
