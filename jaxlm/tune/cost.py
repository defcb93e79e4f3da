"""Parameters of an adapter in closed form: path, shape and logical axes. Free of JAX."""

import fnmatch
from collections.abc import Iterable, Iterator

from jaxlm.models.cost.tensors import Tensor
from jaxlm.parallel.logical import LAYERS
from jaxlm.tune.config import AdapterConfig, Bottleneck, Dora, Full, Ia3, Lora, Tune


def split(tune: Tune, leaves: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that are trained, and those of the base, of a model's `leaves`."""
    leaves = list(leaves)
    if isinstance(tune, Full):
        return leaves, []
    whole = {path for each in tune.also for path in fnmatch.filter((x.path for x in leaves), each)}
    trained = [*new_tensors(tune, leaves), *(each for each in leaves if each.path in whole)]
    return trained, [each for each in leaves if each.path not in whole]


def new_tensors(tune: AdapterConfig, leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters that an adapter adds to a model."""
    for each in leaves:
        if each.is_matrix and any(fnmatch.fnmatchcase(each.path, pattern) for pattern in tune.at):
            yield from _of_layer(tune, each)


def _of_layer(tune: AdapterConfig, weight: Tensor) -> Iterator[Tensor]:
    layer = weight.path.removesuffix("/weight")
    first = int(weight.axes[0] in LAYERS)  # the axis of a stack
    middle = first + weight.ins
    stack, ins, outs = (
        (weight.axes[a:b], weight.shape[a:b])
        for a, b in ((0, first), (first, middle), (middle, None))
    )

    def tensor(name: str, *parts: tuple[tuple[str | None, ...], tuple[int, ...]]) -> Tensor:
        axes, shapes = zip(stack, *parts, strict=True)
        return Tensor(f"{layer}/{name}", sum(shapes, ()), sum(axes, ()), 1)

    if isinstance(tune, Lora):
        rank = (("rank",), (tune.rank,))
        yield tensor("lora_a", ins, rank)
        yield tensor("lora_b", rank, outs)
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
