"""RoBERTa (arXiv:1907.11692): BERT's layers; positions count from the row after that of the padding."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import bert, setting_docs
from jaxlm.models.families.bert import BERT
from jaxlm.models.families.hub import Attributes, Hub, TensorMapping, linears, norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoBERTa(BERT):
    """A RoBERTa-style encoder."""

    family: Literal["roberta"] = "roberta"  # type: ignore[assignment]
    token_types: int = setting(1, **setting_docs.TOKEN_TYPES)
    norm_eps: float = setting(1e-5, **setting_docs.LAYER_NORM_EPS)
    padding: int = setting(
        0, "id of the tokenizer's padding: positions count from the row after", low=0
    )

    HUB: ClassVar[Hub] = Hub(
        model_type="roberta",
        architecture="RobertaForMaskedLM",
        rows=(
            *bert.layers("roberta"),
            *linears("lm_head.{}", dense="head/dense"),
            *norms("lm_head.{}", layer_norm="head/norm"),
            TensorMapping("lm_head.bias", ("head/bias",)),
            TensorMapping("lm_head.decoder.weight", ("unembedding/weight",), "transposed"),
        ),
        buffers=("embeddings.position_ids", "lm_head.decoder.bias"),
        others=("roberta.pooler.",),
    )

    @property
    def first_position(self) -> int:
        """Rows of the position table before that of a document's first token."""
        return self.padding + 1

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        padding = given.get("pad_token_id", 1, least=0)
        rows = given.get("max_position_embeddings", 512)
        return cls(
            padding=padding, context=max(rows - padding - 1, 1), **cls.shared_settings(given)
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {"pad_token_id": self.padding}


SIZES: dict[str, dict[str, Any]] = {
    "roberta-base": dict(vocab=50_265, padding=1),
    "roberta-large": dict(vocab=50_265, padding=1, depth=24, width=1024, heads=16),
}
