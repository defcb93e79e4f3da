"""BERT (arXiv:1810.04805): learned positions, layer norms after each part, biases, a head that predicts hidden tokens.

Its second task, whether one text follows another, is left out; so are the pooler and the head of that.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Encoder, HeadConfig
from jaxlm.models.families import setting_docs
from jaxlm.models.families.hub import MAX_NESTING, Attributes, Hub, TensorMapping, linears, norms
from jaxlm.models.families.llama_like import ACTIVATIONS, THEIRS
from jaxlm.models.families.sizes import uneven
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig, Init, MlpConfig, NormConfig


def layers(model: str) -> tuple[TensorMapping, ...]:
    """The tensors of the embedding and of each layer, in the model of this name."""
    layer = f"{model}.encoder.layer.{{i}}"
    return (
        TensorMapping(f"{model}.embeddings.word_embeddings.weight", ("embedding/table",)),
        TensorMapping(f"{model}.embeddings.position_embeddings.weight", ("positions/table",)),
        TensorMapping(f"{model}.embeddings.token_type_embeddings.weight", ("types/table",)),
        *norms(f"{model}.embeddings.{{}}", LayerNorm="embedding_norm"),
        *linears(
            f"{layer}.attention.{{}}",
            **{
                "self.query": "attention/query",
                "self.key": "attention/key",
                "self.value": "attention/value",
                "output.dense": "attention/out",
            },
        ),
        *linears(f"{layer}.{{}}", **{"intermediate.dense": "mlp/up", "output.dense": "mlp/down"}),
        *norms(
            f"{layer}.{{}}",
            **{"attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "mlp_norm"},
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERT:
    """A BERT-style encoder."""

    family: Literal["bert"] = "bert"
    vocab: int | Literal["auto"] = setting("auto", **setting_docs.VOCAB)
    context: int = setting(
        512, "positions of the position table: the longest sequence", unit="tokens", low=1
    )
    depth: int = setting(12, **setting_docs.DEPTH)
    width: int = setting(768, **setting_docs.WIDTH)
    heads: int = setting(12, **setting_docs.HEADS)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.PLAIN_HIDDEN)
    token_types: int = setting(2, **setting_docs.TOKEN_TYPES)
    activation: Activation = setting("gelu", "activation of the MLP and of the head")
    norm_eps: float = setting(1e-12, **setting_docs.LAYER_NORM_EPS)
    dropout: float = setting(0.0, **setting_docs.DROPOUT)
    init: Init = setting("normal", **setting_docs.INIT)
    init_std: float = setting(0.02, **setting_docs.INIT_STD)

    HUB: ClassVar[Hub] = Hub(
        model_type="bert",
        architecture="BertForMaskedLM",
        rows=(
            *layers("bert"),
            *linears("cls.predictions.transform.{}", dense="head/dense"),
            *norms("cls.predictions.transform.{}", LayerNorm="head/norm"),
            TensorMapping("cls.predictions.bias", ("head/bias",)),
            TensorMapping("cls.predictions.decoder.weight", ("unembedding/weight",), "transposed"),
        ),
        buffers=("embeddings.position_ids", "cls.predictions.decoder.bias"),
        others=("bert.pooler.", "cls.seq_relationship."),
        older=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width evenly."""
        yield from uneven("width", self.width, "heads", self.heads)

    @property
    def first_position(self) -> int:
        """Rows of the position table before that of a document's first token."""
        return 0

    @property
    def size_of_hidden(self) -> int:
        """hidden, with `auto` filled in."""
        return 4 * self.width if self.hidden == "auto" else self.hidden

    def build(self) -> Encoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        norm = NormConfig(kind="layer", eps=self.norm_eps, bias=True)
        block = BlockConfig(
            attention=AttentionConfig(
                heads=self.heads,
                kv_heads=self.heads,
                head_dim=self.width // self.heads,
                bias=True,
                out_bias=True,
                dropout=self.dropout,
            ),
            mlp=MlpConfig(
                hidden=self.size_of_hidden, activation=self.activation, gated=False, bias=True
            ),
            norm=norm,
            residual="post",
            dropout=self.dropout,
        )
        return Encoder(
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            pattern=(block,),
            head=HeadConfig(activation=self.activation, norm=norm),
            positions=self.context,
            first_position=self.first_position,
            token_types=self.token_types,
            embedding_norm=norm,
            dropout=self.dropout,
            init=self.init,
            init_std=self.init_std,
        )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        return cls(context=given.get("max_position_embeddings", 512), **cls.shared_settings(given))

    @classmethod
    def shared_settings(cls, given: Attributes) -> dict[str, Any]:
        """The settings that its descendants have too."""
        for name, value in (
            ("is_decoder", False),
            ("add_cross_attention", False),
            ("position_embedding_type", "absolute"),
            ("tie_word_embeddings", True),
        ):
            given.expect(name, value)
        given.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "directionality")
        given.ignore(*(f"pooler_{name}" for name in _POOLER))
        return dict(
            vocab=given.get("vocab_size"),
            depth=given.get("num_hidden_layers", most=MAX_NESTING),
            width=given.get("hidden_size"),
            heads=given.get("num_attention_heads"),
            hidden=given.get("intermediate_size"),
            token_types=given.get("type_vocab_size", 2),
            activation=given.choose("hidden_act", ACTIVATIONS, "gelu"),
            norm_eps=given.get("layer_norm_eps", 1e-12, kind=float),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return dict(
            vocab_size=self.build().vocab,
            max_position_embeddings=self.first_position + self.context,
            num_hidden_layers=self.depth,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            intermediate_size=self.size_of_hidden,
            type_vocab_size=self.token_types,
            hidden_act=THEIRS[self.activation],
            layer_norm_eps=self.norm_eps,
            tie_word_embeddings=True,
            initializer_range=self.init_std,
        )


# What BERT's config.json says of the part that reads a whole text.
_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")

SIZES: dict[str, dict[str, Any]] = {
    "bert-base-uncased": dict(vocab=30_522),
    "bert-large-uncased": dict(vocab=30_522, depth=24, width=1024, heads=16),
    "bert-base-cased": dict(vocab=28_996),
}
