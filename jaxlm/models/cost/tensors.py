"""Every parameter of a model, in closed form: its path, shape and logical axes. Free of JAX."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.models import config as configs
from jaxlm.nn import config as nn
from jaxlm.parallel.logical import LogicalAxes

Dims = dict[str, int]  # logical axis -> size, in order


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One parameter; its path ends in `weight`, `bias`, `scale` or `table`.

    The last dimensions are `ins` input dimensions and then outputs; a vector has no inputs.
    `item_bytes` are those of an element; None for the dtype of the parameters.
    """

    path: str
    shape: tuple[int, ...]
    axes: LogicalAxes
    ins: int = 0
    item_bytes: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """If it is a matrix that activations are multiplied with, and not a lookup table."""
        return self.path.endswith("weight")

    def stacked(self, path: str, axis: str, layers: int) -> "Tensor":
        """Return the stacked parameter of several layers."""
        return Tensor(f"{path}/{self.path}", (layers, *self.shape), (axis, *self.axes), self.ins)


def tensors(config: configs.ModelConfig) -> Iterator[Tensor]:
    """Yield the parameters of the model, with layers stacked by kind as in `nn.stack`."""
    yield from _outside(config)
    for prefix, side in _sides(config):
        repeated = side.depth - len(side.prefix)
        for name, depth, pattern in (
            ("prefix", len(side.prefix), side.prefix),
            ("stack", repeated, side.pattern[:repeated]),
        ):
            for kind, block in enumerate(pattern):
                layers = len(range(kind, depth, len(pattern)))
                axis = "layers" if name == "stack" else "prefix"
                for each in block_tensors(block, side.width):
                    yield each.stacked(f"{prefix}{name}/{kind}", axis, layers)
    if isinstance(config, configs.DecoderConfig):
        yield from _heads(config)


def _heads(config: configs.DecoderConfig) -> Iterator[Tensor]:
    stream, inner = {"embed": config.width}, config.final_norm or config.layers[-1].norm
    for number, block in enumerate(config.heads):
        path = f"heads/{number}"
        if config.mtp is not None and config.mtp.kind == "sequential":
            yield from _norm(f"{path}/hidden_norm", inner, stream)
            yield from _norm(f"{path}/token_norm", inner, stream)
            yield _tensor(f"{path}/join/weight", {"joined": 2 * config.width} | stream, 1)
        for each in block_tensors(block, config.width):
            yield each.stacked(f"{path}/block/0", "prefix", 1)
        yield from _norm(f"{path}/norm", config.final_norm, stream)


def _sides(config: configs.ModelConfig) -> tuple[tuple[str, configs.BackboneConfig], ...]:
    """Return the stacks of a model with the prefix of their paths."""
    if isinstance(config, configs.EncoderDecoderConfig):
        return (("encoder/", config.encoder), ("decoder/", config.decoder))
    return (("", config),)


def _outside(config: configs.ModelConfig) -> Iterator[Tensor]:
    stream, vocab = {"embed": config.width}, {"vocab": config.vocab}
    yield _tensor("embedding/table", vocab | stream, 1)
    if isinstance(config, configs.EncoderConfig):
        yield from _of_encoder(config)
    elif isinstance(config, configs.DecoderConfig):
        yield from _table("positions", config.positions, stream)
        yield from _table("inner", config.inner_positions, stream)
    for prefix, side in _sides(config):
        attention = side.pattern[0].attention
        if attention.relative is not None:
            dims = {"positions": attention.relative.buckets, "heads": attention.heads}
            yield _tensor(f"{prefix}relative/table", dims, 1)
        yield from _norm(f"{prefix}final_norm", side.final_norm, stream)
    if not config.tied:
        yield _tensor("unembedding/weight", stream | vocab, 1)


def _of_encoder(config: configs.EncoderConfig) -> Iterator[Tensor]:
    """Yield an encoder's tables and norm before the layers, and the head after them."""
    stream, features = {"embed": config.width}, {"features": config.width}
    rows = None if config.positions is None else config.first_position + config.positions
    yield from _table("positions", rows, stream)
    yield from _table("types", config.token_types, stream)
    yield from _norm("embedding_norm", config.embedding_norm, stream)
    yield from _linear("head/dense", stream, features, config.head.bias)
    yield from _norm("head/norm", config.head.norm, features)
    yield _tensor("head/bias", {"vocab": config.vocab})


def _table(path: str, rows: int | None, stream: Dims) -> Iterator[Tensor]:
    if rows is not None:
        yield _tensor(f"{path}/table", {"positions": rows} | stream, 1)


class LayerTensor(NamedTuple):
    """One tensor of one layer, and its location in the parameter tree."""

    layer: int | None  # from 0; None for tensors outside of layers
    path: str  # of the parameter
    row: int | None  # of the layer in the parameter
    tensor: Tensor  # with the path in the layer, after `encoder/` or `decoder/` if there are both


