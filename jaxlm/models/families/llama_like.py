"""Base of families with rotary positions and gated MLPs, and Llama's tensor names. Free of JAX.

Example:
  >>> from jaxlm.models.families.llama import Llama
  >>> Llama(width=512, heads=8).attention().head_dim
  64
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import DecoderConfig
from jaxlm.models.families import family as families
from jaxlm.models.families import rope, setting_docs
from jaxlm.models.families.family import ACTIVATIONS, FamilySettings, Problems
from jaxlm.models.families.hub import Attributes, ConfigKey, TensorMapping, linears, norms
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig
from jaxlm.nn.rotary import NoScaling, Rope, Scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDecoder(FamilySettings):
    """A decoder with rotary positions, gated MLPs and, by default, RMS norms."""

    heads: int = setting(8, "query heads", low=1)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.GATED_HIDDEN)
    activation: Activation = setting("silu", **setting_docs.GATED_ACTIVATION)
    rope_theta: float = setting(10_000.0, **setting_docs.ROPE_THETA)
    rope_scaling: Scaling = setting(NoScaling(), **setting_docs.ROPE_SCALING)
    norm_eps: float = setting(1e-5, **setting_docs.RMS_NORM_EPS)
    tied: bool = setting(False, **setting_docs.TIED)

    ATTRIBUTES = {
        **families.SIZE_ATTRIBUTES,
        "activation": ConfigKey("hidden_act", "silu", words=ACTIVATIONS),
        "norm_eps": ConfigKey("rms_norm_eps", 1e-6, kind=float),
        "tied": ConfigKey("tie_word_embeddings", False, kind=bool),
    }
    IS_GATED = True
    ROPE_INTERLEAVED: ClassVar[bool] = False
    ROPE_KINDS: ClassVar[tuple[str, ...]] = rope.KINDS

    @property
    def rotary(self) -> Rope:
        """Rotary position embedding of queries and keys."""
        return Rope(
            theta=self.rope_theta, scaling=self.rope_scaling, interleaved=self.ROPE_INTERLEAVED
        )

    def attention(self) -> AttentionConfig:
        """Return the attention of a layer, the same in all unless `pattern` differs."""
        raise NotImplementedError

    def block(self) -> BlockConfig:
        """Return a layer."""
        return BlockConfig(
            attention=self.attention(),
            mlp=self.mlp,
            norm=self.norm,
            residual=self.RESIDUAL,
            dropout=self.dropout,
        )

    def pattern(self) -> tuple[BlockConfig, ...]:
        """Return the layers that repeat."""
        return (self.block(),)

    def build(self) -> DecoderConfig:
        """Return the model's config. `vocab` must be resolved by now."""
        return DecoderConfig(
            **self.backbone(), pattern=self.pattern(), final_norm=self.norm, tied=self.tied
        )

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        settings = super().hub_settings(attributes)
        theta = cls.HF_DEFAULTS.get("rope_theta", 10_000.0)
        rotary = rope.read(attributes, theta=theta, kinds=cls.ROPE_KINDS)
        return settings | cls.rotary_settings(rotary, attributes)

    @classmethod
    def rotary_settings(cls, rotary: Rope, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of the rotary position embedding."""
        if rotary.share != 1:
            attributes.note(
                f"partial_rotary_factor = {rotary.share}, and whole heads are rotated here"
            )
        return {"rope_theta": rotary.theta, "rope_scaling": rotary.scaling}

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json."""
        return super().to_hub() | rope.written(self.rope_theta, self.rope_scaling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaLike(GatedDecoder):
    """A gated decoder with grouped-query attention (arXiv:2305.13245)."""

    kv_heads: int = setting(
        8, "key and value heads; each serves heads / kv_heads query heads", low=1
    )
    head_dim: int | Literal["auto"] = setting(
        "auto", "size of a head; auto is width / heads", low=2
    )

    ATTRIBUTES = {
        **GatedDecoder.ATTRIBUTES,
        "kv_heads": ConfigKey("num_key_value_heads", lambda read: read["heads"]),
        "head_dim": ConfigKey(
            "head_dim",
            lambda read: read["width"] // read["heads"],
            value=lambda family: family.size_of_head,
        ),
    }

    # Norms of queries and keys (arXiv:2302.05442): of each head, or of all heads of a token.
    QK_NORM: ClassVar[Literal["head", "heads"] | None] = None
    QKV_BIAS: ClassVar[bool] = False

    def problems(self) -> Problems:
        """Yield a problem unless heads share the width and the keys evenly and rotate in pairs."""
        yield from super().problems()
        if self.head_dim == "auto" and self.width % self.heads:
            yield from families.uneven("width", self.width, "heads", self.heads)
        else:
            yield from families.unpaired("head_dim", self.size_of_head, self.size_of_head + 1)
        yield from families.uneven("heads", self.heads, "kv_heads", self.kv_heads)

    def attention(self) -> AttentionConfig:
        """Return the attention of a layer."""
        return AttentionConfig(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.size_of_head,
            rotary=self.rotary,
            qk_norm=self.norm if self.QK_NORM else None,
            qk_norm_over=self.QK_NORM or "head",
            bias=self.QKV_BIAS,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windowed(LlamaLike):
    """A Llama-like decoder whose layers may all have a sliding window."""

    window: int | None = setting(None, **setting_docs.WINDOW)

    ATTRIBUTES = {**LlamaLike.ATTRIBUTES, "window": ConfigKey("sliding_window", None)}

    def attention(self) -> AttentionConfig:
        """Return the attention of a layer."""
        return dataclasses.replace(super().attention(), window=self.window)


class UnusedWindow:
    """Mixin: a config.json that may name a sliding window without using it, as Qwen's do."""

    CONSTANTS: ClassVar[Mapping[str, Any]] = {"use_sliding_window": False}
    IGNORED: ClassVar[tuple[str, ...]] = ("sliding_window", "max_window_layers")

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes; a window in use is a problem."""
        if attributes.get("use_sliding_window", False, kind=bool) is False:
            kinds = attributes.get("layer_types", [], kind=list)
            if any(kind != "full_attention" for kind in kinds):
                attributes.reject("layer_types", "full_attention in every layer")
        return super().hub_settings(attributes)  # type: ignore[misc]


# Llama's tensor names, which most families use.
STREAM = (
    TensorMapping("model.embed_tokens.weight", ("embedding/table",)),
    *norms("model.{}", norm="final_norm"),
    TensorMapping("lm_head.weight", ("unembedding/weight",), "transposed"),
)
ATTENTION = linears(
    "model.layers.{i}.self_attn.{}",
    q_proj="attention/query",
    k_proj="attention/key",
    v_proj="attention/value",
    o_proj="attention/out",
)
QK_NORMS = norms(
    "model.layers.{i}.self_attn.{}", q_norm="attention/query_norm", k_norm="attention/key_norm"
)
MLP = linears(
    "model.layers.{i}.mlp.{}", gate_proj="mlp/gate", up_proj="mlp/up", down_proj="mlp/down"
)
NORMS = norms(
    "model.layers.{i}.{}", input_layernorm="attention_norm", post_attention_layernorm="mlp_norm"
)
LLAMA = (*STREAM, *NORMS, *ATTENTION, *MLP)
