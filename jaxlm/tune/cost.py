"""Parameters of an adapter in closed form: path, shape and logical axes. Free of JAX."""

import fnmatch
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxlm.models.config import ModelConfig
from jaxlm.models.cost.tensors import Tensor, tensors
from jaxlm.nn.config import MoeConfig
from jaxlm.ops.kernels import SCALES_BLOCK
from jaxlm.parallel.logical import STACKED
from jaxlm.tune.config import (
    FIRST,
    AdapterConfig,
    Bottleneck,
    Dora,
    Full,
    Ia3,
    Lora,
    PrefixTuning,
    PromptTuning,
    QLora,
    Quantized,
    Tune,
    VirtualConfig,
    is_at,
)


def split(tune: Tune, leaves: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that are trained, and those that are not, of a model's `leaves`."""
    leaves = list(leaves)
    if isinstance(tune, Full):
        return leaves, []
    also = () if isinstance(tune, Quantized) else tune.also
    whole = {path for each in also for path in fnmatch.filter((x.path for x in leaves), each)}
    first = list(first_tensors(tune, leaves))
    trained = [each for each in new_tensors(tune, leaves) if each not in first]
    trained += [each for each in leaves if each.path in whole]
    base = [each for each in leaves if each.path not in whole]
    if isinstance(tune, QLora | Quantized):
        places = {each.path for each in adapted_weights(tune, base)}
        parts = (_codes(tune, each) if each.path in places else [each] for each in base)
        base = list(itertools.chain.from_iterable(parts))
    return trained, base + first


def adapted_weights(tune: AdapterConfig | Quantized, leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the weights that the patterns of `tune.at` match."""
    for each in leaves:
        is_table = each.path.endswith("/table") and not each.path.endswith("relative/table")
        is_weight = each.is_matrix or (is_table and isinstance(tune, Quantized))
        if is_weight and any(is_at(pattern, each.path) for pattern in tune.at):
            yield each


def new_tensors(
    tune: AdapterConfig | VirtualConfig | Quantized, leaves: Iterable[Tensor]
) -> Iterator[Tensor]:
    """Yield the parameters that an adapter adds to a model."""
    if isinstance(tune, VirtualConfig):
        yield from _of_virtual_tokens(tune, leaves)
        return
    if isinstance(tune, Quantized):
        return
    for each in adapted_weights(tune, leaves):
        yield from _of_layer(tune, each)


def first_tensors(tune: Tune, leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters of the state that keep their first values, those of PiSSA."""
    if not isinstance(tune, Full):
        yield from (each for each in new_tensors(tune, leaves) if each.path.endswith(FIRST))


def more_flops(tune: Tune, config: ModelConfig, multiplied: float) -> float:
    """Return the training FLOPs per token with an adapter less those without it; most are below 0.

    A weight that multiplies has 2 FLOPs forward, 2 of the gradient of its input and, if it is
    trained, 2 of its own gradient. `multiplied` is the number of parameters of the model that
    multiply a token (`model_cost.matmul_parameters_per_token`).
    """
    if isinstance(tune, Full):
        return 0.0
    leaves = list(tensors(config))
    trained, _ = split(tune, leaves)
    whole, first = set(leaves).intersection(trained), set(first_tensors(tune, leaves))
    new = [each for each in new_tensors(tune, leaves) if each not in first]
    is_tied = all(each.path != "unembedding/weight" for each in leaves)
    # The table of an embedding is looked up, not multiplied, unless it is tied to the head.
    whole = {x for x in whole if x.is_matrix or (is_tied and x.path == "embedding/table")}
    moes = [each.mlp for each in config.layers if isinstance(each.mlp, MoeConfig)]
    routed = moes[0].top_k / moes[0].experts if moes else 1.0  # share of the experts

    def met(parts: Iterable[Tensor]) -> float:
        return sum(each.size * (routed if "experts" in each.axes else 1.0) for each in parts)

    return 6 * met(new) + 4 * met(first) - 2 * (multiplied - met(whole))


def _of_virtual_tokens(tune: VirtualConfig, leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    for each in leaves:
        if isinstance(tune, PromptTuning) and each.path == "embedding/table":
            shape = (tune.length, *each.shape[1:])
            yield Tensor("virtual/rows", shape, ("positions", *each.axes[1:]))
        layer, _, name = each.path.removesuffix("/weight").rpartition("/")
        if (
            isinstance(tune, PrefixTuning)
            and layer.endswith("/attention")
            and name in ("key", "value")
        ):
            (axes, sizes), _, (out_axes, out_sizes) = _parts(each)
            shape, names = (*sizes, tune.length, *out_sizes), (*axes, "positions", *out_axes)
            yield Tensor(f"{layer}/leading/{name}s", shape, names)


def _codes(tune: QLora | Quantized, weight: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that store a quantized weight, see `ops.weight_codes`."""
    stack, (in_axes, in_sizes), (out_axes, out_sizes) = _parts(weight)
    is_table = weight.path.endswith("/table")
    if is_table:
        (in_axes, in_sizes), (out_axes, out_sizes) = (out_axes, out_sizes), (in_axes, in_sizes)
    inputs = math.prod(in_sizes)
    blocks = 1 if tune.block == "all" else -(-inputs // tune.block)
    scales = blocks * math.prod(out_sizes)
    outs = list(zip(out_axes, out_sizes, strict=True))
    codes = inputs if tune.base in ("int8", "fp8", "w8a8") else -(-inputs // 2)
    is_double = tune.base == "nf4_double"
    parts: dict[str, tuple[list[Any], int]] = {
        "codes": ([(in_axes[0], codes), *outs], 1),
        "scales": ([("blocks", blocks), *outs], 1 if is_double else 4),
    }
    if tune.base == "int4_zero":
        parts["zeros"] = [("blocks", blocks), *outs], 1
    if is_double:
        parts["scale_scales"] = [("blocks", -(-scales // SCALES_BLOCK))], 4
        parts["scale_mean"] = [], 4
    for name, (dims, item_bytes) in parts.items():
        axes, shape = stack
        dims = dims[::-1] if is_table else dims
        axes, shape = (*axes, *(a for a, _ in dims)), (*shape, *(size for _, size in dims))
        yield Tensor(f"{weight.path}_{name}", shape, axes, 0, item_bytes)


Dims = tuple[tuple[str | None, ...], tuple[int, ...]]  # axes and sizes


def _parts(weight: Tensor) -> tuple[Dims, Dims, Dims]:
    """Return the dimensions of the stack and experts, of the inputs and of the outputs."""
    first = sum(axis in STACKED for axis in weight.axes)
    middle = first + weight.ins
    stack, ins, outs = (
        (weight.axes[a:b], weight.shape[a:b])
        for a, b in ((0, first), (first, middle), (middle, None))
    )
    return stack, ins, outs


def _of_layer(tune: AdapterConfig, weight: Tensor) -> Iterator[Tensor]:
    layer = weight.path.removesuffix("/weight")
    stack, ins, outs = _parts(weight)

    def tensor(name: str, *parts: Dims) -> Tensor:
        axes, shapes = zip(stack, *parts, strict=True)
        return Tensor(f"{layer}/{name}", sum(shapes, ()), sum(axes, ()), 1)

    if isinstance(tune, Lora):
        rank = (("rank",), (tune.rank,))
        names = [("lora_a", "lora_b"), FIRST][: tune.terms]
        for a, b in names:
            yield tensor(a, ins, rank)
            yield tensor(b, rank, outs)
    if isinstance(tune, Dora):
        yield tensor("magnitude", outs)
    if isinstance(tune, Ia3):
        is_input = any(fnmatch.fnmatchcase(weight.path, pattern) for pattern in tune.inputs)
        yield tensor("ia3", ins if is_input else outs)
    if isinstance(tune, Bottleneck):
        hidden = (("rank",), (tune.hidden,))
        yield tensor("adapter_bias", hidden)
        yield tensor("adapter_down", outs, hidden)
        yield tensor("adapter_up", hidden, outs)
