"""What a compiled step sends between devices, in words, and what of it nobody wanted."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from jaxlm.parallel.collectives import Collective, Shape

Content = Literal["logits", "activations", "tokens", "parameters", "scalars"]
ROW_AXES = {"data", "fsdp", "expert"}  # over which rows are split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Collectives of one kind, of one thing, across the same axes, from the same source line."""

    kind: str
    axes: tuple[str, ...]
    content: Content
    count: int | None  # in one step; None where a loop does not say how often it turns
    sent_bytes: float  # by each device in one step
    largest: str  # the largest array, as XLA writes it
    source: str
    why_unexpected: str = ""

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return dataclasses.asdict(self) | {"is_expected": not self.why_unexpected}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """By what the arrays of a step are told apart, and what it sends by design. Of sizes without a mark nothing is judged."""

    tokens: int = 0  # of a micro-batch over all devices
    mark: int = 0  # a prime factor of the tokens that no size of the model has
    vocab: int = 0  # a size that nothing but the vocabulary has
    head_dim: int = 0  # a size that nothing but heads has
    keys: int = (
        0  # numbers in the keys, or in the values, of a micro-batch on one device, of whole rows
    )
    gathers: int = 0  # of such an array over context, in a step
    has_ring: bool = False  # keys go round context; else they are gathered
    has_places: bool = (
        False  # tokens are sent to the places that experts have; else they are gathered
    )


def table(
    collectives: Sequence[Collective], mesh: Mapping[str, int], step: Step = Step()
) -> list[Line]:
    """The lines of a step's collectives, what nobody wanted first, then by bytes.

    Where more is gathered in the shape of keys than keys and values there are, nothing of that shape passes for keys.
    """
    gathered = sum(
        len(each.shapes) * (each.times or 1)
        for each in collectives
        if each.kind == "all-gather"
        and each.axes(mesh) == ("context",)
        and _are_keys(each.shapes, step)
    )
    if gathered > step.gathers:
        step = dataclasses.replace(step, keys=0)
    found: dict[tuple[Any, ...], list[Collective]] = {}
    for each in collectives:
        axes = each.axes(mesh)
        if not axes:
            continue  # every group is one device
        contents = {content_of(shape, step.tokens, step.vocab, step.mark) for shape in each.shapes}
        content = next(known for known in get_args(Content) if known in contents)
        source = each.source or each.op or "no line known"
        why = unexpected(each.kind, axes, content, source, each.shapes, step)
        found.setdefault((each.kind, axes, content, source, why), []).append(each)
    lines = []
    for (kind, axes, content, source, why), group in found.items():
        times = [each.times for each in group]
        largest = max((shape for each in group for shape in each.shapes), key=lambda s: s.bytes)
        lines.append(
            Line(
                kind=kind,
                axes=axes,
                content=content,
                count=None if None in times else sum(n for n in times if n is not None),
                sent_bytes=sum(each.sent * (each.times or 1) for each in group),
                largest=f"{largest.dtype}[{','.join(map(str, largest.sizes))}]",
                source=source,
                why_unexpected=why,
            )
        )
    return sorted(lines, key=lambda line: (not line.why_unexpected, -line.sent_bytes))


def content_of(shape: Shape, tokens: int, vocab: int, mark: int) -> Content:
    """What an array is, by its number of elements; without a mark, what has a shape is called parameters."""
    if mark and shape.elements % mark == 0:
        if vocab in shape.sizes:
            return "logits"
        return "activations" if shape.elements > tokens else "tokens"
    return "parameters" if shape.sizes else "scalars"


def unexpected(
    kind: str,
    axes: Sequence[str],
    content: Content,
    source: str,
    shapes: Sequence[Shape],
    step: Step,
) -> str:
    """Why a collective should not be there; empty where it should.

    Parameters and their gradients may go wherever the layout of parameters sends them. What has more than one number for
    each token stays with its tokens: it is summed over `tensor`, handed on over `pipe`, and no device ever needs it whole.
    The exceptions are keys and values over `context`, gathered or in a ring, and tokens that go to experts. Queries are
    told from keys by their number, and where each head has keys of its own `table` counts them.
    """
    if content == "logits":
        return "logits are sent whole, and each device needs only its part of the vocabulary"
    if content != "activations":
        return ""
    file = source.rpartition(":")[0].rpartition("/")[2]
    if (
        set(axes) == {"expert"}
        and file == "expert.py"
        and (kind == "all-to-all") == step.has_places
    ):
        return ""
    if kind == "all-gather":
        if set(axes) == {"context"} and _are_keys(shapes, step) and not step.has_ring:
            return ""
        return "activations are gathered, and nothing needs them whole"
    if kind in ("all-to-all", "ragged-all-to-all"):
        return "activations are exchanged, and only those for the places of experts need be"
    if kind == "collective-permute":
        handed_on = {"pipe", "context"} if step.has_ring else {"pipe"}
        is_handed_on = len(axes) == 1 and axes[0] in handed_on
        return (
            "" if is_handed_on else "activations are handed on, and only stages and rings do that"
        )
    if kind in ("all-reduce", "reduce-scatter") and ROW_AXES & set(axes):
        return "activations are summed over devices that hold other rows"
    return ""


def _are_keys(shapes: Sequence[Shape], step: Step) -> bool:
    """By their shape, from whichever line: the compiler moves a gather past what was done to the keys."""
    return all(s.sizes[-1:] == (step.head_dim,) and s.elements == step.keys for s in shapes)
