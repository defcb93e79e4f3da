"""Mixtral (arXiv:2401.04088) and its fine-grained kin, DeepSeekMoE (arXiv:2401.06066): a Llama whose MLPs are experts."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.models.families import llama_like
from jaxlm.models.families.experts import PLAIN, Experts, refuse_others
from jaxlm.models.families.hub import Attributes, Hub, TensorMapping
from jaxlm.models.families.llama_like import Rotated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixtral(Experts, Rotated):
    """A Llama-style decoder with a mixture of experts in every layer but the first `dense_depth`."""

    family: Literal["mixtral"] = "mixtral"

    ABSENT: ClassVar[dict[str, Any]] = {
        "context": 131_072,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    HUB: ClassVar[Hub] = Hub(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        rows=(
            *llama_like.STREAM,
            *llama_like.NORMS,
            *llama_like.ATTENTION,
            TensorMapping(
                "model.layers.{i}.block_sparse_moe.gate.weight",
                ("mlp/router/weight",),
                "transposed",
            ),
            *(
                TensorMapping(
                    f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{theirs}.weight",
                    (f"mlp/{ours}/weight",),
                    "transposed",
                )
                for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
            ),
        ),
    )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it.

        The weight of the balance loss is of training, and transformers' is of another scale: ours stays as it is.
        """
        given.expect("sliding_window", None)
        given.ignore("router_aux_loss_coef")
        return cls(
            **cls.shared_settings(given),
            experts=given.get("num_local_experts", 8),
            top_k=given.get("num_experts_per_tok", 2),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        refuse_others(self, normalised=True, **PLAIN)
        return super().to_hub() | {
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "sliding_window": None,
        }


SIZES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": dict(
        vocab=32_000,
        context=32_768,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        experts=8,
        top_k=2,
        hidden=14_336,
        # Published is 0.02, for all layers pooled and k where the load is even; ours is 1 there, in each of 32 layers.
        balance_loss=0.02 * 2 / 32,
        rope_theta=1e6,
    ),
    "mixtral-8x22b": dict(
        vocab=32_000,
        context=65_536,
        depth=56,
        width=6144,
        heads=48,
        kv_heads=8,
        experts=8,
        top_k=2,
        hidden=16_384,
        balance_loss=0.001 * 2 / 56,  # likewise
        rope_theta=1e6,
    ),
    "deepseek-moe-16b": dict(
        vocab=102_400,
        context=4096,
        depth=28,
        width=2048,
        heads=16,
        kv_heads=16,
        experts=64,
        top_k=6,
        hidden=1408,
        shared=2816,
        dense_depth=1,
        dense_hidden=10_944,
        normalised=False,
        balance_loss=0.001,
        norm_eps=1e-6,
    ),
}
