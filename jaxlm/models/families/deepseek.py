"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, shared experts.

The first layers are dense; the others have shared experts and many small routed ones.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.models.families import llama_like, setting_docs
from jaxlm.models.families.experts import ROUTED, Experts
from jaxlm.models.families.family import Problems, problem, size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, TensorMapping, linears, uncomputed
from jaxlm.models.families.llama_like import GatedDecoder
from jaxlm.nn.config import AttentionConfig, LatentConfig, MoeConfig, NormConfig
from jaxlm.nn.rotary import Rope, YarnScaling

LATENT_NORM = NormConfig(kind="rms", eps=1e-6)  # norm_eps is of the other norms
BUFFERS = ("rotary_emb.inv_freq",)
COMPRESSED = "attention/query_latent/weight"
# YaRN of the published models, trained on for rows of 160k tokens.
YARN = YarnScaling(factor=40.0, original=4096, magnitude=1.0)
STRETCHED: dict[str, Any] = dict(max_positions=163_840, norm_eps=1e-6, rope_scaling=YARN)


def _mapping(name: str, *paths: str, **more: Any) -> TensorMapping:
    more = {"layout": "transposed"} | more
    paths = tuple(f"attention/{path}" for path in paths)
    return TensorMapping(f"model.layers.{{i}}.self_attn.{name}.weight", paths, **more)


