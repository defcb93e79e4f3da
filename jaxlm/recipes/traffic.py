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


def table(
    collectives: Sequence[Collective],
    mesh: Mapping[str, int],
    *,
    tokens: int,
    vocab: int,
    mark: int,
    head_dim: int,
) -> list[Line]:
    """The lines of a step's collectives, what nobody wanted first, then by bytes.

    `tokens` are those of a micro-batch over all devices, of which `mark` is a prime factor that no size of the model has,
    nothing but the vocabulary has the size `vocab`, and nothing but heads `head_dim`.
    """
    found: dict[tuple[Any, ...], list[Collective]] = {}
    for each in collectives:
        axes = each.axes(mesh)
        if not axes:
            continue  # every group is one device
        contents = {content_of(shape, tokens, vocab, mark) for shape in each.shapes}
        content = next(known for known in get_args(Content) if known in contents)
        source = each.source or each.op
        is_of_heads = all(shape.sizes[-1:] == (head_dim,) for shape in each.shapes)
        why = unexpected(each.kind, axes, content, source, is_of_heads=is_of_heads)
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
    kind: str, axes: Sequence[str], content: Content, source: str, *, is_of_heads: bool
) -> str:
    """Why a collective should not be there; empty where it should.

    Parameters and their gradients may go wherever the layout of parameters sends them. What has more than one number for
    each token stays with its tokens: it is summed over `tensor`, exchanged over `expert`, handed on over `pipe`, and no
    device ever needs it whole. The exceptions are keys and values over `context`, and tokens that go to experts.
    """
    if content == "logits":
        return "logits are sent whole, and each device needs only its part of the vocabulary"
    if content != "activations":
        return ""
    file = source.rpartition(":")[0].rpartition("/")[2]
    if set(axes) == {"expert"} and file in ("expert.py", "moe.py"):
        return ""
    if kind == "all-gather":
        # From whichever line: the compiler moves a gather past what was done to the keys.
        is_keys = set(axes) == {"context"} and is_of_heads
        return "" if is_keys else "activations are gathered, and nothing needs them whole"
    if kind in ("all-reduce", "reduce-scatter") and ROW_AXES & set(axes):
        return "activations are summed over devices that hold other rows"
    return ""
