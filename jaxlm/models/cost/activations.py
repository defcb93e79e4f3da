"""Activation memory of layers in closed form, by remat policy. Free of JAX."""

import dataclasses

from jaxlm.models.config import BackboneConfig
from jaxlm.models.cost import model_cost
from jaxlm.nn.config import NORMS, AttentionConfig, BlockConfig, MoeConfig
from jaxlm.ops.kernels import BLOCK, LANES, rows_at_a_time
from jaxlm.parallel import logical
from jaxlm.parallel.logical import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """A device's share of a micro-batch, and bytes of an activation and of a product's operand."""

    rows: int
    length: int  # tokens of a row that are this device's
    keys: int  # tokens of a row whose scores are computed at a time: all, or those of a block
    sizes: Sizes  # of each mesh axis
    stream_bytes: int
    compute_bytes: int
    source: int = 0  # tokens of a row of the encoder, for a decoder with cross attention
    platform: str = "cpu"  # cpu, gpu or tpu
    has_segments: bool = True  # tokens see only their document
    # Layers, such as mlp/down, whose input a gradient reads; None for all.
    read: frozenset[str] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the share."""
        return self.rows * self.length

    @property
    def logit_bytes(self) -> int:
        """Bytes of a logit's gradient: a GPU casts it before it stores it."""
        return self.stream_bytes if self.platform == "gpu" else 4

    def reads(self, *layers: str) -> bool:
        """Return whether the gradient of one of these layers reads its input."""
        return self.read is None or not self.read.isdisjoint(layers)

    @property
    def score_bytes(self) -> int:
        """Bytes of an attention score, in float32 and in the dtype of products."""
        return 4 + (self.compute_bytes if self.compute_bytes != 4 else 0)

    def local_size(self, size: int, axis: str) -> float:
        """Return the device's part of a dimension."""
        return size / logical.ways(self.sizes, axis)


def relative_bias(config: BackboneConfig, share: DeviceShare) -> float:
    """Return the bytes of the relative bias of all layers and rows, and of its gradient."""
    attention = config.pattern[0].attention
    if attention.relative is None:
        return 0.0
    return 2 * 4 * share.local_size(attention.heads, "heads") * share.length**2


def saved_bytes(
    config: BackboneConfig, block: BlockConfig, share: DeviceShare, policy: str
) -> float:
    """Return the bytes that a layer stores on the device for its backward pass.

    - none: the operands of all products, and the inputs of elementwise parts.
    - dots: the layer's input and the results of products with weights.
    - full: its input. save: also what is named; offload: stores that on the host instead.
    """
    cross = 0.0 if block.cross is None else _cross_per_token(config, block.cross, share, policy)
    return share.tokens * (_per_token(config, block, share, policy) + cross)


def mlp_bytes(
    config: BackboneConfig, block: BlockConfig, share: DeviceShare
) -> tuple[float, float]:
    """Return the bytes that an unadapted MLP and its norm store under `none`, and of gradients."""
    stream = config.width * share.stream_bytes
    whole = dataclasses.replace(share, read=None)  # a gradient goes through every result
    stored, gradients = (_hidden(config, block, each, is_dots=False) for each in (share, whole))
    return share.tokens * (stream + stored), share.tokens * (stream + gradients)


def attention_workspace(config: BackboneConfig, share: DeviceShare) -> float:
    """Return the largest attention workspace of a layer, without scores of the reference."""
    return max(_attention_workspace(block, share) for block in config.layers)


def padded_operands(config: BackboneConfig, share: DeviceShare) -> float:
    """Return the bytes of padded operands in the backward pass of a layer of dropless experts."""
    return max(_padded(config.width, block, share) for block in config.layers)


def _padded(width: int, block: BlockConfig, share: DeviceShare) -> float:
    mlp = block.mlp
    is_dense = model_cost.is_dense_ragged(share.platform)
    if not isinstance(mlp, MoeConfig) or mlp.capacity is not None or not is_dense:
        return 0.0
    hidden = share.local_size(mlp.hidden, "mlp")
    copies = model_cost.experts_per_device(mlp, share.sizes) * model_cost.expert_rows(
        mlp, share.length, share.sizes
    )
    numbers = model_cost.PADDED_STREAM * width + model_cost.PADDED_HIDDEN * hidden
    return share.tokens * copies * numbers * share.stream_bytes


def _attention_workspace(block: BlockConfig, share: DeviceShare) -> float:
    heads, kernel = share.local_size(block.attention.heads, "heads"), block.attention.kernel
    if kernel == "reference":
        return 0.0
    if kernel == "splash":
        # The forward pass writes each log normalizer for every lane.
        return 4 * LANES * share.tokens * heads
    if kernel == "cudnn" and not share.has_segments:
        return 0.0
    if kernel == "cudnn":
        # The mask of segments, and its gradient, which JAX before 0.12 computes needlessly.
        rows = rows_at_a_time(share.rows, share.length, share.compute_bytes)
        return 2 * share.compute_bytes * rows * share.length**2
    # Scores, weights and the gradients of both in the backward pass.
    side = min(BLOCK, share.length)
    return 4 * 4 * share.rows * heads * side * side


