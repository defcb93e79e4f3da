"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783): RMS norms before each part, rotary positions, grouped queries, gated SiLU."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families.sizes import gated_hidden, head_problems
from jaxlm.nn.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    Init,
    MlpConfig,
    NormConfig,
    Rope,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama-style decoder."""

    family: Literal["llama"] = "llama"
    vocab: int | Literal["auto"] = setting(
        "auto", "rows of the embedding; auto is the tokenizer's size", low=2
    )
    context: int = setting(
        2048, "longest sequence that the model is meant for", unit="tokens", low=1
    )
    depth: int = setting(8, "layers", low=1)
    width: int = setting(512, "size of the residual stream", low=2)
    heads: int = setting(8, "query heads", low=1)
    kv_heads: int = setting(
        8, "key and value heads; each serves heads / kv_heads query heads", low=1
    )
    head_dim: int | Literal["auto"] = setting(
        "auto", "size of a head; auto is width / heads", low=2
    )
    hidden: int | Literal["auto"] = setting(
        "auto", "hidden units of the MLP; auto is 8/3 of the width, rounded up to 64", low=1
    )
    activation: Activation = setting("silu", "activation of the MLP's gate")
    rope_theta: float = setting(10_000.0, "base of the rotary frequencies", above=1.0)
    qk_norm: bool = setting(False, "RMS norm on queries and keys, as in Qwen3 (arXiv:2302.05442)")
    norm_eps: float = setting(1e-5, "added to the mean square in each norm", above=0.0)
    tied: bool = setting(False, "the unembedding is the embedding's transpose")
    dropout: float = setting(
        0.0, "share of each part's output that is dropped in training", low=0.0, below=1.0
    )
    init: Init = setting(
        "normal",
        "initial weights: normal(init_std), gpt2 (residual outputs scaled down), xavier, he",
    )
    init_std: float = setting(0.02, "standard deviation of the initial weights", above=0.0)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width and the keys evenly, and rotate in pairs."""
        yield from head_problems(self)

    @property
    def size_of_head(self) -> int:
        """head_dim, with `auto` filled in."""
        return self.width // self.heads if self.head_dim == "auto" else self.head_dim

    def build(self) -> Decoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        norm = NormConfig(kind="rms", eps=self.norm_eps)
        block = BlockConfig(
            attention=AttentionConfig(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.size_of_head,
                rotary=Rope(theta=self.rope_theta),
                qk_norm=norm if self.qk_norm else None,
            ),
            mlp=MlpConfig(
                hidden=gated_hidden(self.width) if self.hidden == "auto" else self.hidden,
                activation=self.activation,
                gated=True,
            ),
            norm=norm,
            dropout=self.dropout,
        )
        return Decoder(
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            pattern=(block,),
            final_norm=norm,
            tied=self.tied,
            dropout=self.dropout,
            init=self.init,
            init_std=self.init_std,
        )


SIZES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": dict(
        vocab=32_000, context=2048, depth=22, width=2048, heads=32, kv_heads=4, hidden=5632
    ),
    "llama2-7b": dict(
        vocab=32_000, context=4096, depth=32, width=4096, heads=32, kv_heads=32, hidden=11_008
    ),
    "llama2-13b": dict(
        vocab=32_000, context=4096, depth=40, width=5120, heads=40, kv_heads=40, hidden=13_824
    ),
    "llama2-70b": dict(
        vocab=32_000, context=4096, depth=80, width=8192, heads=64, kv_heads=8, hidden=28_672
    ),
    "llama3-8b": dict(
        vocab=128_256,
        context=8192,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        rope_theta=5e5,
    ),
    "llama3-70b": dict(
        vocab=128_256,
        context=8192,
        depth=80,
        width=8192,
        heads=64,
        kv_heads=8,
        hidden=28_672,
        rope_theta=5e5,
    ),
    "llama3.2-1b": dict(
        vocab=128_256,
        context=8192,
        depth=16,
        width=2048,
        heads=32,
        kv_heads=8,
        hidden=8192,
        rope_theta=5e5,
        tied=True,
    ),
}

# Our leaf path -> (Hugging Face name, how its array is laid out there). {i} is the layer. "out,in" is a torch Linear.
# The norms of queries and keys are those of Qwen3, which is a Llama in all other names.
KEYS: dict[str, tuple[str, str]] = {
    "embedding/table": ("model.embed_tokens.weight", "as is"),
    "stack/0/attention_norm/scale": ("model.layers.{i}.input_layernorm.weight", "as is"),
    "stack/0/attention/query/weight": ("model.layers.{i}.self_attn.q_proj.weight", "out,in"),
    "stack/0/attention/key/weight": ("model.layers.{i}.self_attn.k_proj.weight", "out,in"),
    "stack/0/attention/query_norm/scale": ("model.layers.{i}.self_attn.q_norm.weight", "as is"),
    "stack/0/attention/key_norm/scale": ("model.layers.{i}.self_attn.k_norm.weight", "as is"),
    "stack/0/attention/value/weight": ("model.layers.{i}.self_attn.v_proj.weight", "out,in"),
    "stack/0/attention/out/weight": ("model.layers.{i}.self_attn.o_proj.weight", "out,in"),
    "stack/0/mlp_norm/scale": ("model.layers.{i}.post_attention_layernorm.weight", "as is"),
    "stack/0/mlp/gate/weight": ("model.layers.{i}.mlp.gate_proj.weight", "out,in"),
    "stack/0/mlp/up/weight": ("model.layers.{i}.mlp.up_proj.weight", "out,in"),
    "stack/0/mlp/down/weight": ("model.layers.{i}.mlp.down_proj.weight", "out,in"),
    "final_norm/scale": ("model.norm.weight", "as is"),
    "unembedding/weight": ("lm_head.weight", "out,in"),
}
