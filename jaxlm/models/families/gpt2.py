"""GPT-2 (Radford et al. 2019): pre-norm with layer norms, learned positions, biases, tied."""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import DecoderConfig
from jaxlm.models.families import setting_docs
from jaxlm.models.families.family import ACTIVATIONS, PlainDecoder, size_table
from jaxlm.models.families.hub import MAX_NESTING, ConfigKey, Hub, TensorMapping, norms, uncomputed
from jaxlm.nn.config import Activation

# GPT-2's attributes of a classification head.
SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2(PlainDecoder):
    """A GPT-2-style decoder."""

    family: Literal["gpt2"] = "gpt2"
    max_positions: int = setting(1024, **setting_docs.POSITION_ROWS)
    activation: Activation = setting("gelu_tanh", **setting_docs.PLAIN_ACTIVATION)
    bias: bool = setting(True, "biases in projections and norms")

    ATTRIBUTES = {
        "vocab": ConfigKey("vocab_size"),
        "max_positions": ConfigKey("n_positions", 1024),
        "depth": ConfigKey("n_layer", most=MAX_NESTING),
        "width": ConfigKey("n_embd"),
        "heads": ConfigKey("n_head"),
        "hidden": ConfigKey(
            "n_inner",
            "auto",
            value=lambda family: None if family.hidden == "auto" else family.hidden,
        ),
        "activation": ConfigKey(
            "activation_function", "gelu_new", words={"gelu_new": "gelu_tanh", **ACTIVATIONS}
        ),
        "norm_eps": ConfigKey("layer_norm_epsilon", 1e-5, kind=float),
        "tied": ConfigKey("tie_word_embeddings", True, kind=bool),
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
        mappings=(
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
        optional_prefix="transformer.",
        buffer_suffixes=("attn.bias", "attn.masked_bias"),
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

    @property
    def has_bias(self) -> bool:
        """If projections and norms have biases."""
        return self.bias

    def build(self) -> DecoderConfig:
        """Return the model's config. `vocab` must be resolved by now."""
        return self.decoder(positions=self.max_positions, dropout=self.dropout)

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        if not self.bias or self.kv_heads not in ("auto", self.heads):
            why = f"bias = {self.bias}, kv_heads = {self.kv_heads}"
            raise uncomputed(self.HUB, f"{why}, and it has biases, and every head its keys")
        return super().to_hub()