def _per_token(
    config: BackboneConfig, block: BlockConfig, share: DeviceShare, policy: str
) -> float:
    stream = config.width * share.stream_bytes
    kind, _, listed = policy.partition(":")
    names = set(listed.split(","))
    if kind == "offload":
        return 0.0 if "layer_in" in names else stream
    if kind in ("full", "save"):
        # The MLP's output is read in the backward pass only if a norm comes after it.
        is_read = block.residual in ("post", "sandwich", "output")
        saved = names & ({"attention_out", "mlp_out"} if is_read else {"attention_out"})
        return stream * (1 + len(saved))
    attention = block.attention
    query_heads = share.local_size(attention.heads, "heads")
    queries = query_heads * attention.head_dim
    shared = share.local_size(attention.kv_heads, "kv_heads")
    values = query_heads * attention.value_dim
    heads = (queries + shared * (attention.head_dim + attention.value_dim)) * share.stream_bytes
    latents = _latents(attention)
    if policy == "dots":
        hidden = _hidden(config, block, share, is_dots=True)
        return 2 * stream + heads + latents * share.stream_bytes + hidden
    # If activations have another dtype than products, each product stores a cast copy of its own.
    is_cast = share.stream_bytes != share.compute_bytes
    read = config.width * share.compute_bytes * (3 if is_cast else 1)
    out = values * share.stream_bytes + (values * share.compute_bytes if is_cast else 0)
    if is_cast and attention.kernel == "reference":  # its products keep cast copies alone
        heads *= share.compute_bytes / share.stream_bytes
        out = values * share.compute_bytes
    into = config.width * share.compute_bytes
    if is_cast and not isinstance(block.mlp, MoeConfig) and block.mlp.gated:
        into *= 2
    if not share.reads("attention/query", "attention/key", "attention/value"):
        read = 0
    if not share.reads("attention/out") and attention.kernel == "reference":
        out = 0.0
    if not share.reads("mlp/gate", "mlp/up"):
        into = 0
    norms = len(NORMS[block.residual]) * stream
    total = norms + read + heads + out + into + _hidden(config, block, share, is_dots=False)
    if attention.qk_norm is not None:
        total += (queries + shared * attention.head_dim) * share.stream_bytes
    # Before their norms, and as operands of products.
    total += latents * (share.stream_bytes + share.compute_bytes)
    if attention.kernel == "reference":
        total += query_heads * share.keys * share.score_bytes
    else:
        total += 4 * query_heads
    if attention.kernel == "splash":
        # The kernel's output by head, in addition to the layout of the product that follows.
        total += queries * share.compute_bytes
    return total


def _cross_per_token(
    config: BackboneConfig, cross: AttentionConfig, share: DeviceShare, policy: str
) -> float:
    """Return the bytes of cross attention per token of the decoder, with the source's share."""
    if policy not in ("none", "dots"):
        return 0.0
    stream = config.width * share.stream_bytes
    queries = share.local_size(cross.heads, "heads") * cross.head_dim
    shared = share.local_size(cross.kv_heads, "kv_heads") * cross.head_dim
    read = share.source / share.length
    heads = (queries + 2 * shared * read) * share.stream_bytes
    if policy == "dots":
        return stream + heads
    is_cast = share.stream_bytes != share.compute_bytes
    into = config.width * share.compute_bytes * (1 + (2 * read if is_cast else 0))
    out = queries * share.stream_bytes + (queries * share.compute_bytes if is_cast else 0)
    scores = share.local_size(cross.heads, "heads") * share.source * share.score_bytes
    return stream + into + heads + out + scores


def _latents(attention: AttentionConfig) -> int:
    """Return the size of a token's latents."""
    latent = attention.latent
    return 0 if latent is None else latent.rank + (latent.query_rank or 0)


def _hidden(
    config: BackboneConfig, block: BlockConfig, share: DeviceShare, *, is_dots: bool
) -> float:
    """Return the bytes of the MLP or the experts per token."""
    mlp = block.mlp
    if isinstance(mlp, MoeConfig):
        both = share.local_size(mlp.shared, "mlp")
        if is_dots:
            return 2 * both * share.stream_bytes
        rows = model_cost.expert_rows(mlp, share.length, share.sizes)
        inner = rows * share.local_size(mlp.hidden, "mlp") + both
        # Inputs and outputs of experts, and the outputs gathered for each token.
        outer = rows * (share.stream_bytes + share.compute_bytes) + mlp.top_k * share.stream_bytes
        wide = inner * (2 * share.stream_bytes + share.compute_bytes)
        return wide + config.width * outer + 8 * mlp.experts
    hidden = share.local_size(mlp.hidden, "mlp")
    results = hidden * share.stream_bytes * (2 if mlp.gated else 1)
    if is_dots or not share.reads("mlp/down"):
        return results
    return results + hidden * share.compute_bytes
