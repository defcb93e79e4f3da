"""Mixtral (arXiv:2401.04088) and its fine-grained kin, DeepSeekMoE (arXiv:2401.06066): a Llama whose MLPs are experts."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import llama
from jaxlm.models.families.sizes import head_problems
from jaxlm.nn.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    Init,
    MlpConfig,
    MoeConfig,
    NormConfig,
    Rope,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixtral:
    """A Llama-style decoder with a mixture of experts in every layer but the first `dense_depth`."""

    family: Literal["mixtral"] = "mixtral"
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
    experts: int = setting(8, "experts of a layer", low=1)
    top_k: int = setting(2, "experts that see a token", low=1)
    hidden: int = setting(1408, "hidden units of each expert", low=1)
    shared: int = setting(
        0, "hidden units of the experts that see all tokens, all together; 0 has none", low=0
    )
    dense_depth: int = setting(0, "layers at the start whose MLP is dense", low=0)
    dense_hidden: int = setting(4096, "hidden units of the dense layers", low=1)
    router: Literal["softmax", "sigmoid"] = setting(
        "softmax", "how the router's logits become scores"
    )
    normalised: bool = setting(
        True, "the scores of a token's experts are divided by their sum before they weigh"
    )
    scale: float = setting(1.0, "what the weights of a token's experts are multiplied by", above=0)
    balance_loss: float = setting(
        0.01, "weight of the loss that spreads tokens over experts, in each layer", low=0
    )
    balance_bias: float = setting(
        0.0,
        "by how much a bias on the scores moves in each step to spread tokens (arXiv:2408.15664); 0 has none",
        low=0,
    )
    router_z: float = setting(
        0.0, "weight of the squared log normalizer of the router (arXiv:2202.08906)", low=0
    )
    capacity: float | None = setting(
        None,
        "tokens of a row that an expert takes, over the even share; later ones are dropped. None drops none",
        above=0,
    )
    activation: Activation = setting("silu", "activation of the experts' gates")
    rope_theta: float = setting(10_000.0, "base of the rotary frequencies", above=1.0)
    qk_norm: bool = setting(False, "RMS norm on queries and keys (arXiv:2302.05442)")
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
        """Heads share the width and the keys evenly, and rotate in pairs; a token's experts exist; some layer has them."""
        yield from head_problems(self)
        if self.top_k > self.experts:
            yield (
                "top_k",
                f"a token cannot see top_k = {self.top_k} of experts = {self.experts}",
                f"--config.model.top_k={self.experts}",
            )
        if self.dense_depth >= self.depth:
            yield (
                "dense_depth",
                f"dense_depth = {self.dense_depth} of depth = {self.depth} layers leaves none to the experts",
                f"--config.model.dense_depth={self.depth - 1}",
            )

    @property
    def size_of_head(self) -> int:
        """head_dim, with `auto` filled in."""
        return self.width // self.heads if self.head_dim == "auto" else self.head_dim

    def build(self) -> Decoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        norm = NormConfig(kind="rms", eps=self.norm_eps)
        sparse = BlockConfig(
            attention=AttentionConfig(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.size_of_head,
                rotary=Rope(theta=self.rope_theta),
                qk_norm=norm if self.qk_norm else None,
            ),
            mlp=MoeConfig(
                experts=self.experts,
                top_k=self.top_k,
                hidden=self.hidden,
                shared=self.shared,
                activation=self.activation,
                router=self.router,
                normalised=self.normalised,
                scale=self.scale,
                balance=self.balance_loss,
                router_z=self.router_z,
                bias_rate=self.balance_bias,
                capacity=self.capacity,
            ),
            norm=norm,
            dropout=self.dropout,
        )
        dense = dataclasses.replace(
            sparse,
            mlp=MlpConfig(hidden=self.dense_hidden, activation=self.activation, gated=True),
        )
        return Decoder(
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            prefix=(dense,) * self.dense_depth,
            pattern=(sparse,),
            final_norm=norm,
            tied=self.tied,
            dropout=self.dropout,
            init=self.init,
            init_std=self.init_std,
        )


SIZES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": dict(
        vocab=32_000,
        context=32_768,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        experts=8,
        top_k=2,
        hidden=14_336,
        # Published is 0.02, for all layers pooled and k where the load is even; ours is 1 there, in each of 32 layers.
        balance_loss=0.02 * 2 / 32,
        rope_theta=1e6,
    ),
    "deepseek-moe-16b": dict(
        vocab=102_400,
        context=4096,
        depth=28,
        width=2048,
        heads=16,
        kv_heads=16,
        experts=64,
        top_k=6,
        hidden=1408,
        shared=2816,
        dense_depth=1,
        dense_hidden=10_944,
        normalised=False,
        balance_loss=0.001,
        norm_eps=1e-6,
    ),
}

# Our leaf path -> (Hugging Face name, how its array is laid out there), by the names that transformers 5 has in memory; the
# files on the Hub keep each expert apart, as block_sparse_moe.experts.{e}.w1 (gate), w2 (down) and w3 (up). {i} is the
# layer. An expert's gate and up lie side by side in one: "expert,out[k/2],in" is the k-th half of the outputs. The norms
# of queries and keys are those of Qwen3-MoE, the shared experts those of DeepSeek-V2, which share all other names.
# Without a name: the dense layers at the start, whose names would be those of the stack with {i} counted from 0, where
# the stack's would be counted from dense_depth; and the balance bias, which is DeepSeek-V3's
# mlp.gate.e_score_correction_bias over balance_bias.
KEYS: dict[str, tuple[str, str]] = {
    path: name for path, name in llama.KEYS.items() if "/mlp/" not in path
} | {
    "stack/0/mlp/router/weight": ("model.layers.{i}.mlp.gate.weight", "out,in"),
    "stack/0/mlp/gate/weight": ("model.layers.{i}.mlp.experts.gate_up_proj", "expert,out[0/2],in"),
    "stack/0/mlp/up/weight": ("model.layers.{i}.mlp.experts.gate_up_proj", "expert,out[1/2],in"),
    "stack/0/mlp/down/weight": ("model.layers.{i}.mlp.experts.down_proj", "expert,out,in"),
    "stack/0/mlp/shared/gate/weight": (
        "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
        "out,in",
    ),
    "stack/0/mlp/shared/up/weight": (
        "model.layers.{i}.mlp.shared_experts.up_proj.weight",
        "out,in",
    ),
    "stack/0/mlp/shared/down/weight": (
        "model.layers.{i}.mlp.shared_experts.down_proj.weight",
        "out,in",
    ),
}
