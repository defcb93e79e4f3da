"""Gemma (arXiv:2403.08295): GELU gates, scales of norms counted from one, embeddings times the root of the width."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.llama_like import THEIRS, Rotated
from jaxlm.nn.config import Activation, NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma(Rotated):
    """A Gemma-style decoder."""

    family: Literal["gemma"] = "gemma"
    activation: Activation = setting("gelu_tanh", **setting_docs.GATED_ACTIVATION)
    norm_eps: float = setting(1e-6, **setting_docs.RMS_NORM_EPS)
    tied: bool = setting(True, **setting_docs.TIED)

    ABSENT: ClassVar[dict[str, Any]] = {"context": 8192, "tied": True, "head_dim": 256}
    HUB: ClassVar[Hub] = Hub(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        rows=(*llama_like.STREAM, *llama_like.NORMS, *llama_like.ATTENTION, *llama_like.MLP),
    )

    @property
    def norm(self) -> NormConfig:
        """An RMS norm whose stored scale is the distance from one."""
        return NormConfig(kind="rms", eps=self.norm_eps, offset=1.0)

    def build(self) -> Decoder:
        """The blocks, and embeddings times the root of the width."""
        return dataclasses.replace(super().build(), embed_scale=self.width**0.5)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        given.expect("attention_bias", False)
        given.expect("use_bidirectional_attention", False, None)
        return super().from_hub(given)

    @classmethod
    def shared_settings(cls, given: Attributes) -> dict[str, Any]:
        """The settings that all these families have.

        `hidden_activation` comes before `hidden_act`, which says "gelu" in files of models trained with its tanh form.
        """
        meanings = llama_like.ACTIVATIONS | {"gelu": "gelu_tanh"}
        older = given.choose("hidden_act", meanings, "gelu_pytorch_tanh")
        newer = given.choose("hidden_activation", llama_like.ACTIVATIONS, THEIRS[older])
        return super().shared_settings(given) | {"activation": newer}

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {"hidden_activation": THEIRS[self.activation]}


SIZES: dict[str, dict[str, Any]] = {
    "gemma-2b": dict(
        vocab=256_000,
        context=8192,
        depth=18,
        width=2048,
        heads=8,
        kv_heads=1,
        head_dim=256,
        hidden=16_384,
    ),
    "gemma-7b": dict(
        vocab=256_000,
        context=8192,
        depth=28,
        width=3072,
        heads=16,
        kv_heads=16,
        head_dim=256,
        hidden=24_576,
    ),
}
