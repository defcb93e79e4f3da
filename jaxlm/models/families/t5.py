"""T5 (arXiv:1910.10683), v1.1, Flan-T5, UL2 (2205.05131): encoder-decoders with relative biases."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import BackboneConfig, EncoderDecoderConfig
from jaxlm.models.families import hub, setting_docs
from jaxlm.models.families.family import FamilySettings, Problems, problem, size_table, uneven
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, TensorMapping, linears
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig, RelativeBias

# transformers' names of the activation, and if it is gated.
PROJECTIONS: dict[str, tuple[Activation, bool]] = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("silu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "gated-relu": ("relu", True),
}
V1 = {"activation": "relu", "gated": False, "tied": True}
UL2 = {"activation": "silu"}


def _side(side: str, mlp: int, attentions: dict[str, tuple[str, int]]) -> Iterator[TensorMapping]:
    """Yield the tensors of the encoder or decoder.

    `mlp` is the index of the MLP among a layer's parts; `attentions` holds T5's name and index of
    each attention by ours.
    """
    yield TensorMapping(f"{side}.final_layer_norm.weight", (f"{side}/final_norm/scale",))
    first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield TensorMapping(first, (f"{side}/relative/table",))
    for path, (name, part) in attentions.items():
        layer = f"{side}.block.{{i}}.layer.{part}"
        yield TensorMapping(f"{layer}.layer_norm.weight", (f"{side}/{path}_norm/scale",))
        letters = {leaf[0]: f"{side}/{path}/{leaf}" for leaf in ("query", "key", "value", "out")}
        yield from linears(f"{layer}.{name}.{{}}", **letters)
    layer, gate = f"{side}.block.{{i}}.layer.{mlp}", f"{side}/mlp/gate/weight"
    yield TensorMapping(f"{layer}.layer_norm.weight", (f"{side}/mlp_norm/scale",))
    dense = f"{layer}.DenseReluDense"
    up = (f"{side}/mlp/up/weight",)
    yield TensorMapping(f"{dense}.wi.weight", up, "transposed", excludes=gate)
    yield TensorMapping(f"{dense}.wi_0.weight", (gate,), "transposed")
    yield TensorMapping(f"{dense}.wi_1.weight", up, "transposed", requires=gate)
    yield TensorMapping(f"{dense}.wo.weight", (f"{side}/mlp/down/weight",), "transposed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5(FamilySettings):
    """A T5-style encoder-decoder."""

    family: Literal["t5"] = "t5"
    max_positions: int = setting(512, **setting_docs.MAX_POSITIONS)
    depth: int = setting(6, "layers of the encoder", low=1)
    decoder_depth: int | Literal["auto"] = setting(
        "auto", "layers of the decoder; auto is as many as of the encoder", low=1
    )
    head_dim: int | Literal["auto"] = setting(
        "auto", "size of a head; auto is width / heads", low=1
    )
    activation: Activation = setting("relu", **setting_docs.PLAIN_ACTIVATION)
    gated: bool = setting(False, "gated MLP: the activation is multiplied by a third projection")
    buckets: int = setting(32, "buckets of relative distances, each with a bias per head", low=4)
    max_distance: int = setting(
        128,
        "maximum distance: this and larger ones share a bucket",
        unit="tokens",
        low=2,
        formerly="farthest",
    )
    norm_eps: float = setting(1e-6, **setting_docs.RMS_NORM_EPS)
    tied: bool = setting(
        True,
        "tied embeddings: the unembedding is the embedding's transpose, and its input is divided "
        "by sqrt(width)",
    )
    dropout: float = setting(0.0, **setting_docs.DROPOUT)
    init_std: float = setting(
        0.02, "standard deviation of the initial weights; 1 for the embedding", above=0.0
    )

    ATTRIBUTES = {
        "vocab": ConfigKey("vocab_size"),
        "max_positions": ConfigKey("n_positions", 512),
        "depth": ConfigKey("num_layers", most=hub.MAX_NESTING),
        "decoder_depth": ConfigKey(
            "num_decoder_layers",
            lambda read: read["depth"],
            most=hub.MAX_NESTING,
            value=lambda family: family.depth_of_decoder,
        ),
        "width": ConfigKey("d_model"),
        "heads": ConfigKey("num_heads"),
        "head_dim": ConfigKey("d_kv", value=lambda family: family.size_of_head),
        "hidden": ConfigKey("d_ff", value=lambda family: family.size_of_hidden),
        "buckets": ConfigKey("relative_attention_num_buckets", 32),
        "max_distance": ConfigKey("relative_attention_max_distance", 128),
        "norm_eps": ConfigKey("layer_norm_epsilon", 1e-6, kind=float),
        "tied": ConfigKey("tie_word_embeddings", True, kind=bool),
    }
    CONSTANTS = {"is_encoder_decoder": True}
    EXPECTED = {"decoder_start_token_id": (0, None)}
    # Repetitions of feed_forward_proj, training, and attributes that transformers does not use.
    IGNORED = ("dense_act_fn", "is_gated_act", "dropout_rate", "output_past")
    HUB = Hub(
        model_type="t5",
        architecture="T5ForConditionalGeneration",
        mappings=(
            TensorMapping("shared.weight", ("embedding/table",)),
            *_side("encoder", 1, {"attention": ("SelfAttention", 0)}),
            *_side(
                "decoder", 2, {"attention": ("SelfAttention", 0), "cross": ("EncDecAttention", 1)}
            ),
            TensorMapping("lm_head.weight", ("unembedding/weight",), "transposed"),
        ),
        buffer_suffixes=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ignored_prefixes=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",),
    )

    SIZES = size_table(
        "depth width heads head_dim hidden",
        {
            "t5-small": (6, 512, 8, "auto", "auto", V1),
            "t5-base": (12, 768, 12, "auto", "auto", V1),
            "t5-large": (24, 1024, 16, "auto", "auto", V1),
            "t5-v1.1-small": (8, 512, 6, 64, 1024),
            "t5-v1.1-base": (12, 768, 12, "auto", 2048),
            "t5-v1.1-large": (24, 1024, 16, "auto", 2816),
            "flan-t5-xl": (24, 2048, 32, "auto", 5120),
            "flan-t5-xxl": (24, 4096, 64, "auto", 10_240),
            "ul2-20b": (32, 4096, 16, "auto", 16_384, UL2),
        },
        vocab=32_128,
        activation="gelu_tanh",
        gated=True,
        tied=False,
    )

    def problems(self) -> Problems:
        """Yield a problem unless heads share the width and every bucket has distances."""
        if self.head_dim == "auto":
            yield from uneven("width", self.width, "heads", self.heads)
        if self.buckets % 4:
            why = f"{self.buckets} buckets do not divide by 4: by direction, then into near and far"
            yield problem("buckets", why, -(-self.buckets // 4) * 4)
        if self.max_distance <= self.buckets // 2:
            why = f"{self.buckets // 2} buckets hold one distance each"
            yield problem("max_distance", why, 4 * self.buckets)

    @property
    def depth_of_decoder(self) -> int:
        """decoder_depth, with `auto` resolved."""
        return self.depth if self.decoder_depth == "auto" else self.decoder_depth

    def build(self) -> EncoderDecoderConfig:
        """Return the model's config. `vocab` must be resolved by now."""
        shared = self.backbone()
        vocab, norm, heads = shared.pop("vocab"), self.norm, self.heads
        cross = AttentionConfig(
            heads=heads,
            kv_heads=heads,
            head_dim=self.size_of_head,
            scale=1.0,
            dropout=self.dropout,
        )

        def side(depth: int, *, is_encoder: bool) -> BackboneConfig:
            bias = RelativeBias(
                buckets=self.buckets, max_distance=self.max_distance, both_ways=is_encoder
            )
            block = BlockConfig(
                attention=dataclasses.replace(cross, relative=bias),
                mlp=dataclasses.replace(self.mlp, gated=self.gated),
                norm=norm,
                cross=None if is_encoder else cross,
                dropout=self.dropout,
            )
            return BackboneConfig(**shared | {"depth": depth}, pattern=(block,), final_norm=norm)

        return EncoderDecoderConfig(
            vocab=vocab,
            encoder=side(self.depth, is_encoder=True),
            decoder=side(self.depth_of_decoder, is_encoder=False),
            tied=self.tied,
            output_scale=self.width**-0.5 if self.tied else 1.0,
        )

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes.

        transformers 4 scales the input of a tied unembedding; transformers 5 has
        `scale_decoder_outputs` for this and calls every model tied.
        """
        activation, gated = attributes.choose("feed_forward_proj", PROJECTIONS, "relu")
        settings = super().hub_settings(attributes)
        tied = attributes.get("scale_decoder_outputs", settings["tied"], kind=bool)
        return settings | {"activation": activation, "gated": gated, "tied": tied}

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        words = {kind: word for word, kind in PROJECTIONS.items()}
        kind = (self.activation, self.gated)
        if kind not in words:
            raise hub.uncomputed(self.HUB, f"activation = {self.activation}, gated = {self.gated}")
        attributes = super().to_hub() | {
            "feed_forward_proj": words[kind],
            "scale_decoder_outputs": self.tied,
            "decoder_start_token_id": 0,
        }
        del attributes["initializer_range"]
        return attributes
