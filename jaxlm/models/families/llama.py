"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783): RMS norms before each part, rotary positions, grouped queries, gated SiLU.

SmolLM2 (arXiv:2502.02737) and TinyLlama (arXiv:2401.02385) are Llamas.
"""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.models.families import llama_like
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import Rotated
from jaxlm.nn.rotary import Llama3Scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama(Rotated):
    """A Llama-style decoder."""

    family: Literal["llama"] = "llama"

    HUB: ClassVar[Hub] = Hub(
        model_type="llama",
        architecture="LlamaForCausalLM",
        rows=(*llama_like.STREAM, *llama_like.NORMS, *llama_like.ATTENTION, *llama_like.MLP),
        buffers=("rotary_emb.inv_freq",),
    )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        given.expect("attention_bias", False)
        given.expect("mlp_bias", False)
        given.expect("is_llama_config", True)  # SmolLM2's say these two
        given.expect("rope_interleaved", False)
        context = given.get("max_position_embeddings", 2048)
        given.expect("max_sequence_length", context)  # what the first files said
        return super().from_hub(given)


SIZES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": dict(
        vocab=32_000, context=2048, depth=22, width=2048, heads=32, kv_heads=4, hidden=5632
    ),
    "llama-7b": dict(
        vocab=32_000,
        context=2048,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=32,
        hidden=11_008,
        norm_eps=1e-6,
    ),
    "llama-13b": dict(
        vocab=32_000,
        context=2048,
        depth=40,
        width=5120,
        heads=40,
        kv_heads=40,
        hidden=13_824,
        norm_eps=1e-6,
    ),
    "llama-33b": dict(
        vocab=32_000,
        context=2048,
        depth=60,
        width=6656,
        heads=52,
        kv_heads=52,
        hidden=17_920,
        norm_eps=1e-6,
    ),
    "llama-65b": dict(
        vocab=32_000,
        context=2048,
        depth=80,
        width=8192,
        heads=64,
        kv_heads=64,
        hidden=22_016,
    ),
    "llama2-7b": dict(
        vocab=32_000, context=4096, depth=32, width=4096, heads=32, kv_heads=32, hidden=11_008
    ),
    "llama2-13b": dict(
        vocab=32_000, context=4096, depth=40, width=5120, heads=40, kv_heads=40, hidden=13_824
    ),
    "llama2-70b": dict(
        vocab=32_000, context=4096, depth=80, width=8192, heads=64, kv_heads=8, hidden=28_672
    ),
    "llama3-8b": dict(
        vocab=128_256,
        context=8192,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        rope_theta=5e5,
    ),
    "llama3-70b": dict(
        vocab=128_256,
        context=8192,
        depth=80,
        width=8192,
        heads=64,
        kv_heads=8,
        hidden=28_672,
        rope_theta=5e5,
    ),
    "llama3.2-1b": dict(
        vocab=128_256,
        context=131_072,
        depth=16,
        width=2048,
        heads=32,
        kv_heads=8,
        hidden=8192,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(factor=32.0),
        tied=True,
    ),
    "llama3.1-8b": dict(
        vocab=128_256,
        context=131_072,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(),
    ),
    "llama3.1-70b": dict(
        vocab=128_256,
        context=131_072,
        depth=80,
        width=8192,
        heads=64,
        kv_heads=8,
        hidden=28_672,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(),
    ),
    "llama3.1-405b": dict(
        vocab=128_256,
        context=131_072,
        depth=126,
        width=16_384,
        heads=128,
        kv_heads=8,
        hidden=53_248,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(),
    ),
    "llama3.2-3b": dict(
        vocab=128_256,
        context=131_072,
        depth=28,
        width=3072,
        heads=24,
        kv_heads=8,
        hidden=8192,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(factor=32.0),
        tied=True,
    ),
    "smollm2-135m": dict(
        vocab=49_152,
        context=8192,
        depth=30,
        width=576,
        heads=9,
        kv_heads=3,
        hidden=1536,
        rope_theta=1e5,
        tied=True,
    ),
    "smollm2-360m": dict(
        vocab=49_152,
        context=8192,
        depth=32,
        width=960,
        heads=15,
        kv_heads=5,
        hidden=2560,
        rope_theta=1e5,
        tied=True,
    ),
    "smollm2-1.7b": dict(
        vocab=49_152,
        context=8192,
        depth=24,
        width=2048,
        heads=32,
        kv_heads=32,
        hidden=8192,
        rope_theta=1.3e5,
        tied=True,
    ),
}
