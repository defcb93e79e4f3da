"""What a block is made of: frozen, hashable, and free of JAX."""

import dataclasses
from typing import Literal

from jaxlm.nn.rotary import Rope
from jaxlm.ops.kernels import Kernel

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"]
Init = Literal["gpt2", "normal", "xavier", "he"]
# Where the norms of a layer sit.
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
REMAT_NAMES = ("layer_in", "attention_out", "mlp_out")  # what a remat policy "save:..." can name


def is_remat(policy: str) -> bool:
    """Whether there is such a policy of what the backward pass computes again; `nn.remat` says what each does."""
    kind, _, names = policy.partition(":")
    return policy in ("none", "dots", "full") or (
        kind in ("save", "offload") and set(names.split(",")) <= set(REMAT_NAMES)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Root-mean-square norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450), in float32."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    bias: bool = False  # of the layer norm
    offset: float = 0.0  # what is added to the stored scale, which starts at 1 - offset; 1 in Gemma


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """What is added to scores by the distance of key and query, in `buckets` of distances; `nn.relative` says how."""

    buckets: int
    farthest: int  # distance from which on all share the last bucket
    both_ways: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """What heads are made of in multi-head latent attention; `nn.latent` says how (arXiv:2405.04434, section 2.1)."""

    rank: int  # of the latent that keys and values of all heads are made of
    query_rank: int | None  # of the one that queries are made of; None makes them of the stream
    rotary_dim: int  # features of a head that are rotated, with one key for all heads
    value_dim: int  # size of a head's value
    norm: NormConfig  # of both latents


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head attention; `kv_heads` below `heads` is grouped-query attention (arXiv:2305.13245)."""

    heads: int
    kv_heads: int
    head_dim: int  # size of a head's query and key, and of its value but with a latent
    latent: LatentConfig | None = None  # None makes keys and values of the stream
    rotary: Rope | None = None
    relative: RelativeBias | None = None  # whose table all layers of a stack share
    window: int | None = None  # keys that a query sees, itself included; None sees all before it
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "heads"] = (
        "head"  # each head by itself, or all of a token together
    )
    scale: float | None = None  # None is head_dim ** -0.5
    cap: float | None = None  # scores become cap * tanh(scores / cap)
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    dropout: float = 0.0  # of the attention weights
    kernel: Kernel = "reference"  # what computes it; the same function

    def __post_init__(self) -> None:
        """Raises ValueError where heads that are made of a latent share keys, or have what their projections lack."""
        if self.latent is None:
            return
        if self.kv_heads != self.heads:
            raise ValueError(f"kv_heads = {self.kv_heads} of heads = {self.heads} with a latent")
        if self.bias or self.out_bias or self.qk_norm or self.relative:
            raise ValueError("biases, or norms of heads, in attention with a latent")

    @property
    def value_dim(self) -> int:
        """Size of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def cached(self) -> tuple[int, int, int]:
        """What a cache keeps of a token: heads, and the sizes of a key and of a value. Of a latent, itself as the value."""
        if self.latent is None:
            return self.kv_heads, self.head_dim, self.head_dim
        return 1, self.latent.rotary_dim, self.latent.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """Two projections around an activation; gated ones multiply by a third (arXiv:2002.05202)."""

    hidden: int
    activation: Activation
    gated: bool
    bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A router and its experts, each a gated MLP; `top_k` of them see a token, and the shared ones see all tokens."""

    experts: int
    top_k: int
    hidden: int  # of each expert
    shared: int = 0  # hidden units of the shared experts, all together
    activation: Activation = "silu"
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # the shares of a token's experts sum to `scale`
    scale: float = 1.0
    balance: float = 0.0  # of the balance loss, a mean over all tokens but padding
    router_z: float = 0.0  # of the squared log normalizer of the router, likewise a mean
    groups: int = 1  # into which the experts are parted, as many in each
    top_groups: int = 1  # of them, in which all experts of a token are; the best by `ops.routing`
    bias_rate: float | None = (
        None  # by how much a bias moves that takes part in the choice; None has none
    )
    capacity: float | None = None  # places in each row, over top_k T / experts; None drops no token

    def __post_init__(self) -> None:
        """Raises ValueError where a token is to see more experts than there are, or groups are of different sizes."""
        if self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups = {self.top_groups} of groups = {self.groups}")
        if not 1 <= self.top_k <= self.experts // self.groups * self.top_groups:
            raise ValueError(f"top_k = {self.top_k} of experts = {self.experts}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One layer; `nn.block` says what each `residual` wires. With `cross` it attends to what an encoder has read, too."""

    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    norm: NormConfig
    cross: AttentionConfig | None = None
    residual: Residual = "pre"
    dropout: float = 0.0  # of what each part adds to the residual stream

    def __post_init__(self) -> None:
        """Raises ValueError where a layer that attends to an encoder is wired in another way than `pre`."""
        if self.cross is not None and self.residual != "pre":
            raise ValueError(f"cross attention in a layer that is wired as {self.residual}")


def norms_of(block: BlockConfig) -> tuple[str, ...]:
    """The norms of a layer."""
    return NORMS[block.residual] + (() if block.cross is None else ("cross_norm",))
