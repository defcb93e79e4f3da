"""Phi-3 (arXiv:2404.14219): a Llama with fused projections; Phi-4 mini rotates part of a head.

Models with a context of 128k tokens have other rotary frequencies for documents beyond 4096.
"""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, rope, setting_docs
from jaxlm.models.families.family import Problems, size_table
from jaxlm.models.families.hub import Attributes, Hub, TensorMapping, linears
from jaxlm.models.families.llama_like import Windowed
from jaxlm.nn.rotary import LongScaling, NoScaling, Rope, Scaling

FUSED = (
    TensorMapping(
        "model.layers.{i}.self_attn.qkv_proj.weight",
        ("attention/query/weight", "attention/key/weight", "attention/value/weight"),
        "transposed",
    ),
    TensorMapping(
        "model.layers.{i}.mlp.gate_up_proj.weight",
        ("mlp/gate/weight", "mlp/up/weight"),
        "transposed",
    ),
    *linears(
        "model.layers.{i}.{}", **{"self_attn.o_proj": "attention/out", "mlp.down_proj": "mlp/down"}
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3(Windowed):
    """A Phi-3-style decoder."""

    family: Literal["phi3"] = "phi3"
    rotary_fraction: float = setting(1.0, **setting_docs.ROTARY_FRACTION)
    rope_scaling: Scaling | LongScaling = setting(  # type: ignore[assignment]
        NoScaling(), **setting_docs.ROPE_SCALING
    )

    HF_DEFAULTS = {"max_positions": 4096, "norm_eps": 1e-5}
    EXPECTED = {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),  # this and the next are in Phi-4 mini's file
        "interpolate_factor": (1,),
    }
    IGNORED = ("original_max_position_embeddings",)
    ROPE_KINDS = (*rope.KINDS, "longrope")
    HUB = Hub("phi3", "Phi3ForCausalLM", (*llama_like.STREAM, *llama_like.NORMS, *FUSED))
    SIZES = size_table(
        "depth width heads kv_heads hidden",
        {"phi-3-mini-4k": (32, 3072, 32, 32, 8192), "phi-3-medium-4k": (40, 5120, 40, 10, 17_920)},
        vocab=32_064,
        max_positions=4096,
        window=2047,
    )

    def problems(self) -> Problems:
        """Yield a problem unless a longrope scaling has a number for each rotary frequency."""
        yield from super().problems()
        count = self.rotary.dims(self.size_of_head) // 2
        for name in ("short", "long"):
            numbers = getattr(self.rope_scaling, name, None)
            if numbers is not None and len(numbers) != count:
                why = f"it has {len(numbers)} numbers, and {count} frequencies rotate a head"
                fix = f"give it {count} numbers, as the model's config.json does"
                yield f"rope_scaling.{name}", why, fix

    @property
    def rotary(self) -> Rope:
        """Rotary position embedding of queries and keys."""
        return dataclasses.replace(super().rotary, share=self.rotary_fraction)

    @classmethod
    def rotary_settings(cls, rotary: Rope, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of the rotary position embedding."""
        whole = dataclasses.replace(rotary, share=1.0)
        return super().rotary_settings(whole, attributes) | {"rotary_fraction": rotary.share}

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json."""
        return super().to_hub() | {"partial_rotary_factor": self.rotary_fraction}
