"""Every parameter of a decoder, in closed form: its path, shape and logical axes. Free of JAX."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.models.config import Decoder
from jaxlm.nn.config import NORMS, BlockConfig, MlpConfig, MoeConfig, NormConfig
from jaxlm.parallel.logical import LogicalAxes

Dims = dict[str, int]  # logical axis -> size, in order


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One parameter of the tree: a `weight`, `bias`, `scale` or `table`, by the end of its path.

    The last dimensions are those of its inputs, `ins` of them, and then those of its outputs; a vector has no inputs.
    """

    path: str
    shape: tuple[int, ...]
    axes: LogicalAxes
    ins: int = 0

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with it; a table that is only looked up is none."""
        return self.path.endswith("weight")

    def stacked(self, path: str, axis: str, layers: int) -> "Tensor":
        """The same of several layers."""
        return Tensor(f"{path}/{self.path}", (layers, *self.shape), (axis, *self.axes), self.ins)


def tensors(config: Decoder) -> Iterator[Tensor]:
    """The parameters of `models.decoder.Decoder`, layers stacked by kind as `nn.stack` keeps them."""
    yield from _outside(config)
    repeated = config.depth - len(config.prefix)
    for name, depth, pattern in (
        ("prefix", len(config.prefix), config.prefix),
        ("stack", repeated, config.pattern[:repeated]),
    ):
        for kind, block in enumerate(pattern):
            layers = len(range(kind, depth, len(pattern)))
            axis = "layers" if name == "stack" else "prefix"
            for each in block_tensors(block, config.width):
                yield each.stacked(f"{name}/{kind}", axis, layers)
    yield from _heads(config)


def _heads(config: Decoder) -> Iterator[Tensor]:
    stream, inner = {"embed": config.width}, config.final_norm or config.layers[-1].norm
    for number, block in enumerate(config.heads):
        path = f"heads/{number}"
        if config.ahead is not None and config.ahead.kind == "sequential":
            yield from _norm(f"{path}/hidden_norm", inner, stream)
            yield from _norm(f"{path}/token_norm", inner, stream)
            yield _tensor(f"{path}/join/weight", {"joined": 2 * config.width} | stream, 1)
        for each in block_tensors(block, config.width):
            yield each.stacked(f"{path}/block/0", "prefix", 1)
        yield from _norm(f"{path}/norm", config.final_norm, stream)


def _outside(config: Decoder) -> Iterator[Tensor]:
    stream, vocab = {"embed": config.width}, {"vocab": config.vocab}
    yield _tensor("embedding/table", vocab | stream, 1)
    if config.positions is not None:
        yield _tensor("positions/table", {"positions": config.positions} | stream, 1)
    if config.inner_positions is not None:
        yield _tensor("inner/table", {"positions": config.inner_positions} | stream, 1)
    yield from _norm("final_norm", config.final_norm, stream)
    if not config.tied:
        yield _tensor("unembedding/weight", stream | vocab, 1)


class Place(NamedTuple):
    """Where a tensor of a model that is written layer by layer lies in our tree."""

    layer: int | None  # from 0; None is outside of the layers
    path: str  # of the leaf
    row: int | None  # of the layer in the leaf
    tensor: Tensor  # its path is that in the layer


def places(config: Decoder) -> Iterator[Place]:
    """Every tensor of every layer by itself, in order, after those outside of the layers."""
    for tensor in _outside(config):
        yield Place(None, tensor.path, None, tensor)
    first = len(config.prefix)
    for layer, block in enumerate(config.layers):
        kinds = len(config.pattern)
        kind, row = (layer, 0) if layer < first else reversed(divmod(layer - first, kinds))
        stack = "prefix" if layer < first else "stack"
        for tensor in block_tensors(block, config.width):
            yield Place(layer, f"{stack}/{kind}/{tensor.path}", row, tensor)


def block_tensors(block: BlockConfig, width: int) -> Iterator[Tensor]:
    """Those of one layer."""
    attention, stream = block.attention, {"embed": width}
    queries = {"heads": attention.heads, "head_dim": attention.head_dim}
    shared = {"kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
    for name, ins, outs, bias in (
        ("query", stream, queries, attention.bias),
        ("key", stream, shared, attention.bias),
        ("value", stream, shared, attention.bias),
        ("out", queries, stream, attention.out_bias),
    ):
        yield from _linear(f"attention/{name}", ins, outs, bias)
    for name, dims in (("query_norm", queries), ("key_norm", shared)):
        over = {"head_dim": attention.head_dim} if attention.qk_norm_over == "head" else dims
        yield from _norm(f"attention/{name}", attention.qk_norm, over)
    if isinstance(block.mlp, MoeConfig):
        yield from _moe(block.mlp, width)
    else:
        yield from _mlp("mlp", block.mlp, width)
    for name in NORMS[block.residual]:
        yield from _norm(name, block.norm, stream)


def _mlp(path: str, config: MlpConfig, width: int) -> Iterator[Tensor]:
    stream, hidden = {"embed": width}, {"mlp": config.hidden}
    for name in ("gate", "up") if config.gated else ("up",):
        yield from _linear(f"{path}/{name}", stream, hidden, config.bias)
    yield from _linear(f"{path}/down", hidden, stream, config.bias)


def _moe(config: MoeConfig, width: int) -> Iterator[Tensor]:
    stream, hidden = {"embed": width}, {"mlp": config.hidden}
    experts = {"experts": config.experts}
    yield from _linear("mlp/router", stream, {"routes": config.experts}, False)
    for name in ("gate", "up"):
        yield _tensor(f"mlp/{name}/weight", experts | stream | hidden, 1)
    yield _tensor("mlp/down/weight", experts | hidden | stream, 1)
    if config.shared:
        shared = MlpConfig(hidden=config.shared, activation=config.activation, gated=True)
        yield from _mlp("mlp/shared", shared, width)
    if config.bias_rate:
        yield _tensor("mlp/bias", {"balance": config.experts})


def _linear(path: str, ins: Dims, outs: Dims, bias: bool) -> Iterator[Tensor]:
    yield _tensor(f"{path}/weight", ins | outs, len(ins))
    if bias:
        yield _tensor(f"{path}/bias", outs)


def _norm(path: str, norm: NormConfig | None, dims: Dims) -> Iterator[Tensor]:
    if norm is not None:
        for name in ("scale", "bias") if norm.bias else ("scale",):
            yield _tensor(f"{path}/{name}", dims)


def _tensor(path: str, dims: Dims, ins: int = 0) -> Tensor:
    return Tensor(path, tuple(dims.values()), tuple(dims), ins)
