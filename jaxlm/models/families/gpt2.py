"""GPT-2 (Radford et al. 2019): pre-norm with layer norms, learned positions, biases, tied."""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import setting_docs
from jaxlm.models.families.family import (
    ACTIVATIONS,
    PlainSettings,
    Problems,
    size_table,
    uneven,
)
from jaxlm.models.families.hub import (
    MAX_NESTING,
    AttributeMapping,
    Hub,
    TensorMapping,
    norms,
    uncomputed,
)
from jaxlm.nn.config import Activation, Init

# GPT-2's attributes of a classification head.
SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2(PlainSettings):
    """A GPT-2-style decoder."""

    family: Literal["gpt2"] = "gpt2"
    context: int = setting(1024, **setting_docs.POSITION_ROWS)
    kv_heads: int | Literal["auto"] = setting("auto", **setting_docs.KV_HEADS)
    activation: Activation = setting("gelu_tanh", **setting_docs.PLAIN_ACTIVATION)
    bias: bool = setting(True, "biases in projections and norms")
    tied: bool = setting(True, **setting_docs.TIED)
    init: Init = setting("gpt2", **setting_docs.INIT)

    ATTRIBUTES = {
        "vocab": AttributeMapping("vocab_size"),
        "context": AttributeMapping("n_positions", 1024),
        "depth": AttributeMapping("n_layer", most=MAX_NESTING),
        "width": AttributeMapping("n_embd"),
        "heads": AttributeMapping("n_head"),
        "hidden": AttributeMapping("n_inner", "auto", resolved="hidden_or_none"),
        "activation": AttributeMapping(
            "activation_function", "gelu_new", words={"gelu_new": "gelu_tanh", **ACTIVATIONS}
        ),
        "norm_eps": AttributeMapping("layer_norm_epsilon", 1e-5, kind=float),
        "tied": AttributeMapping("tie_word_embeddings", True, kind=bool),
    }
    EXPECTED = {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    IGNORED = (
        "reorder_and_upcast_attn",  # rounding
        "n_ctx",  # the older n_positions
        *(f"summary_{name}" for name in SUMMARY),
    )
    # Weights are stored as [in, out], with query, key and value side by side.
    HUB = Hub(
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
                    f"transformer.h.{{i}}.{name}.{kind}", tuple(f"{path}/{kind}" for path in paths)
                )
                for kind in ("weight", "bias")
                for name, paths in (
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
    SIZES = size_table(
        "depth width heads",
        {
            "gpt2": (12, 768, 12),
            "gpt2-medium": (24, 1024, 16),
            "gpt2-large": (36, 1280, 20),
            "gpt2-xl": (48, 1600, 25),
        },
        vocab=50_257,
    )

    def problems(self) -> Problems:
        """Yield a problem if heads do not share the width and the keys evenly."""
        yield from super().problems()
        if self.kv_heads != "auto":
            yield from uneven("heads", self.heads, "kv_heads", self.kv_heads)

    @property
    def has_bias(self) -> bool:
        """If projections and norms have biases."""
        return self.bias

    @property
    def hidden_or_none(self) -> int | None:
        """hidden as config.json has it: null is 4 x width."""
        return None if self.hidden == "auto" else self.hidden

    def build(self) -> Decoder:
        """Return the model's config. `vocab` must be resolved by now."""
        kv_heads = self.heads if self.kv_heads == "auto" else self.kv_heads
        return Decoder(
            **self.backbone(),
            pattern=(self.block(kv_heads, dropout=self.dropout),),
            positions=self.context,
            final_norm=self.norm,
            tied=self.tied,
        )

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        if not self.bias or self.kv_heads not in ("auto", self.heads):
            why = f"bias = {self.bias}, kv_heads = {self.kv_heads}"
            raise uncomputed(self.HUB, f"{why}, and it has biases, and every head its keys")
        return super().to_hub()
