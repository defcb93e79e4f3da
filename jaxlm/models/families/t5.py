"""T5 (arXiv:1910.10683), its versions 1.1 and Flan, and UL2 (arXiv:2205.05131): an encoder and a decoder with biases of distances."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Backbone, EncoderDecoder
from jaxlm.models.families import setting_docs
from jaxlm.models.families.hub import MAX_NESTING, Attributes, Hub, TensorMapping, uncomputed
from jaxlm.models.families.sizes import uneven
from jaxlm.nn.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    Init,
    MlpConfig,
    NormConfig,
    RelativeBias,
)

# transformers' words for the activation, and whether it is gated.
PROJECTIONS: dict[str, tuple[Activation, bool]] = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("silu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "gated-relu": ("relu", True),
}


def _side(side: str, mlp: int, attentions: dict[str, tuple[str, int]]) -> Iterator[TensorMapping]:
    """The tensors of a side: in which part of a layer its MLP lies, and each attention, by our name."""
    yield TensorMapping(f"{side}.final_layer_norm.weight", (f"{side}/final_norm/scale",))
    first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield TensorMapping(first, (f"{side}/relative/table",))
    for ours, (theirs, part) in attentions.items():
        layer = f"{side}.block.{{i}}.layer.{part}"
        yield TensorMapping(f"{layer}.layer_norm.weight", (f"{side}/{ours}_norm/scale",))
        for letter, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            path = f"{side}/{ours}/{name}/weight"
            yield TensorMapping(f"{layer}.{theirs}.{letter}.weight", (path,), "transposed")
    layer, gate = f"{side}.block.{{i}}.layer.{mlp}", f"{side}/mlp/gate/weight"
    yield TensorMapping(f"{layer}.layer_norm.weight", (f"{side}/mlp_norm/scale",))
    dense = f"{layer}.DenseReluDense"
    up = (f"{side}/mlp/up/weight",)
    yield TensorMapping(f"{dense}.wi.weight", up, "transposed", without=gate)
    yield TensorMapping(f"{dense}.wi_0.weight", (gate,), "transposed")
    yield TensorMapping(f"{dense}.wi_1.weight", up, "transposed", beside=gate)
    yield TensorMapping(f"{dense}.wo.weight", (f"{side}/mlp/down/weight",), "transposed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5:
    """A T5-style encoder-decoder."""

    family: Literal["t5"] = "t5"
    vocab: int | Literal["auto"] = setting("auto", **setting_docs.VOCAB)
    context: int = setting(512, **setting_docs.CONTEXT)
    depth: int = setting(6, "layers of the encoder", low=1)
    decoder_depth: int | Literal["auto"] = setting(
        "auto", "layers of the decoder; auto is as many as of the encoder", low=1
    )
    width: int = setting(512, **setting_docs.WIDTH)
    heads: int = setting(8, **setting_docs.HEADS)
    head_dim: int | Literal["auto"] = setting(
        "auto", "size of a head; auto is width / heads", low=1
    )
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.PLAIN_HIDDEN)
    activation: Activation = setting("relu", **setting_docs.PLAIN_ACTIVATION)
    gated: bool = setting(False, "the MLP's activation is multiplied by a third projection")
    buckets: int = setting(32, "buckets of distances, each with a bias a head", low=4)
    farthest: int = setting(128, "distance from which on all share a bucket", unit="tokens", low=2)
    norm_eps: float = setting(1e-6, **setting_docs.RMS_NORM_EPS)
    tied: bool = setting(
        True, "the unembedding is the embedding's transpose, and reads the stream over sqrt(width)"
    )
    dropout: float = setting(0.0, **setting_docs.DROPOUT)
    init: Init = setting("normal", **setting_docs.INIT)
    init_std: float = setting(
        0.02, "standard deviation of the initial weights; of the embedding it is 1", above=0.0
    )

    HUB: ClassVar[Hub] = Hub(
        model_type="t5",
        architecture="T5ForConditionalGeneration",
        rows=(
            TensorMapping("shared.weight", ("embedding/table",)),
            *_side("encoder", 1, {"attention": ("SelfAttention", 0)}),
            *_side(
                "decoder", 2, {"attention": ("SelfAttention", 0), "cross": ("EncDecAttention", 1)}
            ),
            TensorMapping("lm_head.weight", ("unembedding/weight",), "transposed"),
        ),
        buffers=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        others=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",),
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width evenly, and there are distances for all buckets."""
        if self.head_dim == "auto":
            yield from uneven("width", self.width, "heads", self.heads)
        if self.buckets % 4:
            yield (
                "buckets",
                f"{self.buckets} do not halve twice: for either direction, and for near and far",
                f"--config.model.buckets={-(-self.buckets // 4) * 4}",
            )
        if self.farthest <= self.buckets // 2:
            yield (
                "farthest",
                f"{self.buckets // 2} buckets have a distance of their own",
                f"--config.model.farthest={4 * self.buckets}",
            )

    @property
    def size_of_hidden(self) -> int:
        """hidden, with `auto` filled in."""
        return 4 * self.width if self.hidden == "auto" else self.hidden

    @property
    def size_of_head(self) -> int:
        """head_dim, with `auto` filled in."""
        return self.width // self.heads if self.head_dim == "auto" else self.head_dim

    @property
    def depth_of_decoder(self) -> int:
        """decoder_depth, with `auto` filled in."""
        return self.depth if self.decoder_depth == "auto" else self.decoder_depth

    def build(self) -> EncoderDecoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        norm = NormConfig(eps=self.norm_eps)
        across = AttentionConfig(
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.size_of_head,
            scale=1.0,
            dropout=self.dropout,
        )

        def side(depth: int, *, reads_both_ways: bool) -> Backbone:
            bias = RelativeBias(
                buckets=self.buckets, farthest=self.farthest, both_ways=reads_both_ways
            )
            block = BlockConfig(
                attention=dataclasses.replace(across, relative=bias),
                mlp=MlpConfig(
                    hidden=self.size_of_hidden, activation=self.activation, gated=self.gated
                ),
                norm=norm,
                cross=None if reads_both_ways else across,
                dropout=self.dropout,
            )
            return Backbone(
                width=self.width,
                depth=depth,
                pattern=(block,),
                final_norm=norm,
                dropout=self.dropout,
                init=self.init,
                init_std=self.init_std,
            )

        return EncoderDecoder(
            vocab=self.vocab,
            encoder=side(self.depth, reads_both_ways=True),
            decoder=side(self.depth_of_decoder, reads_both_ways=False),
            tied=self.tied,
            output_scale=self.width**-0.5 if self.tied else 1.0,
        )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it.

        transformers 4 scales what a tied unembedding reads; transformers 5 says so apart, and calls every model tied.
        """
        given.expect("is_encoder_decoder", True)
        given.expect("decoder_start_token_id", 0, None)
        given.ignore(*_UNUSED)
        activation, gated = given.choose("feed_forward_proj", PROJECTIONS, "relu")
        depth = given.get("num_layers", most=MAX_NESTING)
        tied = given.get("tie_word_embeddings", True, kind=bool)
        return cls(
            vocab=given.get("vocab_size"),
            context=given.get("n_positions", 512),
            depth=depth,
            decoder_depth=given.get("num_decoder_layers", depth, most=MAX_NESTING),
            width=given.get("d_model"),
            heads=given.get("num_heads"),
            head_dim=given.get("d_kv"),
            hidden=given.get("d_ff"),
            activation=activation,
            gated=gated,
            buckets=given.get("relative_attention_num_buckets", 32),
            farthest=given.get("relative_attention_max_distance", 128),
            norm_eps=given.get("layer_norm_epsilon", 1e-6, kind=float),
            tied=given.get("scale_decoder_outputs", tied, kind=bool),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        words = {kind: word for word, kind in PROJECTIONS.items()}
        kind = (self.activation, self.gated)
        if kind not in words:
            raise uncomputed(self.HUB, f"activation = {self.activation}, gated = {self.gated}")
        return dict(
            vocab_size=self.build().vocab,
            n_positions=self.context,
            num_layers=self.depth,
            num_decoder_layers=self.depth_of_decoder,
            d_model=self.width,
            num_heads=self.heads,
            d_kv=self.size_of_head,
            d_ff=self.size_of_hidden,
            feed_forward_proj=words[kind],
            relative_attention_num_buckets=self.buckets,
            relative_attention_max_distance=self.farthest,
            layer_norm_epsilon=self.norm_eps,
            tie_word_embeddings=self.tied,
            scale_decoder_outputs=self.tied,
            is_encoder_decoder=True,
            decoder_start_token_id=0,
        )


# What says again what `feed_forward_proj` does, how it was trained, and what authors' files say without a use.
_UNUSED = ("dense_act_fn", "is_gated_act", "dropout_rate", "output_past")

_V1_1: dict[str, Any] = dict(vocab=32_128, activation="gelu_tanh", gated=True, tied=False)
SIZES: dict[str, dict[str, Any]] = {
    "t5-small": dict(vocab=32_128),
    "t5-base": dict(vocab=32_128, depth=12, width=768, heads=12),
    "t5-large": dict(vocab=32_128, depth=24, width=1024, heads=16),
    "t5-v1.1-small": _V1_1 | dict(depth=8, heads=6, head_dim=64, hidden=1024),
    "t5-v1.1-base": _V1_1 | dict(depth=12, width=768, heads=12, hidden=2048),
    "t5-v1.1-large": _V1_1 | dict(depth=24, width=1024, heads=16, hidden=2816),
    "flan-t5-xl": _V1_1 | dict(depth=24, width=2048, heads=32, hidden=5120),
    "flan-t5-xxl": _V1_1 | dict(depth=24, width=4096, heads=64, hidden=10_240),
    "ul2-20b": _V1_1 | dict(activation="silu", depth=32, width=4096, heads=16, hidden=16_384),
}
