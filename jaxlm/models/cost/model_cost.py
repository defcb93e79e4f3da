"""Parameters, FLOPs and cache bytes of a model in closed form. Free of JAX.

Example:
  >>> from jaxlm.models.families.union import SIZES
  >>> f"{parameters(SIZES['llama3-8b'].build()):,}"
  '8,030,261,248'
"""

import functools
import math
from collections.abc import Mapping

from jaxlm.models.config import DecoderConfig, EncoderConfig, EncoderDecoderConfig, ModelConfig
from jaxlm.models.cost.tensors import block_tensors, tensors
from jaxlm.nn.config import AttentionConfig, BlockConfig, MoeConfig
from jaxlm.parallel import logical

# Padded operands alive at once in the backward pass of a layer, as XLA for CPU schedules it
# (scripts/LOG.md): of the stream's width, and of the experts' hidden units.
PADDED_STREAM, PADDED_HIDDEN = 2, 5

# Each call visits all layers, and a search of plans repeats it a thousand times for one model.
_once = functools.lru_cache(maxsize=64)


@_once
def parameters(config: ModelConfig) -> int:
    """Return the number of parameters."""
    return sum(tensor.size for tensor in tensors(config))


@_once
def active_parameters(config: ModelConfig) -> int:
    """Return the number of active parameters: all but experts that a token is not routed to."""
    return parameters(config) - sum(
        _matrices(block, config.width) - _matrices(block, config.width, is_active=True)
        for block in (*config.layers, *config.heads)
    )


@_once
def matmul_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that a token is multiplied with.

    These are the matrices of layers, of routed experts the token's top_k, and the unembedding once
    for each predicted token; no lookup table, norm or bias.
    """
    heads, width = len(config.heads), config.width
    blocks = (*config.layers, *config.heads)
    total = sum(_matrices(block, width, is_active=True) for block in blocks)
    if isinstance(config, EncoderConfig):
        total += width**2  # the dense layer of the head
    if isinstance(config, DecoderConfig) and config.mtp and config.mtp.kind == "sequential":
        total += heads * 2 * width**2
    return total + (1 + heads) * config.vocab * width


@_once
def projection_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of projections that training may quantize to 8 bits."""
    return sum(
        tensor.size
        for block in (*config.layers, *config.heads)
        for tensor in block_tensors(block, config.width)
        if tensor.is_matrix and not {"experts", "routes"} & set(tensor.axes)
    )