ROWS = (
    *llama_like.STREAM,
    *llama_like.NORMS,
    *llama_like.MLP,
    _mapping("q_proj", "query/weight", excludes=COMPRESSED),
    _mapping("q_a_proj", "query_latent/weight"),
    _mapping("q_a_layernorm", "query_norm/scale"),
    _mapping("q_b_proj", "query/weight", requires=COMPRESSED),
    _mapping("kv_a_proj_with_mqa", "latent/weight", "rotary_key/weight"),
    _mapping("kv_a_layernorm", "latent_norm/scale"),
    _mapping("kv_b_proj", "key/weight", "value/weight", layout="by head"),
    _mapping("o_proj", "out/weight"),
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
        None, "size of the latent of queries; None projects queries from the stream", low=1
    )
    kv_rank: int = setting(
        512, "size of the latent of keys and values, which the KV cache stores", low=1
    )
    nope_dim: int = setting(128, "features of a head's query and key without rotation", low=1)
    rope_dim: int = setting(
        64,
        "features of a head's query and key with rotation; all heads share one such key, which "
        "the KV cache stores too",
        low=2,
    )
    value_dim: int = setting(128, "size of a head's value", low=1)
    mscale: float = setting(
        0.0,
        "under yarn, scores are multiplied by (0.1 mscale ln(factor) + 1) squared; transformers' "
        "mscale_all_dim",
        low=0.0,
    )
    experts: int = setting(64, **setting_docs.EXPERTS)
    top_k: int = setting(6, **setting_docs.TOP_K)
    shared: int = setting(2816, **setting_docs.SHARED)
    groups: int = setting(1, **setting_docs.GROUPS)
    top_groups: int = setting(1, **setting_docs.TOP_GROUPS)
    dense_depth: int = setting(1, **setting_docs.DENSE_DEPTH)
    normalize_top_k: bool = setting(False, **setting_docs.NORMALIZED)

    ATTRIBUTES = {
        **GatedDecoder.ATTRIBUTES,
        "hidden": ConfigKey("moe_intermediate_size", 1407),
        "dense_hidden": ConfigKey("intermediate_size"),
        "dense_depth": ConfigKey("first_k_dense_replace", 0, least=0),
        "experts": ConfigKey("n_routed_experts"),
        "top_k": ConfigKey("num_experts_per_tok"),
        "scale": ConfigKey("routed_scaling_factor", 1.0, kind=float),
        "groups": ConfigKey("n_group", 1),
        "top_groups": ConfigKey("topk_group", 1),
        "query_rank": ConfigKey("q_lora_rank", None),
        "kv_rank": ConfigKey("kv_lora_rank", 512),
        "nope_dim": ConfigKey("qk_nope_head_dim", 128),
        "rope_dim": ConfigKey("qk_rope_head_dim", 64),
        "value_dim": ConfigKey("v_head_dim", 128),
    }
    # DeepSeek's own code reads norm_topk_prob and then divides by the sum without scaling;
    # transformers reads neither.
    CONSTANTS = {
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }
    # Repetitions, training, and transformers' memory layout.
    IGNORED: ClassVar[tuple[str, ...]] = (
        *("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha"),
        "router_aux_loss_coef",
    )
    ROPE_INTERLEAVED = True
    COMPUTED: ClassVar[dict[str, Any]] = dict(
        router="softmax", normalize_top_k=False, balance_bias=0.0
    )
    SHARED_DEFAULT = 2  # transformers' default of n_shared_experts
    HUB = Hub("deepseek_v2", "DeepseekV2ForCausalLM", ROWS, buffer_suffixes=BUFFERS)
    SIZES = size_table(
        "depth width heads hidden dense_hidden balance_loss",
        {
            "deepseek-v2-lite": (27, 2048, 16, 1408, 10_944, 0.001),
            "deepseek-v2": (
                *(60, 5120, 128, 1536, 12_288, 0.003),
                dict(query_rank=1536, experts=160, shared=3072, groups=8, top_groups=3, scale=16.0),
            ),
        },
        vocab=102_400,
        mscale=0.707,
        **STRETCHED,
    )

    def problems(self) -> Problems:
        """Yield contradictions between rotated features, scaling, experts and their groups."""
        yield from super().problems()
        if self.rope_dim % 2:
            why = f"{self.rope_dim} features cannot be rotated in pairs"
            yield problem("rope_dim", why, self.rope_dim + 1)
        if self.mscale and not isinstance(self.rope_scaling, YarnScaling):
            why = f"mscale = {self.mscale:g} uses the factor of yarn, and rope_scaling is "
            yield problem("mscale", why + self.rope_scaling.name, 0)
        size = self.experts // self.groups
        # With sigmoid scores, the score of a group is the sum of its best two experts.
        least = 2 if self.router == "sigmoid" and self.groups > 1 else 1
        if self.experts % self.groups or size < least:
            why = f"experts = {self.experts} do not make groups = {self.groups} of one size, "
            yield problem("groups", f"{why}{least} at least", "1 --config.model.top_groups=1")
        elif self.top_groups > self.groups:
            why = f"top_groups = {self.top_groups} of groups = {self.groups}"
            yield problem("top_groups", why, self.groups)
        elif self.top_groups * size < self.top_k <= self.experts:
            groups = f"{self.top_groups} groups of {size}"
            why = f"{groups} do not hold a token's top_k = {self.top_k} experts"
            yield problem("top_groups", why, -(-self.top_k // size))

    def attention(self) -> AttentionConfig:
        """Return the attention of every layer."""
        size, magnitude = self.nope_dim + self.rope_dim, 1.0
        if isinstance(self.rope_scaling, YarnScaling):
            magnitude += 0.1 * self.mscale * math.log(self.rope_scaling.factor)
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
            scale=size**-0.5 * magnitude**2,
        )

    def mixture(self) -> MoeConfig:
        """Return the experts of a layer."""
        return dataclasses.replace(
            super().mixture(), groups=self.groups, top_groups=self.top_groups
        )

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings of a config.json; coefficients of the balance keep our defaults."""
        settings = super().hub_settings(attributes)
        attributes.expect("num_key_value_heads", settings["heads"], None)
        if attributes.has("quantization_config"):
            attributes.ignore("quantization_config")
            attributes.note("quantization_config: float8 in blocks is not read, bfloat16 is")
        for name in ("rope_scaling", "rope_parameters"):
            inner = attributes.inner(name)
            if inner is not None and isinstance(settings["rope_scaling"], YarnScaling):
                settings["mscale"] = inner.get("mscale_all_dim", 0.0, kind=float)
        shared = attributes.get("n_shared_experts", cls.SHARED_DEFAULT)
        settings["shared"] = settings["hidden"] * shared
        methods = {"greedy": False, "group_limited_greedy": True}
        is_grouped = "topk_method" in cls.CONSTANTS or attributes.choose(
            "topk_method", methods, "greedy"
        )
        if not is_grouped:
            del settings["groups"], settings["top_groups"]
        return settings

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        if self.shared == 0 or self.shared % self.hidden:
            why = f"shared = {self.shared} where it computes multiples of hidden = {self.hidden}"
            raise uncomputed(self.HUB, why)
        attributes = super().to_hub()
        if isinstance(self.rope_scaling, YarnScaling) and self.mscale:
            scaling = attributes["rope_scaling"]
            scaling["mscale_all_dim"] = self.mscale
            # DeepSeek's spelling, which vLLM reads.
            if scaling.get("attention_factor") == 1:
                scaling["mscale"] = self.mscale
                del scaling["attention_factor"]
        return attributes | {
            "num_key_value_heads": self.heads,
            "topk_method": "greedy" if self.groups == 1 else "group_limited_greedy",
            "n_shared_experts": self.shared // self.hidden,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3(DeepSeekV2):
    """A DeepSeek-V3-style decoder: V2 with sigmoid scores and a load-balancing bias on the choice.

    The bias exists even if it does not move.
    """

    family: Literal["deepseek_v3"] = "deepseek_v3"  # type: ignore[assignment]
    interleaved: bool = setting(
        True,
        "rotate features (2i, 2i + 1) of a head together, instead of (i, i + half)",
        formerly=("pairs", {"neighbours": True, "halves": False}),
    )
    experts: int = setting(256, **setting_docs.EXPERTS)
    top_k: int = setting(8, **setting_docs.TOP_K)
    shared: int = setting(2048, **setting_docs.SHARED)
    groups: int = setting(8, **setting_docs.GROUPS)
    top_groups: int = setting(4, **setting_docs.TOP_GROUPS)
    router: Literal["softmax", "sigmoid"] = setting("sigmoid", **setting_docs.ROUTER)
    normalize_top_k: bool = setting(True, **setting_docs.NORMALIZED)
    scale: float = setting(2.5, **setting_docs.EXPERT_SCALE)
    balance_loss: float = setting(1e-4, **setting_docs.BALANCE_LOSS)
    balance_bias: float = setting(0.001, **setting_docs.BALANCE_BIAS)

    ATTRIBUTES = {**DeepSeekV2.ATTRIBUTES} | dict(
        normalize_top_k=ConfigKey("norm_topk_prob", True, kind=bool)
    )
    HF_DEFAULTS = {"max_positions": 4096, "hidden": 2048, "groups": 8, "top_groups": 4}
    CONSTANTS = {
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    # Import reports multi-token-prediction layers as left out.
    IGNORED = (*DeepSeekV2.IGNORED, "num_nextn_predict_layers")
    COMPUTED = {"router": "sigmoid"}
    SHARED_DEFAULT = 1
    HUB = Hub(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        mappings=(
            *ROWS,
            TensorMapping(
                "model.layers.{i}.mlp.gate.e_score_correction_bias", ("mlp/bias",), is_exact=True
            ),
        ),
        buffer_suffixes=BUFFERS,
        mtp_layers=("model.layers.{i}.", "num_nextn_predict_layers"),
    )
    SIZES = size_table(
        "vocab depth width heads query_rank hidden dense_depth dense_hidden",
        {"deepseek-v3": (129_280, 61, 7168, 128, 1536, 2048, 3, 18_432)},
        mscale=1.0,
        **STRETCHED,
    )

    @property
    def rotary(self) -> Rope:
        """Rotary position embedding of the rotated features."""
        return dataclasses.replace(super().rotary, interleaved=self.interleaved)

    def mixture(self) -> MoeConfig:
        """Return the experts of a layer."""
        return dataclasses.replace(super().mixture(), bias_rate=self.balance_bias)

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        interleaved = attributes.get("rope_interleave", True, kind=bool)
        return super().hub_settings(attributes) | {"interleaved": interleaved}

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        return super().to_hub() | {
            "topk_method": "noaux_tc",
            "rope_interleave": self.interleaved,
            "num_nextn_predict_layers": 0,
        }
