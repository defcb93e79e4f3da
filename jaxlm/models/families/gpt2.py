"""GPT-2 (Radford et al. 2019): layer norms before each part, learned positions, a plain GELU MLP, biases, tied embeddings."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families.sizes import uneven
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig, Init, MlpConfig, NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2:
    """A GPT-2-style decoder."""

    family: Literal["gpt2"] = "gpt2"
    vocab: int | Literal["auto"] = setting(
        "auto", "rows of the embedding; auto is the tokenizer's size", low=2
    )
    context: int = setting(
        1024, "rows of the position table: the longest sequence", unit="tokens", low=1
    )
    depth: int = setting(12, "layers", low=1)
    width: int = setting(768, "size of the residual stream", low=2)
    heads: int = setting(12, "attention heads", low=1)
    kv_heads: int | Literal["auto"] = setting(
        "auto", "key and value heads; auto is as many as heads", low=1
    )
    hidden: int | Literal["auto"] = setting(
        "auto", "hidden units of the MLP; auto is 4 x width", low=1
    )
    activation: Activation = setting("gelu_tanh", "activation of the MLP")
    bias: bool = setting(True, "biases in projections and norms")
    norm_eps: float = setting(1e-5, "added to the variance in each norm", above=0.0)
    tied: bool = setting(True, "the unembedding is the embedding's transpose")
    dropout: float = setting(
        0.0,
        "share of embeddings, attention weights and each part's output that is dropped in training",
        low=0.0,
        below=1.0,
    )
    init: Init = setting(
        "gpt2",
        "initial weights: gpt2 (residual outputs scaled by 1/sqrt(2 depth)), normal, xavier, he",
    )
    init_std: float = setting(0.02, "standard deviation of the initial weights", above=0.0)

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


SIZES: dict[str, dict[str, Any]] = {
    "gpt2": dict(vocab=50_257, depth=12, width=768, heads=12),
    "gpt2-medium": dict(vocab=50_257, depth=24, width=1024, heads=16),
    "gpt2-large": dict(vocab=50_257, depth=36, width=1280, heads=20),
    "gpt2-xl": dict(vocab=50_257, depth=48, width=1600, heads=25),
}

# Our leaf path -> (Hugging Face name, how its array is laid out there). {i} is the layer; GPT-2 keeps weights as [in, out]
# and query, key and value side by side in one: "in,out[k/3]" is the k-th third of the columns.
KEYS: dict[str, tuple[str, str]] = {
    "embedding/table": ("transformer.wte.weight", "as is"),
    "positions/table": ("transformer.wpe.weight", "as is"),
    "stack/0/attention_norm/scale": ("transformer.h.{i}.ln_1.weight", "as is"),
    "stack/0/attention_norm/bias": ("transformer.h.{i}.ln_1.bias", "as is"),
    "stack/0/attention/query/weight": ("transformer.h.{i}.attn.c_attn.weight", "in,out[0/3]"),
    "stack/0/attention/key/weight": ("transformer.h.{i}.attn.c_attn.weight", "in,out[1/3]"),
    "stack/0/attention/value/weight": ("transformer.h.{i}.attn.c_attn.weight", "in,out[2/3]"),
    "stack/0/attention/query/bias": ("transformer.h.{i}.attn.c_attn.bias", "out[0/3]"),
    "stack/0/attention/key/bias": ("transformer.h.{i}.attn.c_attn.bias", "out[1/3]"),
    "stack/0/attention/value/bias": ("transformer.h.{i}.attn.c_attn.bias", "out[2/3]"),
    "stack/0/attention/out/weight": ("transformer.h.{i}.attn.c_proj.weight", "in,out"),
    "stack/0/attention/out/bias": ("transformer.h.{i}.attn.c_proj.bias", "as is"),
    "stack/0/mlp_norm/scale": ("transformer.h.{i}.ln_2.weight", "as is"),
    "stack/0/mlp_norm/bias": ("transformer.h.{i}.ln_2.bias", "as is"),
    "stack/0/mlp/up/weight": ("transformer.h.{i}.mlp.c_fc.weight", "in,out"),
    "stack/0/mlp/up/bias": ("transformer.h.{i}.mlp.c_fc.bias", "as is"),
    "stack/0/mlp/down/weight": ("transformer.h.{i}.mlp.c_proj.weight", "in,out"),
    "stack/0/mlp/down/bias": ("transformer.h.{i}.mlp.c_proj.bias", "as is"),
    "final_norm/scale": ("transformer.ln_f.weight", "as is"),
    "final_norm/bias": ("transformer.ln_f.bias", "as is"),
    "unembedding/weight": ("lm_head.weight", "out,in"),
}
