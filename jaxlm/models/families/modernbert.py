"""ModernBERT (arXiv:2412.13663): an encoder with rotary positions, gated GELU and local layers."""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import EncoderConfig, HeadConfig
from jaxlm.models.families import family as families
from jaxlm.models.families import setting_docs
from jaxlm.models.families.family import ACTIVATIONS, FamilySettings, Problems, size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, TensorMapping, linears, norms
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig, NormConfig
from jaxlm.nn.rotary import Rope

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # transformers' names of kinds of layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBERT(FamilySettings):
    """A ModernBERT-style encoder: the first of every `global_every` layers is global."""

    family: Literal["modernbert"] = "modernbert"
    max_positions: int = setting(8192, **setting_docs.MAX_POSITIONS)
    depth: int = setting(22, "layers", low=2)
    width: int = setting(768, **setting_docs.WIDTH)
    heads: int = setting(12, **setting_docs.HEADS)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.GATED_HIDDEN)
    activation: Activation = setting("gelu", "activation of the MLP's gate and of the head")
    global_every: int = setting(
        3, "period of layers; the first of each is global, the others are local", low=1
    )
    window: int = setting(64, "tokens that a local layer sees to either side", unit="tokens", low=0)
    rope_theta: float = setting(160_000.0, **setting_docs.GLOBAL_ROPE_THETA)
    local_rope_theta: float = setting(10_000.0, **setting_docs.LOCAL_ROPE_THETA)
    tied: bool = setting(True, **setting_docs.TIED)

    ATTRIBUTES = {
        **families.SIZE_ATTRIBUTES,
        "activation": ConfigKey("hidden_activation", "gelu", words=ACTIVATIONS),
        "global_every": ConfigKey("global_attn_every_n_layers", 3),
        "window": ConfigKey("local_attention", 128, value=lambda family: 2 * family.window),
        "rope_theta": ConfigKey("global_rope_theta", 160_000.0, kind=float),
        "local_rope_theta": ConfigKey("local_rope_theta", 10_000.0, kind=float),
        "norm_eps": ConfigKey("norm_eps", 1e-5, kind=float),
        "tied": ConfigKey("tie_word_embeddings", True, kind=bool),
    }
    IS_GATED = True
    HF_DEFAULTS = {"max_positions": 8192}
    CONSTANTS = {
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
    }
    # Training, classification heads, and attributes that transformers does not use.
    IGNORED = (
        *("embedding_dropout", "mlp_dropout", "classifier_pooling", "cls_token_id", "sep_token_id"),
        *("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index"),
        *("repad_logits_with_grad", "reference_compile", "initializer_cutoff_factor"),
        *("layer_norm_eps", "position_embedding_type"),
    )
    HUB = Hub(
        model_type="modernbert",
        architecture="ModernBertForMaskedLM",
        mappings=(
            TensorMapping("model.embeddings.tok_embeddings.weight", ("embedding/table",)),
            *norms("model.embeddings.{}", norm="embedding_norm"),
            *norms("model.{}", final_norm="final_norm"),
            *linears("head.{}", dense="head/dense"),
            *norms("head.{}", norm="head/norm"),
            TensorMapping("decoder.bias", ("head/bias",)),
            TensorMapping("decoder.weight", ("unembedding/weight",), "transposed"),
            *norms("model.layers.{i}.{}", attn_norm="attention_norm", mlp_norm="mlp_norm"),
            TensorMapping(
                "model.layers.{i}.attn.Wqkv.weight",
                tuple(f"attention/{name}/weight" for name in ("query", "key", "value")),
                "transposed",
            ),
            TensorMapping(
                "model.layers.{i}.mlp.Wi.weight", ("mlp/gate/weight", "mlp/up/weight"), "transposed"
            ),
            *linears("model.layers.{i}.{}", **{"attn.Wo": "attention/out", "mlp.Wo": "mlp/down"}),
        ),
        buffer_suffixes=("rotary_emb.inv_freq",),
    )

    SIZES = size_table(
        "depth width heads hidden",
        {"modernbert-base": (22, 768, 12, 1152), "modernbert-large": (28, 1024, 16, 2624)},
        vocab=50_368,
    )

    def problems(self) -> Problems:
        """Yield a problem unless heads share the width evenly and rotate in pairs."""
        size = self.size_of_head
        yield from families.uneven("width", self.width, "heads", self.heads)
        if not self.width % self.heads:
            yield from families.unpaired("width", size, self.heads * (size + 1))

    def build(self) -> EncoderConfig:
        """Return the model's config. `vocab` must be resolved by now."""
        norm, heads = NormConfig(kind="layer", eps=self.norm_eps), self.heads
        rotary = Rope(theta=self.rope_theta)
        attention = AttentionConfig(
            heads=heads, kv_heads=heads, head_dim=self.size_of_head, rotary=rotary
        )
        whole = BlockConfig(attention=attention, mlp=self.mlp, norm=norm, dropout=self.dropout)
        rotary = Rope(theta=self.local_rope_theta)
        windowed = dataclasses.replace(attention, rotary=rotary, window=self.window + 1)
        local = dataclasses.replace(whole, attention=windowed)
        return EncoderConfig(
            **self.backbone(),
            # The first layer reads the output of the embedding's norm.
            prefix=(dataclasses.replace(whole, residual="pre_mlp"),),
            pattern=(*(local,) * (self.global_every - 1), whole),
            final_norm=norm,
            head=HeadConfig(activation=self.activation, norm=norm, bias=False),
            embedding_norm=norm,
            tied=self.tied,
        )

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of a config.json; since v5 `rope_parameters` has both bases."""
        settings = super().hub_settings(attributes)
        activation = attributes.choose("classifier_activation", ACTIVATIONS, "gelu")
        if activation != settings["activation"]:
            attributes.reject("classifier_activation", "that of the MLP")
        depth, every = settings["depth"], settings["global_every"]
        kinds = attributes.get("layer_types", _kinds(depth, every), kind=list)
        every = next((n for n, kind in enumerate(kinds) if n and kind == GLOBAL), every)
        if kinds != _kinds(depth, every):
            attributes.reject("layer_types", f"one {GLOBAL} before each {every - 1} {LOCAL}")
        settings |= {"global_every": every, "window": settings["window"] // 2}
        both = attributes.split("rope_parameters", GLOBAL, LOCAL) or []
        for name, inner in zip(("rope_theta", "local_rope_theta"), both, strict=False):
            inner.expect("rope_type", "default")
            settings[name] = inner.get("rope_theta", settings[name], kind=float)
            inner.note_unused()
        return settings

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json."""
        attributes = super().to_hub()
        return attributes | {"classifier_activation": attributes["hidden_activation"]}


def _kinds(depth: int, every: int) -> list[str]:
    return [LOCAL if number % every else GLOBAL for number in range(depth)]
