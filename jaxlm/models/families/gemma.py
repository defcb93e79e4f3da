"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786)."""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import DecoderConfig
from jaxlm.models.families import llama_like, rope, setting_docs
from jaxlm.models.families.family import ACTIVATIONS, size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, WrapperConfig, norms
from jaxlm.models.families.llama_like import LLAMA, LlamaLike
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig, NormConfig
from jaxlm.nn.rotary import LinearScaling, Rope

SANDWICH = norms(
    "model.layers.{i}.{}",
    input_layernorm="attention_norm",
    post_attention_layernorm="attention_out_norm",
    pre_feedforward_layernorm="mlp_norm",
    post_feedforward_layernorm="mlp_out_norm",
)
MAPPINGS = (*llama_like.STREAM, *SANDWICH, *llama_like.ATTENTION, *llama_like.MLP)
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # transformers' names of kinds of layers
COLUMNS = "max_positions depth width heads kv_heads head_dim hidden"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma(LlamaLike):
    """A Gemma-style decoder: GELU gates, norm scales counted from 1, scaled embeddings."""

    family: Literal["gemma"] = "gemma"
    activation: Activation = setting("gelu_tanh", **setting_docs.GATED_ACTIVATION)
    norm_eps: float = setting(1e-6, **setting_docs.RMS_NORM_EPS)
    tied: bool = setting(True, **setting_docs.TIED)

    HF_DEFAULTS = {"max_positions": 8192, "tied": True, "head_dim": 256}
    EXPECTED = {"attention_bias": (False,), "use_bidirectional_attention": (False, None)}
    HUB = Hub("gemma", "GemmaForCausalLM", LLAMA)
    SIZES = size_table(
        COLUMNS,
        {
            "gemma-2b": (8192, 18, 2048, 8, 1, 256, 16_384),
            "gemma-7b": (8192, 28, 3072, 16, 16, 256, 24_576),
        },
        vocab=256_000,
    )

    @property
    def norm(self) -> NormConfig:
        """An RMS norm whose stored scale is the difference from 1."""
        return NormConfig(kind="rms", eps=self.norm_eps, offset=1.0)

    def build(self) -> DecoderConfig:
        """Return the model's config, with embeddings scaled by sqrt(width)."""
        return dataclasses.replace(super().build(), embed_scale=self.width**0.5)

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes.

        `hidden_activation` takes precedence over `hidden_act`, which is "gelu" in files of models
        that were trained with the tanh approximation.
        """
        meanings = ACTIVATIONS | {"gelu": "gelu_tanh"}
        older = attributes.choose("hidden_act", meanings, "gelu_pytorch_tanh")
        default = cls.ATTRIBUTES["activation"].written(older)
        newer = attributes.choose("hidden_activation", ACTIVATIONS, default)
        return super().hub_settings(attributes) | {"activation": newer}

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json."""
        attributes = super().to_hub()
        return attributes | {"hidden_activation": attributes["hidden_act"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2(Gemma):
    """A Gemma-2-style decoder: local and global layers in turn, sandwich norms, softcaps."""

    family: Literal["gemma2"] = "gemma2"  # type: ignore[assignment]
    window: int = setting(4096, **setting_docs.LOCAL_WINDOW)
    query_scale: int | None = setting(
        None, "scores are divided by the square root of this (None: the size of a head)", low=1
    )
    attention_softcap: float | None = setting(50.0, **setting_docs.ATTENTION_SOFTCAP)
    logit_softcap: float | None = setting(30.0, **setting_docs.LOGIT_SOFTCAP)

    ATTRIBUTES = {
        **Gemma.ATTRIBUTES,
        "window": ConfigKey("sliding_window", 4096),
        "query_scale": ConfigKey(
            "query_pre_attn_scalar",
            256,
            value=lambda family: family.query_scale or family.size_of_head,
        ),
        "attention_softcap": ConfigKey("attn_logit_softcapping", None, kind=float),
        "logit_softcap": ConfigKey("final_logit_softcapping", None, kind=float),
    }
    IGNORED = ("sliding_window_pattern", "_sliding_window_pattern")
    RESIDUAL = "sandwich"
    PATTERN_LENGTH = 2  # layers; the last is global
    HUB = Hub("gemma2", "Gemma2ForCausalLM", MAPPINGS)
    SIZES = size_table(
        COLUMNS,
        {
            "gemma-2-2b": (8192, 26, 2304, 8, 4, 256, 9216),
            "gemma-2-9b": (8192, 42, 3584, 16, 8, 256, 14_336),
            "gemma-2-27b": (8192, 46, 4608, 32, 16, 128, 36_864, {"query_scale": 144}),
        },
        vocab=256_000,
    )

    def attention(self) -> AttentionConfig:
        """Return the attention of a global layer."""
        scale = None if self.query_scale is None else self.query_scale**-0.5
        return dataclasses.replace(super().attention(), scale=scale, softcap=self.attention_softcap)

    def local_attention(self) -> AttentionConfig:
        """Return the attention of a local layer."""
        return dataclasses.replace(self.attention(), window=self.window)

    def pattern(self) -> tuple[BlockConfig, ...]:
        """Return the local layers and then a global one."""
        last = self.block()
        local = dataclasses.replace(last, attention=self.local_attention())
        return (local,) * (self.PATTERN_LENGTH - 1) + (last,)

    def build(self) -> DecoderConfig:
        """Return the model's config, with the softcap of the logits."""
        return dataclasses.replace(super().build(), logit_softcap=self.logit_softcap)

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        settings, length = super().hub_settings(attributes), cls.PATTERN_LENGTH
        kinds = [LOCAL if (i + 1) % length else GLOBAL for i in range(settings["depth"])]
        if attributes.get("layer_types", kinds, kind=list) != kinds:
            attributes.reject("layer_types", f"one {GLOBAL} after {length - 1} {LOCAL}")
        return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma2):
    """A Gemma-3-style text decoder, alone or in a multimodal model; the last of 6 layers is global.

    Global and local layers have a rotary base each. Queries and keys have norms, and no softcaps.
    """

    family: Literal["gemma3"] = "gemma3"  # type: ignore[assignment]
    rope_theta: float = setting(1e6, **setting_docs.GLOBAL_ROPE_THETA)
    local_rope_theta: float = setting(10_000.0, **setting_docs.LOCAL_ROPE_THETA)
    window: int = setting(1024, **setting_docs.LOCAL_WINDOW)
    attention_softcap: float | None = setting(None, **setting_docs.ATTENTION_SOFTCAP)
    logit_softcap: float | None = setting(None, **setting_docs.LOGIT_SOFTCAP)

    ATTRIBUTES = {
        **Gemma2.ATTRIBUTES,
        "local_rope_theta": ConfigKey("rope_local_base_freq", 10_000.0, kind=float),
    }
    HF_DEFAULTS = {"max_positions": 131_072, "tied": True, "head_dim": 256, "rope_theta": 1e6}
    PATTERN_LENGTH = 6
    QK_NORM = "head"
    HUB = Hub(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        mappings=(*Gemma2.HUB.mappings, *llama_like.QK_NORMS),
        wrapper=WrapperConfig(
            model_type="gemma3",
            attribute="text_config",
            defaults={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
            ignored_attributes=(
                *("vision_config", "mm_tokens_per_image"),
                *("boi_token_index", "eoi_token_index", "image_token_index"),
                *("boi_token_id", "eoi_token_id", "image_token_id"),
            ),
            prefixes=(("", "language_model."), ("model.", "model.language_model.")),
            other_prefixes=(
                *("vision_tower.", "multi_modal_projector."),
                *("model.vision_tower.", "model.multi_modal_projector."),
            ),
        ),
    )
    # Multimodal sizes have rows for images, and rotary positions of global layers divided by 8.
    MULTIMODAL = {"vocab": 262_208, "window": 1024, "rope_scaling": LinearScaling(factor=8.0)}
    SIZES = size_table(
        COLUMNS,
        {
            "gemma-3-270m": (32_768, 18, 640, 4, 1, 256, 2048),
            "gemma-3-1b": (32_768, 26, 1152, 4, 1, 256, 6912),
            "gemma-3-4b": (131_072, 34, 2560, 8, 4, 256, 10_240, MULTIMODAL),
            "gemma-3-12b": (131_072, 48, 3840, 16, 8, 256, 15_360, MULTIMODAL),
            "gemma-3-27b": (
                *(131_072, 62, 5376, 32, 16, 128, 21_504),
                MULTIMODAL | {"query_scale": 168},
            ),
        },
        vocab=262_144,
        window=512,
    )

    def local_attention(self) -> AttentionConfig:
        """Return the attention of a local layer, whose rotary positions are not scaled."""
        rotary = Rope(theta=self.local_rope_theta)
        return dataclasses.replace(super().local_attention(), rotary=rotary)

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of a config.json; since v5 `rope_parameters` has both bases."""
        both = attributes.split("rope_parameters", LOCAL, GLOBAL)
        settings = super().hub_settings(attributes)
        if both is not None:
            local, whole = both
            local.expect("rope_type", "default")
            theta = local.get("rope_theta", settings["local_rope_theta"], kind=float)
            settings["local_rope_theta"] = theta
            settings["rope_theta"] = whole.get("rope_theta", 1e6, kind=float)
            settings["rope_scaling"] = rope.scaling_of(whole, attributes)
            local.note_unused()
            whole.note_unused()
        return settings
