"""What a layer keeps for its backward pass, in closed form, by remat policy. Free of JAX."""

import dataclasses

from jaxlm.models import routed
from jaxlm.models.config import Backbone
from jaxlm.nn.config import NORMS, AttentionConfig, BlockConfig, MoeConfig
from jaxlm.ops.kernels import BLOCK, LANES, rows_at_a_time
from jaxlm.parallel import logical
from jaxlm.parallel.logical import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A device's share of a micro-batch, and the bytes of a number: of activations, of operands of products."""

    rows: int
    length: int  # tokens of a row that are this device's
    keys: int  # tokens of a row whose scores are formed at a time: all of them, or those of a block
    sizes: Sizes  # of each mesh axis
    stream_bytes: int
    compute_bytes: int
    source: int = 0  # tokens of a row that an encoder has read, for a decoder beside it
    is_dense: bool = False  # ragged products of experts are dense ones, as `routed.is_dense` says

    @property
    def tokens(self) -> int:
        """Tokens of the share."""
        return self.rows * self.length

    def own(self, size: int, axis: str) -> float:
        """The device's part of a dimension."""
        return size / logical.ways(self.sizes, axis)


def biases(config: Backbone, share: Share) -> float:
    """Bytes of what distances add to the scores of all layers, and of its gradient: the same for all rows."""
    attention = config.pattern[0].attention
    if attention.relative is None:
        return 0.0
    return 2 * 4 * share.own(attention.heads, "heads") * share.length**2


def kept(config: Backbone, block: BlockConfig, share: Share, policy: str) -> float:
    """Bytes that a layer keeps on the device from its forward to its backward pass.

    - none: the operand of every product, and what elementwise parts read again.
    - dots: the layer's input and the results of products with weights.
    - full: its input. save: also what is named; offload: that on the host instead.
    """
    across = 0.0 if block.cross is None else _across(config, block.cross, share, policy)
    return share.tokens * (_per_token(config, block, share, policy) + across)


def meeting(config: Backbone, share: Share) -> float:
    """Bytes in which the queries and keys of a layer meet, but for the scores that the reference keeps."""
    return max(_meeting(block, share) for block in config.layers)


def padded(config: Backbone, share: Share) -> float:
    """Return the bytes of padded operands while a layer of dropless experts goes back."""
    return max(_padded(config.width, block, share) for block in config.layers)


def _padded(width: int, block: BlockConfig, share: Share) -> float:
    mlp = block.mlp
    if not isinstance(mlp, MoeConfig) or mlp.capacity is not None or not share.is_dense:
        return 0.0
    hidden = share.own(mlp.hidden, "mlp")
    copies = routed.held(mlp, share.sizes) * routed.rows(mlp, share.length, share.sizes)
    numbers = routed.PADDED_STREAM * width + routed.PADDED_HIDDEN * hidden
    return share.tokens * copies * numbers * share.stream_bytes


def _meeting(block: BlockConfig, share: Share) -> float:
    heads, kernel = share.own(block.attention.heads, "heads"), block.attention.kernel
    if kernel == "reference":
        return 0.0
    if kernel == "splash":
        # The forward pass writes each log normalizer once for every lane.
        return 4 * LANES * share.tokens * heads
    if kernel == "cudnn":
        # The mask of segments, and its gradient, which JAX before 0.12 has computed for nothing.
        rows = rows_at_a_time(share.rows, share.length, share.compute_bytes)
        return 2 * share.compute_bytes * rows * share.length**2
    # Scores, weights and the gradients of both, going back.
    side = min(BLOCK, share.length)
    return 4 * 4 * share.rows * heads * side * side