def layer_tensors(config: configs.ModelConfig) -> Iterator[LayerTensor]:
    """Yield the tensors outside of layers, and then every tensor of every layer in order."""
    for tensor in _outside(config):
        yield LayerTensor(None, tensor.path, None, tensor)
    for prefix, side in _sides(config):
        first, kinds = len(side.prefix), len(side.pattern)
        for layer, block in enumerate(side.layers):
            kind, row = (layer, 0) if layer < first else reversed(divmod(layer - first, kinds))
            stack = "prefix" if layer < first else "stack"
            for tensor in block_tensors(block, side.width):
                named = dataclasses.replace(tensor, path=f"{prefix}{tensor.path}")
                yield LayerTensor(layer, f"{prefix}{stack}/{kind}/{tensor.path}", row, named)


def block_tensors(block: nn.BlockConfig, width: int) -> Iterator[Tensor]:
    """Yield the parameters of one layer."""
    yield from _attention("attention", block.attention, width)
    if block.cross is not None:
        yield from _attention("cross", block.cross, width)
    if isinstance(block.mlp, nn.MoeConfig):
        yield from _moe(block.mlp, width)
    else:
        yield from _mlp("mlp", block.mlp, width)
    for name in nn.norms_of(block):
        yield from _norm(name, block.norm, {"embed": width})


def _attention(path: str, attention: nn.AttentionConfig, width: int) -> Iterator[Tensor]:
    stream = {"embed": width}
    if attention.latent is not None:
        yield from _latent(path, attention, attention.latent, stream)
        return
    queries = {"heads": attention.heads, "head_dim": attention.head_dim}
    shared = {"kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
    for name, ins, outs, bias in (
        ("query", stream, queries, attention.bias),
        ("key", stream, shared, attention.bias),
        ("value", stream, shared, attention.bias),
        ("out", queries, stream, attention.out_bias),
    ):
        yield from _linear(f"{path}/{name}", ins, outs, bias)
    for name, dims in (("query_norm", queries), ("key_norm", shared)):
        over = {"head_dim": attention.head_dim} if attention.qk_norm_over == "head" else dims
        yield from _norm(f"{path}/{name}", attention.qk_norm, over)


def _latent(
    path: str, attention: nn.AttentionConfig, latent: nn.LatentConfig, stream: Dims
) -> Iterator[Tensor]:
    def heads(size: int) -> Dims:
        return {"heads": attention.heads, "head_dim": size}

    compressed, queries_from = {"latent": latent.rank}, stream
    if latent.query_rank is not None:
        rank, queries_from = {"rank": latent.query_rank}, {"latent": latent.query_rank}
        yield from _linear(f"{path}/query_latent", stream, rank, False)
        yield from _norm(f"{path}/query_norm", latent.norm, rank)
    for name, ins, outs in (
        ("query", queries_from, heads(attention.head_dim)),
        ("latent", stream, {"rank": latent.rank}),
        ("rotary_key", stream, {"rank": latent.rotary_dim}),
        ("key", compressed, heads(attention.head_dim - latent.rotary_dim)),
        ("value", compressed, heads(latent.value_dim)),
        ("out", heads(latent.value_dim), stream),
    ):
        yield from _linear(f"{path}/{name}", ins, outs, False)
    yield from _norm(f"{path}/latent_norm", latent.norm, {"rank": latent.rank})


def _mlp(path: str, config: nn.MlpConfig, width: int) -> Iterator[Tensor]:
    stream, hidden = {"embed": width}, {"mlp": config.hidden}
    for name in ("gate", "up") if config.gated else ("up",):
        yield from _linear(f"{path}/{name}", stream, hidden, config.bias)
    yield from _linear(f"{path}/down", hidden, stream, config.bias)


def _moe(config: nn.MoeConfig, width: int) -> Iterator[Tensor]:
    stream, hidden = {"embed": width}, {"mlp": config.hidden}
    experts = {"experts": config.experts}
    yield from _linear("mlp/router", stream, {"routes": config.experts}, False)
    for name in ("gate", "up"):
        yield _tensor(f"mlp/{name}/weight", experts | stream | hidden, 1)
    yield _tensor("mlp/down/weight", experts | hidden | stream, 1)
    if config.shared:
        shared = nn.MlpConfig(hidden=config.shared, activation=config.activation, gated=True)
        yield from _mlp("mlp/shared", shared, width)
    if config.bias_rate is not None:
        yield _tensor("mlp/bias", {"balance": config.experts})


def _linear(path: str, ins: Dims, outs: Dims, bias: bool) -> Iterator[Tensor]:
    yield _tensor(f"{path}/weight", ins | outs, len(ins))
    if bias:
        yield _tensor(f"{path}/bias", outs)


def _norm(path: str, norm: nn.NormConfig | None, dims: Dims) -> Iterator[Tensor]:
    if norm is not None:
        for name in ("scale", "bias") if norm.bias else ("scale",):
            yield _tensor(f"{path}/{name}", dims)


def _tensor(path: str, dims: Dims, ins: int = 0) -> Tensor:
    return Tensor(path, tuple(dims.values()), tuple(dims), ins)
