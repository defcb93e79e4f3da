"""Phi-3 (arXiv:2404.14219): a Llama whose projections lie side by side in one tensor; Phi-4 mini rotates part of a head.

Those that read 128k tokens have frequencies of their own for documents beyond 4096.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, rope, setting_docs
from jaxlm.models.families.hub import Attributes, Hub, TensorMapping, linears
from jaxlm.models.families.llama_like import Rotated
from jaxlm.nn.config import AttentionConfig
from jaxlm.nn.rotary import LongScaling, NoScaling, Rope, Scaling

FUSED = (
    TensorMapping(
        "model.layers.{i}.self_attn.qkv_proj.weight",
        ("attention/query/weight", "attention/key/weight", "attention/value/weight"),
        "transposed",
    ),
    *linears("model.layers.{i}.{}", **{"self_attn.o_proj": "attention/out"}),
    TensorMapping(
        "model.layers.{i}.mlp.gate_up_proj.weight",
        ("mlp/gate/weight", "mlp/up/weight"),
        "transposed",
    ),
    *linears("model.layers.{i}.{}", **{"mlp.down_proj": "mlp/down"}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3(Rotated):
    """A Phi-3-style decoder."""

    family: Literal["phi3"] = "phi3"
    window: int | None = setting(None, **setting_docs.WINDOW)
    rope_share: float = setting(1.0, **setting_docs.ROPE_SHARE)
    rope_scaling: Scaling | LongScaling = setting(NoScaling(), **setting_docs.ROPE_SCALING)  # type: ignore[assignment]

    HUB: ClassVar[Hub] = Hub(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        rows=(*llama_like.STREAM, *llama_like.NORMS, *FUSED),
    )
    ROPE_KINDS: ClassVar[tuple[str, ...]] = (*rope.KINDS, "longrope")
    ABSENT: ClassVar[dict[str, Any]] = {"context": 4096, "norm_eps": 1e-5}

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """There is a number for each frequency, where they have some of their own."""
        yield from super().problems()
        count = self.rotary.dims(self.size_of_head) // 2
        for name in ("short", "long"):
            numbers = getattr(self.rope_scaling, name, None)
            if numbers is not None and len(numbers) != count:
                yield (
                    f"rope_scaling.{name}",
                    f"it has {len(numbers)} numbers, and {count} frequencies rotate a head",
                    f"give it {count} numbers, as the model's config.json does",
                )

    @property
    def rotary(self) -> Rope:
        """How heads are rotated."""
        return dataclasses.replace(super().rotary, share=self.rope_share)

    def attention(self) -> AttentionConfig:
        """That of Llama, within the window."""
        return dataclasses.replace(super().attention(), window=self.window)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
            given.expect(name, False)
        for name in ("full_attn_mod", "interpolate_factor"):  # Phi-4 mini's
            given.expect(name, 1)
        given.ignore("original_max_position_embeddings")  # said where nothing is stretched, too
        return cls(
            **cls.shared_settings(given),
            window=given.get("sliding_window", None),
        )

    @classmethod
    def rotary_settings(cls, rotary: Rope, given: Attributes) -> dict[str, Any]:
        """The settings of how heads are rotated."""
        whole = dataclasses.replace(rotary, share=1.0)
        return super().rotary_settings(whole, given) | {"rope_share": rotary.share}

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {
            "sliding_window": self.window,
            "partial_rotary_factor": self.rope_share,
        }


SIZES: dict[str, dict[str, Any]] = {
    "phi-3-mini-4k": dict(
        vocab=32_064,
        context=4096,
        depth=32,
        width=3072,
        heads=32,
        kv_heads=32,
        hidden=8192,
        window=2047,
    ),
    "phi-3-medium-4k": dict(
        vocab=32_064,
        context=4096,
        depth=40,
        width=5120,
        heads=40,
        kv_heads=10,
        hidden=17_920,
        window=2047,
    ),
}
