"""What a decoder costs, in closed form: parameters, FLOPs, bytes. Free of JAX."""

import dataclasses
from collections.abc import Iterator

from jaxlm.models.config import Decoder
from jaxlm.nn.config import AttentionConfig, BlockConfig, MoeConfig, NormConfig


def parameters(config: Decoder) -> int:
    """Every number that the model holds."""
    tables = config.vocab * config.width + (config.positions or 0) * config.width
    head = 0 if config.tied else config.vocab * config.width
    blocks = sum(_block(block, config.width) for block in config.layers)
    return tables + blocks + _norm(config.final_norm, config.width) + head


def active_parameters(config: Decoder) -> int:
    """Those that one token meets: all but the experts that it is not sent to."""
    return parameters(config) - sum(
        _matrices(block, config.width) - _matrices(block, config.width, is_active=True)
        for block in config.layers
    )


def multiplying_parameters(config: Decoder) -> int:
    """Those that a token is multiplied with: matrices (of its own experts) and the unembedding, no look-up table, norm or bias."""
    return (
        sum(_matrices(block, config.width, is_active=True) for block in config.layers)
        + config.vocab * config.width
    )


def flops_per_token(config: Decoder, sequence: int, *, causal: bool) -> float:
    """Model FLOPs of training on one token of a row of `sequence`: forward, and twice that backward.

    6 x (parameters that multiply) + 12 H N S for each layer of N heads of size H, with S the keys that a token meets:
    the mean over a causal row, (T + 1) / 2, or, with `causal=False`, all T (the full map, which PaLM's MFU counts).
    A window cuts S. Work that is done twice, as under remat, does not count.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    attention = sum(
        12
        * block.attention.heads
        * block.attention.head_dim
        * _keys(block.attention.window, sequence, causal)
        for block in config.layers
    )
    return 6 * multiplying_parameters(config) + attention


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of what training keeps from step to step, over all devices."""

    params: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.params + self.gradients + self.optimizer


def state_bytes(config: Decoder, *, param_bytes: int = 4, moments: int = 2) -> StateBytes:
    """Weights, their gradients, and `moments` numbers a parameter for the optimizer (two for AdamW, one for Lion)."""
    weights = parameters(config) * param_bytes
    return StateBytes(weights, weights, moments * weights)


def cache_bytes(config: Decoder, slots: int, *, element_bytes: int) -> int:
    """Keys and values of one sequence of up to `slots` tokens."""
    heads = sum(block.attention.kv_heads * block.attention.head_dim for block in config.layers)
    return 2 * heads * slots * element_bytes


def _block(block: BlockConfig, width: int) -> int:
    biases = sum(outs for _, outs, has_bias in _products(block, width) if has_bias)
    norms = {"pre": 2, "post": 2, "sandwich": 4, "parallel": 1}[block.residual] * _norm(
        block.norm, width
    )
    attention = block.attention
    if isinstance(block.mlp, MoeConfig) and block.mlp.bias_rate:
        biases += block.mlp.experts
    return (
        _matrices(block, width) + biases + norms + 2 * _norm(attention.qk_norm, attention.head_dim)
    )


def _matrices(block: BlockConfig, width: int, *, is_active: bool = False) -> int:
    return sum(ins * outs for ins, outs, _ in _products(block, width, is_active))


def _products(
    block: BlockConfig, width: int, is_active: bool = False
) -> Iterator[tuple[int, int, bool]]:
    """(inputs, outputs, has a bias) of each matrix of a block; of those that one token meets, where `is_active`."""
    attention: AttentionConfig = block.attention
    queries, shared = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield width, queries, attention.bias
    yield width, shared, attention.bias
    yield width, shared, attention.bias
    yield queries, width, attention.bias
    if isinstance(block.mlp, MoeConfig):
        yield width, block.mlp.experts, False
        experts = block.mlp.top_k if is_active else block.mlp.experts
        for _ in range(3):  # gate, up, and down with its sides turned
            yield width, experts * block.mlp.hidden + block.mlp.shared, False
        return
    for _ in range(2 if block.mlp.gated else 1):
        yield width, block.mlp.hidden, block.mlp.bias
    yield block.mlp.hidden, width, block.mlp.bias


def _norm(norm: NormConfig | None, size: int) -> int:
    return 0 if norm is None else size * (2 if norm.bias else 1)


def _keys(window: int | None, sequence: int, causal: bool) -> float:
    """The keys that a token of a row meets, on average."""
    if not causal:
        return min(window or sequence, sequence)
    if window is None or window >= sequence:
        return (sequence + 1) / 2
    return (window * (window + 1) / 2 + (sequence - window) * window) / sequence
