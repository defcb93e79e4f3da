"""What a model costs, in closed form: parameters, FLOPs, bytes. Free of JAX."""

import functools

from jaxlm.models.config import Decoder, Encoder, EncoderDecoder, ModelConfig
from jaxlm.models.cost.tensors import block_tensors, tensors
from jaxlm.nn.config import AttentionConfig, BlockConfig, MoeConfig

# Each layer is walked through: a search of plans asks the same of one model a thousand times.
_once = functools.lru_cache(maxsize=64)


@_once
def parameters(config: ModelConfig) -> int:
    """Every number that the model holds."""
    return sum(tensor.size for tensor in tensors(config))


@_once
def active_parameters(config: ModelConfig) -> int:
    """Those that one token meets: all but the experts that it is not sent to."""
    return parameters(config) - sum(
        _matrices(block, config.width) - _matrices(block, config.width, is_active=True)
        for block in (*config.layers, *config.heads)
    )


@_once
def multiplying_parameters(config: ModelConfig) -> int:
    """Those that a token is multiplied with: matrices (of its own experts), the unembedding once for each token that is predicted; no look-up table, norm or bias."""
    heads = len(config.heads)
    joined = 0
    if isinstance(config, Decoder) and config.ahead and config.ahead.kind == "sequential":
        joined = 2 * config.width**2
    dense = config.width**2 if isinstance(config, Encoder) else 0
    return (
        sum(
            _matrices(block, config.width, is_active=True)
            for block in (*config.layers, *config.heads)
        )
        + dense
        + (1 + heads) * config.vocab * config.width
        + heads * joined
    )


@_once
def projecting_parameters(config: ModelConfig) -> int:
    """Those in the projections of attention and of dense MLPs, which training may round to eight bits."""
    return sum(
        tensor.size
        for block in (*config.layers, *config.heads)
        for tensor in block_tensors(block, config.width)
        if tensor.is_matrix and not {"experts", "routes"} & set(tensor.axes)
    )


def flops_per_token(config: ModelConfig, sequence: int, *, causal: bool, targets: int = 0) -> float:
    """Model FLOPs of training on one token of a row of `sequence`: forward, and twice that backward.

    6 x (parameters that multiply) + 6 N (H + U) S for each layer of N heads, with keys of size H and values of size U
    (made of a latent, they are others), and with S the keys that a token meets: the mean over a causal row, (T + 1) / 2, or, with `causal=False`, all T (the full map, which PaLM's MFU counts).
    A token of an encoder meets all T in either case. A window cuts S. Work that is done twice, as under remat, does not
    count.

    An encoder-decoder reads rows of `sequence` and writes rows of `targets`: all of it is counted for each token that is
    read. Its decoder's matrices meet the tokens that are written, but for those of cross attention's keys and values.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    if isinstance(config, EncoderDecoder):
        return _flops_of_two(config, sequence, targets, causal)
    attention = sum(
        _met(block.attention)
        * (
            _keys_around(block.attention.window, sequence)
            if isinstance(config, Encoder)
            else _keys(block.attention.window, sequence, causal)
        )
        for block in (*config.layers, *config.heads)
    )
    return 6 * multiplying_parameters(config) + attention


def routed_parameters(block: BlockConfig, width: int) -> int:
    """Return the numbers in the matrices of a block's experts that one token meets."""
    if not isinstance(block.mlp, MoeConfig):
        return 0
    experts = sum(each.size for each in block_tensors(block, width) if "experts" in each.axes)
    return experts * block.mlp.top_k // block.mlp.experts


def cache_bytes(config: ModelConfig, slots: int, *, element_bytes: int) -> int:
    """Keys and values, or the latents of both, of one sequence of up to `slots` tokens, of which a window keeps its last."""
    numbers = 0
    for block in config.layers:
        heads, key, value = block.attention.cached
        numbers += min(block.attention.window or slots, slots) * heads * (key + value)
    return numbers * element_bytes


def met_parameters(config: ModelConfig, sequence: int, targets: int = 0) -> float:
    """As `multiplying_parameters`; of an encoder-decoder for each token that is read, those written counted with it."""
    if not isinstance(config, EncoderDecoder):
        return multiplying_parameters(config)
    width, share = config.width, targets / sequence
    read, written = 0.0, float(config.vocab * width)
    for block in config.encoder.layers:
        read += _matrices(block, width, is_active=True)
    for block in config.decoder.layers:
        assert block.cross is not None
        known = 2 * width * block.cross.kv_heads * block.cross.head_dim
        read += known
        written += _matrices(block, width, is_active=True) - known
    return read + share * written


def _flops_of_two(config: EncoderDecoder, sequence: int, targets: int, causal: bool) -> float:
    """For each token that is read."""
    share, attention = targets / sequence, 0.0
    for block in config.encoder.layers:
        attention += _met(block.attention) * sequence
    for block in config.decoder.layers:
        assert block.cross is not None
        own, across = _met(block.attention), _met(block.cross)
        attention += share * (own * _keys(None, targets, causal) + across * sequence)
    return 6 * met_parameters(config, sequence, targets) + attention


def _met(attention: AttentionConfig) -> int:
    """FLOPs of training for each pair of a query and a key: a score, and a share of the value, of every head."""
    return 6 * attention.heads * (attention.head_dim + attention.value_dim)


def _matrices(block: BlockConfig, width: int, *, is_active: bool = False) -> int:
    """Numbers in the matrices of a block; of its experts those that one token meets, where `is_active`."""
    total = 0
    for tensor in block_tensors(block, width):
        if tensor.is_matrix:
            size = tensor.size
            if is_active and isinstance(block.mlp, MoeConfig) and "experts" in tensor.axes:
                size = size * block.mlp.top_k // block.mlp.experts
            total += size
    return total


def _keys(window: int | None, sequence: int, causal: bool) -> float:
    """The keys that a token of a row meets, on average."""
    if not causal:
        return min(window or sequence, sequence)
    if window is None or window >= sequence:
        return (sequence + 1) / 2
    return (window * (window + 1) / 2 + (sequence - window) * window) / sequence


def _keys_around(window: int | None, sequence: int) -> float:
    """The keys that a token of a row meets on either side, itself included, on average."""
    if window is None or window >= sequence:
        return sequence
    return 2 * window - 1 - window * (window - 1) / sequence
