"""Cohere's Command-R (transformers' `CohereForCausalLM`): a Llama with parallel attention and MLP.

One layer norm without bias feeds both parts; rotary positions are interleaved, and logits scaled.
Command-R+ also has norms of queries and keys with a scale per head, which are refused.

Example:
  >>> Cohere(vocab=64, width=64, heads=4, kv_heads=2).build().logit_scale
  0.0625
"""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import DecoderConfig
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.family import size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, norms
from jaxlm.models.families.llama_like import LlamaLike
from jaxlm.nn.config import NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere(LlamaLike):
    """A Command-R-style decoder."""

    family: Literal["cohere"] = "cohere"
    norm_eps: float = setting(1e-5, **setting_docs.LAYER_NORM_EPS)
    tied: bool = setting(True, **setting_docs.TIED)
    logit_scale: float = setting(0.0625, "factor on the logits", above=0)

    ATTRIBUTES = {
        **LlamaLike.ATTRIBUTES,
        "norm_eps": ConfigKey("layer_norm_eps", 1e-5, kind=float),
        "logit_scale": ConfigKey("logit_scale", 0.0625, kind=float),
    }
    HF_DEFAULTS = {"max_positions": 8192, "tied": True, "rope_theta": 5e5}
    CONSTANTS = {"attention_bias": False, "use_qk_norm": False}
    RESIDUAL = "parallel"
    ROPE_INTERLEAVED = True
    HUB = Hub(
        model_type="cohere",
        architecture="CohereForCausalLM",
        mappings=(
            *llama_like.STREAM,
            *norms("model.layers.{i}.{}", input_layernorm="attention_norm"),
            *llama_like.ATTENTION,
            *llama_like.MLP,
        ),
        buffer_suffixes=("rotary_emb.inv_freq",),
    )
    SIZES = size_table(
        "vocab max_positions depth width heads kv_heads hidden",
        {"command-r-v01": (256_000, 131_072, 40, 8192, 64, 64, 22_528, {"rope_theta": 8e6})},
    )

    @property
    def norm(self) -> NormConfig:
        """Every norm of the stream."""
        return NormConfig(kind="layer", eps=self.norm_eps)

    def build(self) -> DecoderConfig:
        """Return the model's config, with scaled logits."""
        return dataclasses.replace(super().build(), logit_scale=self.logit_scale)

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of a config.json; `model_max_length` is the trained context."""
        settings = super().hub_settings(attributes)
        length = attributes.get("model_max_length", settings["max_positions"])
        return settings | {"max_positions": length}
