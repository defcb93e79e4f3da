"""What families with rotary positions, grouped heads and gated MLPs have in common. Free of JAX."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import rope, setting_docs
from jaxlm.models.families.hub import MAX_NESTING, Attributes, TensorMapping, linears, norms
from jaxlm.models.families.sizes import gated_hidden, head_problems
from jaxlm.nn.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    Init,
    MlpConfig,
    NormConfig,
)
from jaxlm.nn.rotary import NoScaling, Rope, Scaling

# transformers' words for activations.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
THEIRS: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu_squared": "relu2",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated:
    """A decoder of RMS norms, rotary positions and a gated MLP; a family says how it attends, and what else it has."""

    family: str = ""
    vocab: int | Literal["auto"] = setting("auto", **setting_docs.VOCAB)
    context: int = setting(2048, **setting_docs.CONTEXT)
    depth: int = setting(8, **setting_docs.DEPTH)
    width: int = setting(512, **setting_docs.WIDTH)
    heads: int = setting(8, "query heads", low=1)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.GATED_HIDDEN)
    activation: Activation = setting("silu", **setting_docs.GATED_ACTIVATION)
    rope_theta: float = setting(10_000.0, **setting_docs.ROPE_THETA)
    rope_scaling: Scaling = setting(NoScaling(), **setting_docs.ROPE_SCALING)
    norm_eps: float = setting(1e-5, **setting_docs.RMS_NORM_EPS)
    tied: bool = setting(False, **setting_docs.TIED)
    dropout: float = setting(0.0, **setting_docs.OUTPUT_DROPOUT)
    init: Init = setting("normal", **setting_docs.INIT)
    init_std: float = setting(0.02, **setting_docs.INIT_STD)

    # What transformers takes where config.json is silent, by our names.
    ABSENT: ClassVar[dict[str, Any]] = {}
    ROPE_KINDS: ClassVar[tuple[str, ...]] = rope.KINDS

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """None that all these families share."""
        yield from ()

    @property
    def norm(self) -> NormConfig:
        """Every norm of the stream."""
        return NormConfig(kind="rms", eps=self.norm_eps)

    @property
    def rotary(self) -> Rope:
        """How heads are rotated."""
        return Rope(theta=self.rope_theta, scaling=self.rope_scaling)

    def attention(self) -> AttentionConfig:
        """Of a layer, where it is the same in all."""
        raise NotImplementedError

    @property
    def size_of_hidden(self) -> int:
        """hidden, with `auto` filled in."""
        return gated_hidden(self.width) if self.hidden == "auto" else self.hidden

    def block(self) -> BlockConfig:
        """A layer."""
        return BlockConfig(
            attention=self.attention(),
            mlp=MlpConfig(hidden=self.size_of_hidden, activation=self.activation, gated=True),
            norm=self.norm,
            dropout=self.dropout,
        )

    def pattern(self) -> tuple[BlockConfig, ...]:
        """The layers that repeat."""
        return (self.block(),)

    def build(self) -> Decoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        return Decoder(
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            pattern=self.pattern(),
            final_norm=self.norm,
            tied=self.tied,
            dropout=self.dropout,
            init=self.init,
            init_std=self.init_std,
        )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it. Problems are noted in `given`."""
        return cls(**cls.shared_settings(given))

    @classmethod
    def shared_settings(cls, given: Attributes) -> dict[str, Any]:
        """The settings that all these families have."""
        absent = {"context": 2048, "norm_eps": 1e-6, "tied": False, "rope_theta": 10_000.0}
        absent |= cls.ABSENT
        rotary = rope.read(given, theta=absent["rope_theta"], kinds=cls.ROPE_KINDS)
        context = given.get("max_position_embeddings", absent["context"])
        return dict(
            vocab=given.get("vocab_size"),
            context=context,
            depth=given.get("num_hidden_layers", most=MAX_NESTING),
            width=given.get("hidden_size"),
            heads=given.get("num_attention_heads"),
            hidden=given.get("intermediate_size"),
            activation=given.choose("hidden_act", ACTIVATIONS, "silu"),
            **cls.rotary_settings(rotary, given),
            norm_eps=given.get("rms_norm_eps", absent["norm_eps"], kind=float),
            tied=given.get("tie_word_embeddings", absent["tied"], kind=bool),
        )

    @classmethod
    def rotary_settings(cls, rotary: Rope, given: Attributes) -> dict[str, Any]:
        """The settings of how heads are rotated."""
        if rotary.share != 1:
            given.note(f"partial_rotary_factor = {rotary.share}, and whole heads are rotated here")
        return {"rope_theta": rotary.theta, "rope_scaling": rotary.scaling}

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        build = self.build()
        return dict(
            vocab_size=build.vocab,
            max_position_embeddings=self.context,
            num_hidden_layers=self.depth,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            intermediate_size=self.size_of_hidden,
            hidden_act=THEIRS[self.activation],
            rms_norm_eps=self.norm_eps,
            tie_word_embeddings=self.tied,
            initializer_range=self.init_std,
            **rope.written(self.rope_theta, self.rope_scaling),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotated(Gated):
    """One whose heads share the width, and keys."""

    kv_heads: int = setting(
        8, "key and value heads; each serves heads / kv_heads query heads", low=1
    )
    head_dim: int | Literal["auto"] = setting(
        "auto", "size of a head; auto is width / heads", low=2
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width and the keys evenly, and rotate in pairs."""
        yield from super().problems()
        yield from head_problems(self)

    @property
    def size_of_head(self) -> int:
        """head_dim, with `auto` filled in."""
        return self.width // self.heads if self.head_dim == "auto" else self.head_dim

    def attention(self) -> AttentionConfig:
        """Of a layer, where it is the same in all."""
        return AttentionConfig(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.size_of_head,
            rotary=self.rotary,
        )

    @classmethod
    def shared_settings(cls, given: Attributes) -> dict[str, Any]:
        """The settings that all these families have."""
        found = super().shared_settings(given)
        heads = found["heads"]
        size = cls.ABSENT.get("head_dim", found["width"] // heads)
        return found | {
            "kv_heads": given.get("num_key_value_heads", heads),
            "head_dim": given.get("head_dim", size),
        }

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return super().to_hub() | {
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.size_of_head,
        }


# The names of Llama, which most families took over.
STREAM = (
    TensorMapping("model.embed_tokens.weight", ("embedding/table",)),
    *norms("model.{}", norm="final_norm"),
    TensorMapping("lm_head.weight", ("unembedding/weight",), "transposed"),
)
ATTENTION = linears(
    "model.layers.{i}.self_attn.{}",
    q_proj="attention/query",
    k_proj="attention/key",
    v_proj="attention/value",
    o_proj="attention/out",
)
QK_NORMS = norms(
    "model.layers.{i}.self_attn.{}", q_norm="attention/query_norm", k_norm="attention/key_norm"
)
MLP = linears(
    "model.layers.{i}.mlp.{}", gate_proj="mlp/gate", up_proj="mlp/up", down_proj="mlp/down"
)
NORMS = norms(
    "model.layers.{i}.{}", input_layernorm="attention_norm", post_attention_layernorm="mlp_norm"
)
