"""BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692): post-norm encoders with biases.

BERT's next-sentence task is left out, with its head and the pooler.
"""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import EncoderConfig, HeadConfig
from jaxlm.models.families import setting_docs
from jaxlm.models.families.family import ACTIVATIONS, SIZE_ATTRIBUTES, PlainSettings, size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, TensorMapping, linears, norms
from jaxlm.nn.config import Activation

# BERT's attributes of the pooler.
POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")


def _layers(model: str) -> tuple[TensorMapping, ...]:
    """Return the tensors of the embedding and of each layer; all names start with `model`."""
    layer = f"{model}.encoder.layer.{{i}}"
    return (
        TensorMapping(f"{model}.embeddings.word_embeddings.weight", ("embedding/table",)),
        TensorMapping(f"{model}.embeddings.position_embeddings.weight", ("positions/table",)),
        TensorMapping(f"{model}.embeddings.token_type_embeddings.weight", ("types/table",)),
        *norms(f"{model}.embeddings.{{}}", LayerNorm="embedding_norm"),
        *linears(
            f"{layer}.{{}}",
            **{
                "attention.self.query": "attention/query",
                "attention.self.key": "attention/key",
                "attention.self.value": "attention/value",
                "attention.output.dense": "attention/out",
                "intermediate.dense": "mlp/up",
                "output.dense": "mlp/down",
            },
        ),
        *norms(
            f"{layer}.{{}}",
            **{"attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "mlp_norm"},
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERT(PlainSettings):
    """A BERT-style encoder."""

    family: Literal["bert"] = "bert"
    token_types: int = setting(2, **setting_docs.TOKEN_TYPES)
    activation: Activation = setting("gelu", "activation of the MLP and of the head")
    norm_eps: float = setting(1e-12, **setting_docs.LAYER_NORM_EPS)

    RESIDUAL = "post"
    ATTRIBUTES = {
        **SIZE_ATTRIBUTES,
        "max_positions": ConfigKey(
            "max_position_embeddings",
            512,
            value=lambda family: family.first_position + family.max_positions,
        ),
        "token_types": ConfigKey("type_vocab_size", 2),
        "activation": ConfigKey("hidden_act", "gelu", words=ACTIVATIONS),
        "norm_eps": ConfigKey("layer_norm_eps", 1e-12, kind=float),
    }
    CONSTANTS = {"tie_word_embeddings": True}
    EXPECTED = {
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
    }
    IGNORED = (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "directionality"),
        *(f"pooler_{name}" for name in POOLER),
    )
    HUB = Hub(
        model_type="bert",
        architecture="BertForMaskedLM",
        mappings=(
            *_layers("bert"),
            *linears("cls.predictions.transform.{}", dense="head/dense"),
            *norms("cls.predictions.transform.{}", LayerNorm="head/norm"),
            TensorMapping("cls.predictions.bias", ("head/bias",)),
            TensorMapping("cls.predictions.decoder.weight", ("unembedding/weight",), "transposed"),
        ),
        buffer_suffixes=("embeddings.position_ids", "cls.predictions.decoder.bias"),
        ignored_prefixes=("bert.pooler.", "cls.seq_relationship."),
        old_suffixes=(
            ("LayerNorm.gamma", "LayerNorm.weight"),
            ("LayerNorm.beta", "LayerNorm.bias"),
        ),
    )
    SIZES = size_table(
        "vocab depth width heads",
        {
            "bert-base-uncased": (30_522, 12, 768, 12),
            "bert-large-uncased": (30_522, 24, 1024, 16),
            "bert-base-cased": (28_996, 12, 768, 12),
        },
    )

    @property
    def first_position(self) -> int:
        """Rows of the position table before the row of a document's first token."""
        return 0

    def build(self) -> EncoderConfig:
        """Return the model's config. `vocab` must be resolved by now."""
        return EncoderConfig(
            **self.backbone(),
            pattern=(self.block(self.heads, dropout=self.dropout),),
            head=HeadConfig(activation=self.activation, norm=self.norm),
            positions=self.max_positions,
            first_position=self.first_position,
            token_types=self.token_types,
            embedding_norm=self.norm,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoBERTa(BERT):
    """A RoBERTa-style encoder: positions start at the row after the padding's."""

    family: Literal["roberta"] = "roberta"  # type: ignore[assignment]
    token_types: int = setting(1, **setting_docs.TOKEN_TYPES)
    norm_eps: float = setting(1e-5, **setting_docs.LAYER_NORM_EPS)
    padding: int = setting(
        0, "id of the tokenizer's padding; positions start at the row after it", low=0
    )

    ATTRIBUTES = {**BERT.ATTRIBUTES, "padding": ConfigKey("pad_token_id", 1, least=0)}
    HUB = Hub(
        model_type="roberta",
        architecture="RobertaForMaskedLM",
        mappings=(
            *_layers("roberta"),
            *linears("lm_head.{}", dense="head/dense"),
            *norms("lm_head.{}", layer_norm="head/norm"),
            TensorMapping("lm_head.bias", ("head/bias",)),
            TensorMapping("lm_head.decoder.weight", ("unembedding/weight",), "transposed"),
        ),
        buffer_suffixes=("embeddings.position_ids", "lm_head.decoder.bias"),
        ignored_prefixes=("roberta.pooler.",),
    )
    SIZES = size_table(
        "depth width heads",
        {"roberta-base": (12, 768, 12), "roberta-large": (24, 1024, 16)},
        vocab=50_265,
        padding=1,
    )

    @property
    def first_position(self) -> int:
        """Rows of the position table before the row of a document's first token."""
        return self.padding + 1

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        settings = super().hub_settings(attributes)
        rows = settings["max_positions"] - settings["padding"] - 1
        return settings | {"max_positions": max(rows, 1)}