def _per_token(config: Backbone, block: BlockConfig, share: Share, policy: str) -> float:
    stream = config.width * share.stream_bytes
    kind, _, listed = policy.partition(":")
    names = set(listed.split(","))
    if kind == "offload":
        return 0.0 if "layer_in" in names else stream
    if kind in ("full", "save"):
        # What the MLP adds is read again only where a norm comes after it.
        is_read = block.residual in ("post", "sandwich", "output")
        added = names & ({"attention_out", "mlp_out"} if is_read else {"attention_out"})
        return stream * (1 + len(added))
    attention = block.attention
    queries = share.own(attention.heads, "heads") * attention.head_dim
    shared = share.own(attention.kv_heads, "kv_heads")
    found = share.own(attention.heads, "heads") * attention.value_dim
    heads = (queries + shared * (attention.head_dim + attention.value_dim)) * share.stream_bytes
    latents = _latents(attention)
    if policy == "dots":
        made = latents * share.stream_bytes
        return 2 * stream + heads + made + _hidden(config, block, share, is_dots=True)
    # Activations that are not of the products' dtype are cast for each product, and each keeps its own.
    is_cast = share.stream_bytes != share.compute_bytes
    read = config.width * share.compute_bytes * (3 if is_cast else 1)
    out = found * share.stream_bytes + (found * share.compute_bytes if is_cast else 0)
    into = config.width * share.compute_bytes
    if is_cast and not isinstance(block.mlp, MoeConfig) and block.mlp.gated:
        into *= 2
    norms = len(NORMS[block.residual]) * stream
    total = norms + read + heads + out + into + _hidden(config, block, share, is_dots=False)
    if attention.qk_norm is not None:
        total += (queries + shared * attention.head_dim) * share.stream_bytes
    # Before their norms, and as products read them.
    total += latents * (share.stream_bytes + share.compute_bytes)
    own_heads = share.own(attention.heads, "heads")
    if attention.kernel == "reference":
        total += (
            own_heads * share.keys * (4 + (share.compute_bytes if share.compute_bytes != 4 else 0))
        )
    else:
        total += 4 * own_heads
    if attention.kernel == "splash":
        # Head by head, as the kernel made it, beside the layout in which it is multiplied.
        total += queries * share.compute_bytes
    return total


def _across(config: Backbone, cross: AttentionConfig, share: Share, policy: str) -> float:
    """Bytes a token of attention across: its norm, queries, scores and output; keys and values of all that was read."""
    if policy not in ("none", "dots"):
        return 0.0
    stream = config.width * share.stream_bytes
    queries = share.own(cross.heads, "heads") * cross.head_dim
    shared = share.own(cross.kv_heads, "kv_heads") * cross.head_dim
    read = share.source / share.length
    heads = (queries + 2 * shared * read) * share.stream_bytes
    if policy == "dots":
        return stream + heads
    is_cast = share.stream_bytes != share.compute_bytes
    into = config.width * share.compute_bytes * (1 + (2 * read if is_cast else 0))
    out = queries * share.stream_bytes + (queries * share.compute_bytes if is_cast else 0)
    scores = share.own(cross.heads, "heads") * share.source
    scores *= 4 + (share.compute_bytes if share.compute_bytes != 4 else 0)
    return stream + into + heads + out + scores


def _latents(attention: AttentionConfig) -> int:
    """Numbers of a token that its heads are made of."""
    latent = attention.latent
    return 0 if latent is None else latent.rank + (latent.query_rank or 0)


def _hidden(config: Backbone, block: BlockConfig, share: Share, *, is_dots: bool) -> float:
    """Bytes a token of the feed-forward part."""
    mlp = block.mlp
    if isinstance(mlp, MoeConfig):
        both = share.own(mlp.shared, "mlp")
        if is_dots:
            return 2 * both * share.stream_bytes
        rows = routed.rows(mlp, share.length, share.sizes)
        inner = rows * share.own(mlp.hidden, "mlp") + both
        # What experts read and give, and what each token then has of its own experts.
        outer = rows * (share.stream_bytes + share.compute_bytes) + mlp.top_k * share.stream_bytes
        wide = inner * (2 * share.stream_bytes + share.compute_bytes)
        return wide + config.width * outer + 8 * mlp.experts
    hidden = share.own(mlp.hidden, "mlp")
    results = hidden * share.stream_bytes * (2 if mlp.gated else 1)
    return results if is_dots else results + hidden * share.compute_bytes
