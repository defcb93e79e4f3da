"""DeepSeek-V3 (arXiv:2412.19437): DeepSeek-V2 with a sigmoid's scores, and experts balanced by a bias on the choice."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import setting_docs
from jaxlm.models.families.deepseek_v2 import ROWS, STRETCHED, DeepSeekV2
from jaxlm.models.families.experts import refuse_others
from jaxlm.models.families.hub import Attributes, Hub, TensorMapping
from jaxlm.nn.config import MoeConfig
from jaxlm.nn.rotary import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3(DeepSeekV2):
    """A DeepSeek-V3-style decoder. The bias on the choice is there whether or not it still moves."""

    family: Literal["deepseek_v3"] = "deepseek_v3"  # type: ignore[assignment]
    pairs: Literal["neighbours", "halves"] = setting(
        "neighbours", "which features of a head are rotated together"
    )
    experts: int = setting(256, **setting_docs.EXPERTS)
    top_k: int = setting(8, **setting_docs.TOP_K)
    shared: int = setting(2048, **setting_docs.SHARED)
    groups: int = setting(8, **setting_docs.GROUPS)
    top_groups: int = setting(4, **setting_docs.TOP_GROUPS)
    router: Literal["softmax", "sigmoid"] = setting("sigmoid", **setting_docs.ROUTER)
    normalised: bool = setting(True, **setting_docs.NORMALISED)
    scale: float = setting(2.5, **setting_docs.EXPERT_SCALE)
    balance_loss: float = setting(1e-4, **setting_docs.BALANCE_LOSS)
    balance_bias: float = setting(
        0.001,
        "by how much a bias on the scores moves in each step to spread tokens (arXiv:2408.15664); 0 leaves it as it is",
        low=0,
    )

    ABSENT: ClassVar[dict[str, Any]] = {"context": 4096}
    HUB: ClassVar[Hub] = Hub(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        rows=(
            *ROWS,
            TensorMapping(
                "model.layers.{i}.mlp.gate.e_score_correction_bias", ("mlp/bias",), is_exact=True
            ),
        ),
        buffers=("rotary_emb.inv_freq",),
        ahead=("model.layers.{i}.", "num_nextn_predict_layers"),
    )

    @property
    def rotary(self) -> Rope:
        """How the rotated part of heads is."""
        return dataclasses.replace(super().rotary, pairs=self.pairs)

    def mixture(self) -> MoeConfig:
        """The experts of a layer."""
        return dataclasses.replace(super().mixture(), bias_rate=self.balance_bias)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it; what weighs and moves the balance is of training, and ours stays."""
        given.expect("topk_method", "noaux_tc")
        given.expect("scoring_func", "sigmoid")
        # Layers after the last that predict further tokens: an import tells what it leaves out.
        given.ignore("num_nextn_predict_layers")
        is_apart = given.get("rope_interleave", True, kind=bool)
        return cls(
            **cls.latent_settings(given, shared=1, hidden=2048),
            groups=given.get("n_group", 8),
            top_groups=given.get("topk_group", 4),
            normalised=given.get("norm_topk_prob", True, kind=bool),
            pairs="neighbours" if is_apart else "halves",
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        refuse_others(self, router="sigmoid")
        return self.latent_attributes() | {
            "norm_topk_prob": self.normalised,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_interleave": self.pairs == "neighbours",
            "num_nextn_predict_layers": 0,
        }


SIZES: dict[str, dict[str, Any]] = {
    "deepseek-v3": dict(
        vocab=129_280,
        context=163_840,
        depth=61,
        width=7168,
        heads=128,
        query_rank=1536,
        hidden=2048,
        dense_depth=3,
        dense_hidden=18_432,
        norm_eps=1e-6,
        rope_scaling=STRETCHED,
        mscale=1.0,
    ),
}
