"""Frozen, hashable descriptions of a layer. Free of JAX.

Example:
  >>> AttentionConfig(heads=8, kv_heads=2, head_dim=64).cached  # heads, key size, value size
  (2, 64, 64)
"""

import dataclasses
from typing import Literal

from jaxlm.nn.rotary import Rope
from jaxlm.ops.kernels import Kernel

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"]
Init = Literal["gpt2", "normal", "xavier", "he"]
# Placements of the norms around attention and MLP; `nn.block.Block` gives the formulas.
Residual = Literal["pre", "pre_mlp", "post", "sandwich", "output", "parallel", "parallel_norms"]
NORMS: dict[Residual, tuple[str, ...]] = {
    "pre": ("attention_norm", "mlp_norm"),
    "pre_mlp": ("mlp_norm",),
    "post": ("attention_norm", "mlp_norm"),
    "sandwich": ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"),
    "output": ("attention_out_norm", "mlp_out_norm"),
    "parallel": ("attention_norm",),
    "parallel_norms": ("attention_norm", "mlp_norm"),
}
REMAT_NAMES = ("layer_in", "attention_out", "mlp_out")  # arrays that "save:..." can name


def is_remat(policy: str) -> bool:
    """Return whether the text names a rematerialization policy; `nn.remat` explains each."""
    kind, _, names = policy.partition(":")
    return policy in ("none", "dots", "full") or (
        kind in ("save", "offload") and set(names.split(",")) <= set(REMAT_NAMES)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Root-mean-square norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450), in float32."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    bias: bool = False  # layer norm only
    offset: float = 0.0  # added to the stored scale, which starts at 1 - offset; 1 in Gemma


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """Bias of attention scores by the distance of key and query, see `RelativePositions`."""

    buckets: int
    max_distance: int  # all distances from this one on share the last bucket
    both_ways: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention (MLA; arXiv:2405.04434, section 2.1)."""

    rank: int  # size of the latent that keys and values of all heads are projected from
    query_rank: int | None  # size of the query latent; None projects queries from the stream
    rotary_dim: int  # rotated features of a head, with one key for all heads
    value_dim: int  # size of a head's value
    norm: NormConfig  # of both latents


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head attention; `kv_heads` below `heads` is grouped-query attention (2305.13245)."""

    heads: int
    kv_heads: int
    head_dim: int  # size of a head's query and key; without a latent also of its value
    latent: LatentConfig | None = None  # None projects keys and values from the stream
    rotary: Rope | None = None
    relative: RelativeBias | None = None  # all layers of a stack share one table
    window: int | None = None  # keys visible to a query, its own included; None sees all
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "heads"] = "head"  # each head alone, or all heads of a token
    scale: float | None = None  # head_dim ** -0.5 if None
    softcap: float | None = None  # softcap: scores become softcap * tanh(scores / softcap)
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    dropout: float = 0.0  # of the attention weights
    kernel: Kernel = "reference"  # every kernel computes the same function

    def __post_init__(self) -> None:
        """Raise ValueError if latent attention is grouped or has biases or query-key norms."""
        if self.latent is None:
            return
        if self.kv_heads != self.heads:
            raise ValueError(f"latent attention: kv_heads = {self.kv_heads}, heads = {self.heads}")
        if self.bias or self.out_bias or self.qk_norm or self.relative:
            raise ValueError("latent attention has no biases and no query-key norms")

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def value_dim(self) -> int:
        """Size of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def cached(self) -> tuple[int, int, int]:
        """Heads, key size and value size of a KV cache entry; the value of MLA is the latent."""
        if self.latent is None:
            return self.kv_heads, self.head_dim, self.head_dim
        return 1, self.latent.rotary_dim, self.latent.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """Two projections around an activation; a gated MLP has a third (arXiv:2002.05202)."""

    hidden: int  # hidden size
    activation: Activation
    gated: bool
    bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A router and gated MLPs as experts: `top_k` for each token, and shared ones for all tokens.

    A group is a run of consecutive experts. All experts of a token are in its `top_groups` best
    groups, ranked as in `ops.routing`.
    """

    experts: int
    top_k: int
    hidden: int  # hidden size of each expert
    shared: int = 0  # hidden size of all shared experts together
    activation: Activation = "silu"
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # the weights of a token's experts sum to `scale`
    scale: float = 1.0
    balance: float = 0.0  # weight of the balance loss, a mean over all tokens but padding
    router_z: float = 0.0  # weight of the mean squared log normalizer of the router
    groups: int = 1
    top_groups: int = 1
    bias_rate: float | None = None  # step of the bias that balances the choice; None has no bias
    capacity: float | None = None  # places in a row over top_k T / experts; None drops no token

    def __post_init__(self) -> None:
        """Raise ValueError if groups differ in size or `top_k` exceeds the experts to choose."""
        if self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups = {self.top_groups} of groups = {self.groups}")
        if not 1 <= self.top_k <= self.experts // self.groups * self.top_groups:
            raise ValueError(f"top_k = {self.top_k} of experts = {self.experts}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One layer, wired by `residual` as `nn.block` shows; `cross` adds cross-attention."""

    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    norm: NormConfig
    cross: AttentionConfig | None = None
    residual: Residual = "pre"
    dropout: float = 0.0  # of the output of each part, before it is added to the stream

    def __post_init__(self) -> None:
        """Raise ValueError if a layer with cross-attention is not wired as `pre`."""
        if self.cross is not None and self.residual != "pre":
            raise ValueError(f"cross-attention in a layer wired as {self.residual}")


def norms_of(block: BlockConfig) -> tuple[str, ...]:
    """Return the names of a layer's norms."""
    return NORMS[block.residual] + (() if block.cross is None else ("cross_norm",))
