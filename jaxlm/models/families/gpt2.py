"""GPT-2 (Radford et al. 2019): layer norms before each part, learned positions, a plain GELU MLP, biases, tied embeddings."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import setting_docs
from jaxlm.models.families.hub import MAX_NESTING, Attributes, Hub, TensorMapping, norms, uncomputed
from jaxlm.models.families.llama_like import ACTIVATIONS
from jaxlm.models.families.sizes import uneven
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig, Init, MlpConfig, NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2:
    """A GPT-2-style decoder."""

    family: Literal["gpt2"] = "gpt2"
    vocab: int | Literal["auto"] = setting("auto", **setting_docs.VOCAB)
    context: int = setting(
        1024, "rows of the position table: the longest sequence", unit="tokens", low=1
    )
    depth: int = setting(12, **setting_docs.DEPTH)
    width: int = setting(768, **setting_docs.WIDTH)
    heads: int = setting(12, **setting_docs.HEADS)
    kv_heads: int | Literal["auto"] = setting("auto", **setting_docs.KV_HEADS)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.PLAIN_HIDDEN)
    activation: Activation = setting("gelu_tanh", **setting_docs.PLAIN_ACTIVATION)
    bias: bool = setting(True, "biases in projections and norms")
    norm_eps: float = setting(1e-5, **setting_docs.LAYER_NORM_EPS)
    tied: bool = setting(True, **setting_docs.TIED)
    dropout: float = setting(0.0, **setting_docs.DROPOUT)
    init: Init = setting("gpt2", **setting_docs.INIT)
    init_std: float = setting(0.02, **setting_docs.INIT_STD)

    # Weights are kept as [in, out], and query, key and value side by side.
    HUB: ClassVar[Hub] = Hub(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        rows=(
            TensorMapping("transformer.wte.weight", ("embedding/table",)),
            TensorMapping("transformer.wpe.weight", ("positions/table",)),
            *norms("transformer.{}", ln_f="final_norm"),
            TensorMapping("lm_head.weight", ("unembedding/weight",), "transposed"),
            *norms("transformer.h.{i}.{}", ln_1="attention_norm", ln_2="mlp_norm"),
            *(
                TensorMapping(
                    f"transformer.h.{{i}}.{theirs}.{kind}", tuple(f"{each}/{kind}" for each in ours)
                )
                for kind in ("weight", "bias")
                for theirs, ours in (
                    ("attn.c_attn", ("attention/query", "attention/key", "attention/value")),
                    ("attn.c_proj", ("attention/out",)),
                    ("mlp.c_fc", ("mlp/up",)),
                    ("mlp.c_proj", ("mlp/down",)),
                )
            ),
        ),
        optional="transformer.",
        buffers=("attn.bias", "attn.masked_bias"),
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width and the keys evenly."""
        yield from uneven("width", self.width, "heads", self.heads)
        if self.kv_heads != "auto":
            yield from uneven("heads", self.heads, "kv_heads", self.kv_heads)

    def build(self) -> Decoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        norm = NormConfig(kind="layer", eps=self.norm_eps, bias=self.bias)
        block = BlockConfig(
            attention=AttentionConfig(
                heads=self.heads,
                kv_heads=self.heads if self.kv_heads == "auto" else self.kv_heads,
                head_dim=self.width // self.heads,
                bias=self.bias,
                out_bias=self.bias,
                dropout=self.dropout,
            ),
            mlp=MlpConfig(
                hidden=4 * self.width if self.hidden == "auto" else self.hidden,
                activation=self.activation,
                gated=False,
                bias=self.bias,
            ),
            norm=norm,
            dropout=self.dropout,
        )
        return Decoder(
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            pattern=(block,),
            positions=self.context,
            final_norm=norm,
            tied=self.tied,
            dropout=self.dropout,
            init=self.init,
            init_std=self.init_std,
        )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        for name, value in (
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
            ("add_cross_attention", False),
        ):
            given.expect(name, value)
        given.ignore("reorder_and_upcast_attn", "n_ctx")  # how it is rounded; the older n_positions
        given.ignore(*(f"summary_{name}" for name in _SUMMARY))
        return cls(
            vocab=given.get("vocab_size"),
            context=given.get("n_positions", 1024),
            depth=given.get("n_layer", most=MAX_NESTING),
            width=given.get("n_embd"),
            heads=given.get("n_head"),
            hidden=given.get("n_inner", "auto"),
            activation=given.choose("activation_function", ACTIVATIONS, "gelu_new"),
            norm_eps=given.get("layer_norm_epsilon", 1e-5, kind=float),
            tied=given.get("tie_word_embeddings", True, kind=bool),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        if not self.bias or self.kv_heads not in ("auto", self.heads):
            why = f"bias = {self.bias}, kv_heads = {self.kv_heads}, and it has biases, and every head its keys"
            raise uncomputed(self.HUB, why)
        theirs = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
        return dict(
            vocab_size=self.build().vocab,
            n_positions=self.context,
            n_layer=self.depth,
            n_embd=self.width,
            n_head=self.heads,
            n_inner=None if self.hidden == "auto" else self.hidden,
            activation_function=theirs.get(self.activation, "relu2"),
            layer_norm_epsilon=self.norm_eps,
            tie_word_embeddings=self.tied,
            initializer_range=self.init_std,
        )


# What GPT-2's config.json says of a head that classifies.
_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": dict(vocab=50_257, depth=12, width=768, heads=12),
    "gpt2-medium": dict(vocab=50_257, depth=24, width=1024, heads=16),
    "gpt2-large": dict(vocab=50_257, depth=36, width=1280, heads=20),
    "gpt2-xl": dict(vocab=50_257, depth=48, width=1600, heads=25),
}