def flops_per_token(
    config: ModelConfig,
    sequence: int,
    *,
    causal: bool,
    targets: int = 0,
    has_logits: bool = True,
) -> float:
    """Return the model FLOPs of training per token of a row of `sequence` tokens.

    6 x (parameters that multiply) + 6 N (H + U) S for each layer of N heads with keys of size H and
    values of size U (with a latent, U differs from H). S is the number of keys per token, less in a
    window. Backward counts twice forward; recomputation does not count. All weights are trained;
    `tune.cost.more_flops` has the difference of an adapter.

    An encoder-decoder reads rows of `sequence` and writes rows of `targets`; all FLOPs are per
    token of the source. The decoder's matrices multiply the targets, except those of cross
    attention's keys and values.

    Args:
      config: the model.
      sequence: tokens T of a row.
      causal: S is the mean over a causal row, (T + 1) / 2, and not all T as in PaLM's MFU. In an
        encoder it is T.
      targets: tokens of a row of a decoder that has an encoder.
      has_logits: false for a model that scores texts, which does not unembed.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    if isinstance(config, EncoderDecoderConfig):
        return _encoder_decoder_flops(config, sequence, targets, causal)
    attention: float = 0
    for block in (*config.layers, *config.heads):
        window, is_encoder = block.attention.window, isinstance(config, EncoderConfig)
        keys = _keys_around(window, sequence) if is_encoder else _keys(window, sequence, causal)
        attention += _score_flops(block.attention) * keys
    multiplied = matmul_parameters_per_token(config, sequence, has_logits=has_logits)
    return 6 * multiplied + attention


def routed_parameters(block: BlockConfig, width: int) -> int:
    """Return the number of parameters of the routed experts that a token is sent to."""
    if not isinstance(block.mlp, MoeConfig):
        return 0
    experts = sum(each.size for each in block_tensors(block, width) if "experts" in each.axes)
    return experts * block.mlp.top_k // block.mlp.experts


def cache_bytes(
    config: ModelConfig, slots: int, *, element_bytes: int, scale_bytes: int = 0, spare: int = 0
) -> int:
    """Return the bytes of the KV cache of one sequence of up to `slots` tokens.

    Args:
      config: the model.
      slots: tokens of a layer without a window.
      element_bytes: of a number.
      scale_bytes: of the scale of a head's key, and of its value; 0 without scales.
      spare: slots of a window beyond its keys.
    """
    size = 0
    for block in config.layers:
        heads, key, value = block.attention.cached
        window = block.attention.window
        count = slots if window is None else min(window + spare, slots)
        size += count * heads * ((key + value) * element_bytes + 2 * scale_bytes)
    return size


def matmul_parameters_per_token(
    config: ModelConfig, sequence: int, targets: int = 0, *, has_logits: bool = True
) -> float:
    """Return `matmul_parameters`; of an encoder-decoder per token of the source.

    The arguments are those of `flops_per_token`.
    """
    if not isinstance(config, EncoderDecoderConfig):
        return matmul_parameters(config) - (0 if has_logits else config.vocab * config.width)
    width, share = config.width, targets / sequence
    target = float(config.vocab * width)
    source = float(sum(_matrices(block, width, is_active=True) for block in config.encoder.layers))
    for block in config.decoder.layers:
        assert block.cross is not None
        cross_kv = 2 * width * block.cross.kv_heads * block.cross.head_dim
        source += cross_kv
        target += _matrices(block, width, is_active=True) - cross_kv
    return source + share * target


def is_dense_ragged(platform: str) -> bool:
    """Return whether a ragged product is computed as a dense one on `cpu`, `gpu` or `tpu`.

    On TPUs XLA multiplies each group of rows with its own weight, and on CPUs a loop over tiles of
    rows does (`ops.matmul`). On NVIDIA GPUs XLA copies the rows [M, I] for each of E weights, with
    zeros for other groups' rows, and multiplies [M, E I] with [E I, O].
    """
    return platform == "gpu"


def expert_rows(mlp: MoeConfig, length: int, sizes: Mapping[str, int]) -> float:
    """Return the rows that a device's experts compute for each of its tokens.

    `top_k` of them are real. The others are empty slots or, without a capacity on an expert axis,
    room for every token of the axis to choose experts of one device (`parallel.expert`). The device
    has `length` tokens of a row; `sizes` are those of the mesh axes.
    """
    if mlp.capacity is None:
        ways = logical.ways(sizes, "experts")
        return ways * min(mlp.top_k, mlp.experts // ways)
    whole = length * logical.ways(sizes, "length")
    places = math.ceil(mlp.capacity * whole * mlp.top_k / mlp.experts)
    return mlp.experts * min(places, length) / length


def expert_flops_ratio(
    mlp: MoeConfig, length: int, sizes: Mapping[str, int], *, is_dense: bool
) -> float:
    """Return the FLOPs of routed experts over those of each token's top_k experts.

    With a capacity this is the capacity. Without one it is 1 for a ragged product, and
    X min(k, H) H / k for a dense one, with H of the experts on each of X devices.
    """
    computed = expert_rows(mlp, length, sizes)
    if mlp.capacity is not None:
        return computed / mlp.top_k
    return computed * experts_per_device(mlp, sizes) / mlp.top_k if is_dense else 1.0


def experts_per_device(mlp: MoeConfig, sizes: Mapping[str, int]) -> int:
    """Return the number of a layer's experts whose weights a device holds."""
    return mlp.experts // logical.ways(sizes, "experts")


def _encoder_decoder_flops(
    config: EncoderDecoderConfig, sequence: int, targets: int, causal: bool
) -> float:
    """Return the FLOPs per token of the source."""
    share, attention = targets / sequence, 0.0
    for block in config.encoder.layers:
        attention += _score_flops(block.attention) * sequence
    for block in config.decoder.layers:
        assert block.cross is not None
        causal_flops = _score_flops(block.attention) * _keys(None, targets, causal)
        attention += share * (causal_flops + _score_flops(block.cross) * sequence)
    return 6 * matmul_parameters_per_token(config, sequence, targets) + attention


def _score_flops(attention: AttentionConfig) -> int:
    """Return the training FLOPs per query and key: scores and weighted values of all heads."""
    return 6 * attention.heads * (attention.head_dim + attention.value_dim)


def _matrices(block: BlockConfig, width: int, *, is_active: bool = False) -> int:
    """Return the parameters in the matrices of a layer; if `is_active`, of top_k experts only."""
    total, mlp = 0, block.mlp
    for tensor in block_tensors(block, width):
        if is_active and isinstance(mlp, MoeConfig) and "experts" in tensor.axes:
            total += tensor.size * mlp.top_k // mlp.experts
        elif tensor.is_matrix:
            total += tensor.size
    return total


def _keys(window: int | None, sequence: int, causal: bool) -> float:
    """Return the mean number of keys that a token of a row sees."""
    if not causal:
        return min(window or sequence, sequence)
    if window is None or window >= sequence:
        return (sequence + 1) / 2
    return (window * (window + 1) / 2 + (sequence - window) * window) / sequence


def _keys_around(window: int | None, sequence: int) -> float:
    """Return the mean number of keys that a token sees on both sides, itself included."""
    if window is None or window >= sequence:
        return sequence
    return 2 * window - 1 - window * (window - 1) / sequence
