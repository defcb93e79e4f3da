"""DeepSeek-V2 (arXiv:2405.04434): keys and values made of a small latent, few dense layers, then shared and many small experts."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.experts import ROUTED, Experts, refuse_others
from jaxlm.models.families.hub import Attributes, Hub, TensorMapping, linears, uncomputed
from jaxlm.nn.config import AttentionConfig, LatentConfig, MoeConfig, NormConfig
from jaxlm.nn.rotary import Rope, YarnScaling

# Of the latents, whatever the other norms have.
LATENT_NORM = NormConfig(kind="rms", eps=1e-6)
COMPRESSED = "attention/query_latent/weight"


def _row(theirs: str, *ours: str, **more: Any) -> TensorMapping:
    more = {"layout": "transposed"} | more
    paths = tuple(f"attention/{each}" for each in ours)
    return TensorMapping(f"model.layers.{{i}}.self_attn.{theirs}.weight", paths, **more)


ROWS = (
    *llama_like.STREAM,
    *llama_like.NORMS,
    *llama_like.MLP,
    _row("q_proj", "query/weight", without=COMPRESSED),
    _row("q_a_proj", "query_latent/weight"),
    _row("q_a_layernorm", "query_norm/scale"),
    _row("q_b_proj", "query/weight", beside=COMPRESSED),
    _row("kv_a_proj_with_mqa", "latent/weight", "rotary_key/weight"),
    _row("kv_a_layernorm", "latent_norm/scale"),
    _row("kv_b_proj", "key/weight", "value/weight", layout="by head"),
    _row("o_proj", "out/weight"),
    *ROUTED,
    *linears(
        "model.layers.{i}.mlp.shared_experts.{}",
        gate_proj="mlp/shared/gate",
        up_proj="mlp/shared/up",
        down_proj="mlp/shared/down",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV2(Experts):
    """A DeepSeek-V2-style decoder."""

    family: Literal["deepseek_v2"] = "deepseek_v2"
    query_rank: int | None = setting(
        None, "size of the latent that queries are made of; None makes them of the stream", low=1
    )
    kv_rank: int = setting(
        512, "size of the latent that keys and values are made of, and that a cache keeps", low=1
    )
    nope_dim: int = setting(128, "features of a head's query and key that are not rotated", low=1)
    rope_dim: int = setting(
        64, "features that are, with one key for all heads, which a cache keeps too", low=2
    )
    value_dim: int = setting(128, "size of a head's value", low=1)
    mscale: float = setting(
        0.0,
        "sharpens scores under yarn, by (0.1 mscale ln(factor) + 1) squared; transformers' mscale_all_dim",
        low=0.0,
    )
    experts: int = setting(64, **setting_docs.EXPERTS)
    top_k: int = setting(6, **setting_docs.TOP_K)
    shared: int = setting(2816, **setting_docs.SHARED)
    groups: int = setting(1, **setting_docs.GROUPS)
    top_groups: int = setting(1, **setting_docs.TOP_GROUPS)
    dense_depth: int = setting(1, **setting_docs.DENSE_DEPTH)
    normalised: bool = setting(False, **setting_docs.NORMALISED)

    ABSENT: ClassVar[dict[str, Any]] = {"context": 2048}
    HUB: ClassVar[Hub] = Hub(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        rows=ROWS,
        buffers=("rotary_emb.inv_freq",),
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Rotated features are pairs; groups are of one size, and hold a token's experts; what sharpens has a scaling."""
        yield from super().problems()
        if self.rope_dim % 2:
            yield (
                "rope_dim",
                f"{self.rope_dim} features cannot be rotated in pairs",
                f"--config.model.rope_dim={self.rope_dim + 1}",
            )
        if self.mscale and not isinstance(self.rope_scaling, YarnScaling):
            yield (
                "mscale",
                f"mscale = {self.mscale:g} goes by the factor of yarn, and rope_scaling is {self.rope_scaling.name}",
                "--config.model.mscale=0",
            )
        yield from self._group_problems()

    def _group_problems(self) -> Iterator[tuple[str, str, str]]:
        held = self.experts // self.groups
        # With a sigmoid, the best two experts speak for a group.
        least = 2 if self.router == "sigmoid" and self.groups > 1 else 1
        if self.experts % self.groups or held < least:
            yield (
                "groups",
                f"experts = {self.experts} do not make groups = {self.groups} of one size, {least} at least",
                "--config.model.groups=1 --config.model.top_groups=1",
            )
        elif self.top_groups > self.groups:
            yield (
                "top_groups",
                f"top_groups = {self.top_groups} of groups = {self.groups}",
                f"--config.model.top_groups={self.groups}",
            )
        elif self.top_groups * held < self.top_k <= self.experts:
            yield (
                "top_groups",
                f"{self.top_groups} groups of {held} do not hold a token's top_k = {self.top_k} experts",
                f"--config.model.top_groups={-(-self.top_k // held)}",
            )

    @property
    def rotary(self) -> Rope:
        """How the rotated part of heads is."""
        return dataclasses.replace(super().rotary, pairs="neighbours")

    def attention(self) -> AttentionConfig:
        """Of every layer."""
        size, sharper = self.nope_dim + self.rope_dim, 1.0
        if isinstance(self.rope_scaling, YarnScaling):
            sharper += 0.1 * self.mscale * math.log(self.rope_scaling.factor)
        return AttentionConfig(
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=size,
            latent=LatentConfig(
                rank=self.kv_rank,
                query_rank=self.query_rank,
                rotary_dim=self.rope_dim,
                value_dim=self.value_dim,
                norm=LATENT_NORM,
            ),
            rotary=self.rotary,
            scale=size**-0.5 * sharper**2,
        )

    def mixture(self) -> MoeConfig:
        """The experts of a layer."""
        return dataclasses.replace(
            super().mixture(), groups=self.groups, top_groups=self.top_groups
        )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it; what weighs and moves the balance is of training, and ours stays."""
        given.expect("mlp_bias", False)
        # DeepSeek's own code divides by the sum then and does not scale; transformers' reads neither.
        given.expect("norm_topk_prob", False)
        given.expect("scoring_func", "softmax")
        is_grouped = given.choose(
            "topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy"
        )
        grouped = {"groups": given.get("n_group", 1), "top_groups": given.get("topk_group", 1)}
        settings = cls.latent_settings(given, shared=2, hidden=1407)
        return cls(**settings | (grouped if is_grouped else {}))

    @classmethod
    def latent_settings(cls, given: Attributes, *, shared: int, hidden: int) -> dict[str, Any]:
        """The settings that V3 has too; `shared` experts and `hidden` units of each where config.json is silent."""
        found = cls.shared_settings(given)
        given.expect("attention_bias", False)
        given.expect("moe_layer_freq", 1)
        given.expect("num_key_value_heads", found["heads"], None)
        # Said again, or of training, or of how transformers lays it out.
        given.ignore("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha")
        given.ignore("router_aux_loss_coef", "topk_method", "scoring_func")
        if given.has("quantization_config"):
            given.ignore("quantization_config")
            given.note("quantization_config: float8 in blocks is not read, bfloat16 is")
        mscale = 0.0
        for name in ("rope_scaling", "rope_parameters"):
            inner = given.inner(name)
            if inner is not None and isinstance(found["rope_scaling"], YarnScaling):
                mscale = inner.get("mscale_all_dim", 0.0, kind=float)
        hidden = given.get("moe_intermediate_size", hidden)
        return found | dict(
            hidden=hidden,
            dense_hidden=found["hidden"],
            dense_depth=given.get("first_k_dense_replace", 0, least=0),
            shared=hidden * given.get("n_shared_experts", shared),
            experts=given.get("n_routed_experts"),
            top_k=given.get("num_experts_per_tok"),
            scale=given.get("routed_scaling_factor", 1.0, kind=float),
            query_rank=given.get("q_lora_rank", None),
            kv_rank=given.get("kv_lora_rank", 512),
            nope_dim=given.get("qk_nope_head_dim", 128),
            rope_dim=given.get("qk_rope_head_dim", 64),
            value_dim=given.get("v_head_dim", 128),
            mscale=mscale,
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        refuse_others(self, router="softmax", normalised=False, balance_bias=0.0)
        return self.latent_attributes() | {
            "mlp_bias": False,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy" if self.groups == 1 else "group_limited_greedy",
        }

    def latent_attributes(self) -> dict[str, Any]:
        """Those that V3 has too. Raises ConfigError where shared experts are no whole number."""
        if self.shared == 0 or self.shared % self.hidden:
            why = f"shared = {self.shared} where it computes multiples of hidden = {self.hidden}"
            raise uncomputed(self.HUB, why)
        written = super().to_hub()
        if isinstance(self.rope_scaling, YarnScaling) and self.mscale:
            own = written["rope_scaling"]
            own["mscale_all_dim"] = self.mscale
            # As DeepSeek writes it, which vLLM reads.
            if own.get("attention_factor") == 1:
                own["mscale"] = self.mscale
                del own["attention_factor"]
        return written | {
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "attention_bias": False,
            "intermediate_size": self.dense_hidden,
            "moe_intermediate_size": self.hidden,
            "moe_layer_freq": 1,
            "first_k_dense_replace": self.dense_depth,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared // self.hidden,
            "num_experts_per_tok": self.top_k,
            "routed_scaling_factor": self.scale,
            "n_group": self.groups,
            "topk_group": self.top_groups,
        }


# As DeepSeek trained them on, for rows of 160k tokens.
STRETCHED = YarnScaling(factor=40.0, original=4096, magnitude=1.0)
SIZES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": dict(
        vocab=102_400,
        context=163_840,
        depth=27,
        width=2048,
        heads=16,
        hidden=1408,
        dense_hidden=10_944,
        norm_eps=1e-6,
        rope_scaling=STRETCHED,
        mscale=0.707,
        balance_loss=0.001,
    ),
    "deepseek-v2": dict(
        vocab=102_400,
        context=163_840,
        depth=60,
        width=5120,
        heads=128,
        query_rank=1536,
        experts=160,
        hidden=1536,
        shared=3072,
        dense_hidden=12_288,
        groups=8,
        top_groups=3,
        scale=16.0,
        norm_eps=1e-6,
        rope_scaling=STRETCHED,
        mscale=0.707,
        balance_loss=0.003,
    ),
}
