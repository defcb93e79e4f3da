"""What a compiled step sends between devices, in words, and what of it nobody wanted."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from jaxlm.parallel.hlo_collectives import Collective, Result, Shape
from jaxlm.parallel.logical import mesh_axes, ways

Content = Literal["logits", "activations", "tokens", "parameters", "scalars"]
VOCAB_AXES = frozenset(mesh_axes("vocab"))
ROW_AXES = {"data", "fsdp", "expert"}  # over which rows are split

COUNTS = ("s32", "u32")  # tokens of each expert, say: no parameter and no moment has such a dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow:
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
class StepShapes:
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
    has_groups: bool = False  # stages of a pipeline hold several groups of layers each
    figures: int = 0  # at most, that layers note of one kind, and each device needs
    has_whole_matrices: bool = False  # the optimizer multiplies or decomposes whole matrices


def table(
    collectives: Sequence[Collective], mesh: Mapping[str, int], step: StepShapes = StepShapes()
) -> list[CollectiveRow]:
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
            CollectiveRow(
                kind=kind,
                axes=axes,
                content=content,
                count=None if None in times else sum(n for n in times if n is not None),
                sent_bytes=sum(each.sent * (each.times or 1) for each in group),
                largest=str(largest),
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
    step: StepShapes,
) -> str:
    """Why a collective should not be there; empty where it should.

    What has more than one number for each token stays with its tokens: it is summed over `tensor`, passed on over `pipe`,
    and no device needs all of it. The exceptions are keys and values over `context`, gathered or in a ring, tokens that go
    to experts, and one maximum and id for each token and shard of the vocabulary if ids are sampled (`ops.gumbel`). Queries
    are told from keys by their number, and where each head has keys of its own `table` counts them.
    """
    if content == "logits":
        return "logits are sent whole, and each device needs only its part of the vocabulary"
    file = source.rpartition(":")[0].rpartition("/")[2]
    if file == "gumbel.py" and kind == "all-gather" and set(axes) <= VOCAB_AXES:
        return ""
    if content == "parameters" and step.mark:
        return _unexpected_parameters(kind, axes, shapes, step)
    if content != "activations":
        return ""
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


def _unexpected_parameters(
    kind: str, axes: Sequence[str], shapes: Sequence[Shape], step: StepShapes
) -> str:
    """Why parameters, their gradients or the optimizer's state should not be sent so; empty if they should.

    Sums go over any axis, but for whole tables over the axes that split the vocabulary. Besides, `fsdp` gathers what it splits
    (weights at zero=3, updates at zero=1 and 2), and a circular pipeline passes its groups of layers to the stages. All
    other axes compute with the part that they hold. The exceptions are figures that layers note, of which each device needs
    all, as the largest logit of each head where they are clipped; muon, whose products need whole matrices, and soap,
    which decomposes them; neither does so with tables of the vocabulary.
    """
    if all(shape.dtype in COUNTS for shape in shapes):
        return ""
    has_vocab = any(step.vocab in shape.sizes for shape in shapes)
    if kind in ("all-reduce", "reduce-scatter"):
        is_table = has_vocab and VOCAB_AXES & set(axes)
        return (
            "a table is summed whole over devices that each hold a part of it" if is_table else ""
        )
    if kind == "all-gather" and set(axes) == {"fsdp"}:
        return ""
    if kind == "all-gather" and all(shape.elements <= step.figures for shape in shapes):
        return ""
    if step.has_groups and kind in ("all-to-all", "collective-permute") and set(axes) == {"pipe"}:
        return ""
    if step.has_whole_matrices and set(axes) <= {"fsdp", "tensor"} and not has_vocab:
        return ""
    if kind == "all-gather":
        return "parameters are gathered, and each device needs only its part of them"
    return "parameters are moved to other devices, and each device needs only its part of them"


def unsharded_arrays(
    results: Sequence[Result], mesh: Mapping[str, int], step: StepShapes
) -> list[str]:
    """Return what holds the whole vocabulary for each of some tokens, a line each; empty if no device does.

    Every operation counts, also those that XLA fuses. Without a split of the vocabulary, or a mark to tell tokens by, nothing
    is judged.
    """
    if not step.mark or ways(mesh, "vocab") == 1:
        return []
    lines = {
        f"{each.source or each.op_name or 'no line known'}: {each.op} of {each.shape}": None
        for each in results
        if content_of(each.shape, step.tokens, step.vocab, step.mark) == "logits"
    }
    return list(lines)


def _are_keys(shapes: Sequence[Shape], step: StepShapes) -> bool:
    """By their shape, from whichever line: the compiler moves a gather past what was done to the keys."""
    return all(s.sizes[-1:] == (step.head_dim,) and s.elements == step.keys for s in shapes)
