"""Every parameter of a decoder, in closed form: its path, shape and logical axes. Free of JAX."""

import dataclasses
import math
from collections.abc import Iterator

from jaxlm.models.config import Decoder
from jaxlm.nn.config import BlockConfig, MlpConfig, MoeConfig, NormConfig
from jaxlm.parallel.logical import LogicalAxes

Dims = dict[str, int]  # logical axis -> size, in order
# Those of the stream, by how a block is wired.
NORMS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_norm", "mlp_norm"),
    "sandwich": ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"),
    "parallel": ("attention_norm",),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One parameter of the tree: a `weight`, `bias`, `scale` or `table`, by the end of its path."""

    path: str
    shape: tuple[int, ...]
    axes: LogicalAxes

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
        return Tensor(f"{path}/{self.path}", (layers, *self.shape), (axis, *self.axes))


def tensors(config: Decoder) -> Iterator[Tensor]:
    """The parameters of `models.decoder.Decoder`, layers stacked by kind as `nn.stack` keeps them."""
    yield _tensor("embedding/table", {"vocab": config.vocab, "embed": config.width})
    if config.positions is not None:
        yield _tensor("positions/table", {"positions": config.positions, "embed": config.width})
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
    yield from _norm("final_norm", config.final_norm, "embed", config.width)
    if not config.tied:
        yield _tensor("unembedding/weight", {"embed": config.width, "vocab": config.vocab})


def block_tensors(block: BlockConfig, width: int) -> Iterator[Tensor]:
    """Those of one layer."""
    attention, stream = block.attention, {"embed": width}
    queries = {"heads": attention.heads, "head_dim": attention.head_dim}
    shared = {"kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
    for name, ins, outs in (
        ("query", stream, queries),
        ("key", stream, shared),
        ("value", stream, shared),
        ("out", queries, stream),
    ):
        yield from _linear(f"attention/{name}", ins, outs, attention.bias)
    for name in ("query_norm", "key_norm"):
        yield from _norm(f"attention/{name}", attention.qk_norm, "head_dim", attention.head_dim)
    if isinstance(block.mlp, MoeConfig):
        yield from _moe(block.mlp, width)
    else:
        yield from _mlp("mlp", block.mlp, width)
    for name in NORMS[block.residual]:
        yield from _norm(name, block.norm, "embed", width)


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
        yield _tensor(f"mlp/{name}/weight", experts | stream | hidden)
    yield _tensor("mlp/down/weight", experts | hidden | stream)
    if config.shared:
        shared = MlpConfig(hidden=config.shared, activation=config.activation, gated=True)
        yield from _mlp("mlp/shared", shared, width)
    if config.bias_rate:
        yield _tensor("mlp/bias", {"balance": config.experts})


def _linear(path: str, ins: Dims, outs: Dims, bias: bool) -> Iterator[Tensor]:
    yield _tensor(f"{path}/weight", ins | outs)
    if bias:
        yield _tensor(f"{path}/bias", outs)


def _norm(path: str, norm: NormConfig | None, axis: str, size: int) -> Iterator[Tensor]:
    if norm is not None:
        for name in ("scale", "bias") if norm.bias else ("scale",):
            yield _tensor(f"{path}/{name}", {axis: size})


def _tensor(path: str, dims: Dims) -> Tensor:
    return Tensor(path, tuple(dims.values()), tuple(dims))
