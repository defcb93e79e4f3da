"""Sums that a traced program rounds to 16 bits, with their lengths and source lines."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

import jaxlm

PACKAGE = Path(jaxlm.__file__).parent
# A sum of 64 numbers in bfloat16 is wrong by an eighth at most: 64 roundings of 2^-9 each, all to
# one side.
MOST_TERMS = 64

# Primitives that hand a running sum on: scaled, cut, placed, rounded. Behind any other, such as a
# product of matrices, it is no running sum. So it is behind a product with a number that depends on
# it, as in a norm.
LINEAR = frozenset(
    """broadcast_in_dim concatenate convert_element_type copy copy_p device_put div dynamic_slice
    dynamic_update_slice gather mul name neg optimization_barrier pad pcast ppermute pvary
    reduce_precision reshape rev scatter select_n sharding_constraint slice split squeeze
    transpose""".split()
)
ADDING = frozenset(["add", "add_any", "sub", "scatter-add"])
COLLECTIVE = frozenset(["psum", "psum2", "psum_invariant", "reduce_scatter", "all_reduce"])


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum whose result, or whose running total, has 16 bits.

    `terms` is the number of numbers added up; None if a setting of the run decides it (turns of a
    loop, devices).
    """

    kind: str  # a primitive; or "scan carry", "while carry", "state": what is added to turn by turn
    dtype: str
    shape: tuple[int, ...]  # of the result
    terms: int | None
    source: str  # file:line, the file from the package on
    function: str  # the innermost function of the package
    axes: tuple[str, ...] = ()  # of the mesh, that a collective adds up over

    def __str__(self) -> str:
        size = f"{self.dtype}{list(self.shape)}"
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        terms = "" if self.terms is None else f", {self.terms} numbers each"
        return f"{self.source} ({self.function}): {self.kind} of {size}{over}{terms}"


def narrow_sums(program: ClosedJaxpr, carried: Sequence[tuple[int, int]] = ()) -> list[Sum]:
    """Return the sums of a program that are rounded to 16 bits, each once.

    Reductions, scatters and products count if a result is a sum of more than `MOST_TERMS` numbers.
    Loop carries and collectives count always: the turns of a loop (layers, micro-batches, ring
    steps) and the devices along a mesh axis are settings, small in a test and not in a run.

    Args:
      program: the result of `jax.jit(f).trace(...).jaxpr` or `jax.make_jaxpr`; its inner programs
        count.
      carried: pairs (input, output) that the caller of the program feeds back, as a training loop
        does.
    """
    sums = {*_reductions(program.jaxpr), *_carries(program.jaxpr, carried, "state")}
    return sorted(sums, key=str)


def _is_narrow(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def _inner(equation: Any) -> Iterator[Any]:
    """Every program inside of an equation."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            program = getattr(each, "jaxpr", each)
            if hasattr(program, "eqns"):
                yield program


def _reductions(jaxpr: Any) -> Iterator[Sum]:
    for equation in jaxpr.eqns:
        terms = _terms(equation)
        if terms is None or terms > MOST_TERMS:
            yield from (
                _sum(equation, out, equation.primitive.name, terms)
                for out in equation.outvars
                if _is_narrow(out)
            )
        for inner in _inner(equation):
            yield from _reductions(inner)
        if equation.primitive.name == "scan":
            body, consts, carry = _scanned(equation)
            pairs = [(consts + number, number) for number in range(carry)]
            yield from _carries(body, pairs, "scan carry")
        elif equation.primitive.name == "while":
            body, consts = equation.params["body_jaxpr"].jaxpr, equation.params["body_nconsts"]
            pairs = [(consts + number, number) for number in range(len(body.outvars))]
            yield from _carries(body, pairs, "while carry")


def _terms(equation: Any) -> int | None:
    """Number of terms of each result; 1 for a primitive that is no sum, None if devices decide."""
    name, params = equation.primitive.name, equation.params
    shapes = [getattr(each.aval, "shape", ()) for each in equation.invars]
    if name in COLLECTIVE:
        return None
    match name:
        case "reduce_sum":
            return math.prod(shapes[0][axis] for axis in params["axes"])
        case "cumsum" | "cumlogsumexp":
            return shapes[0][params["axis"]]
        case "reduce_window_sum":
            return math.prod(params["window_dimensions"])
        case "reduce" | "reduce_window" | "select_and_scatter_add":
            return math.prod(shapes[0])
        case "scatter-add":
            if params["unique_indices"]:
                return 1
            window = params["dimension_numbers"].update_window_dims
            return math.prod(size for dim, size in enumerate(shapes[2]) if dim not in window)
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            return math.prod(shapes[0][dim] for dim in contracted)
        case "ragged_dot_general":
            (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
            return math.prod(shapes[0][dim] for dim in contracted)
        case "conv_general_dilated":
            return math.prod(shapes[1]) // shapes[1][params["dimension_numbers"].rhs_spec[0]]
    return 1


def _scanned(equation: Any) -> tuple[Any, int, int]:
    """Body, number of constants and number of carries of a scan, by position.

    jax 0.12 renamed the parameters.
    """
    (body,) = _inner(equation)

    def alike(outer: Any, inner: Any) -> int:
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))

    carry = alike(equation.outvars, body.outvars)
    return body, alike(equation.invars, body.invars) - carry, carry


@dataclasses.dataclass(frozen=True)
class Mark:
    """Mark of a variable in a loop: its running sums, and its dependencies.

    A running sum is a carry with the additions on the way.
    """

    sums: Mapping[int, frozenset["_Addition"]] = dataclasses.field(default_factory=dict)
    depends: frozenset[int] = frozenset()


class _Addition:
    """An equation, equal to itself alone."""

    def __init__(self, equation: Any):
        self.equation = equation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Addition) and self.equation is other.equation

    def __hash__(self) -> int:
        return id(self.equation)


def _carries(jaxpr: Any, pairs: Sequence[tuple[int, int]], kind: str) -> Iterator[Sum]:
    """Additions of a loop to its carries, if the carry or the sum has 16 bits."""
    marks = [Mark()] * len(jaxpr.invars)
    for number, (into, _) in enumerate(pairs):
        marks[into] = Mark({number: frozenset()}, frozenset([number]))
    outs = _marked(jaxpr, marks) if pairs else []
    for number, (_, out) in enumerate(pairs):
        carry = jaxpr.outvars[out]
        for addition in outs[out].sums.get(number, ()):
            (result,) = addition.equation.outvars
            for narrow in filter(_is_narrow, (carry, result)):
                yield _sum(addition.equation, narrow, kind, None)


def _marked(jaxpr: Any, marks: Sequence[Mark]) -> list[Mark]:
    """The marks of a program's results, by those of its arguments."""
    known: dict[Any, Mark] = dict(zip(jaxpr.invars, marks, strict=True))

    def of(atom: Any) -> Mark:
        return Mark() if hasattr(atom, "val") else known.get(atom, Mark())

    for equation in jaxpr.eqns:
        inputs = [of(atom) for atom in equation.invars]
        if any(mark.depends for mark in inputs):
            outs = _passed(equation, inputs)
            known.update(zip(equation.outvars, outs, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _passed(equation: Any, marks: list[Mark]) -> list[Mark]:
    """The marks of an equation's results."""
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    if name in LINEAR or name in ADDING:
        merged = _merged(marks)
        if name in ("mul", "div"):
            bent = marks[0].depends & marks[1].depends
            sums = {n: seen for n, seen in merged.sums.items() if n not in bent}
            merged = Mark(sums, merged.depends)
        if name in ADDING:
            added = frozenset([_Addition(equation)])
            merged = Mark({n: seen | added for n, seen in merged.sums.items()}, merged.depends)
        return [merged] * count
    if name == "cond":
        branches = [_marked(branch, marks[1:]) for branch in _inner(equation)]
        return [
            _merged([*each, Mark({}, marks[0].depends)]) for each in zip(*branches, strict=True)
        ]
    if name == "scan":
        return _looped(marks, *_scanned(equation))
    if name == "while":
        body = params["body_jaxpr"].jaxpr
        inner = marks[params["cond_nconsts"] :]
        return _looped(inner, body, params["body_nconsts"], len(body.outvars))
    for body in _inner(equation):
        if len(body.invars) == len(marks) and len(body.outvars) == count:
            return _marked(body, marks)
    return [Mark({}, _merged(marks).depends)] * count


def _looped(marks: list[Mark], body: Any, consts: int, carry: int) -> list[Mark]:
    """Marks of a loop inside of the loop: they go around until no mark is new."""
    while True:
        outs = _marked(body, marks)
        carried = marks[consts : consts + carry]
        after = [_merged(pair) for pair in zip(carried, outs[:carry], strict=True)]
        if after == carried:
            return after + outs[carry:]
        marks = [*marks[:consts], *after, *marks[consts + carry :]]


def _merged(marks: Sequence[Mark]) -> Mark:
    sums: dict[int, frozenset[_Addition]] = {}
    for mark in marks:
        for number, seen in mark.sums.items():
            sums[number] = sums.get(number, frozenset()) | seen
    return Mark(sums, frozenset().union(*(mark.depends for mark in marks)))


def _sum(equation: Any, result: Any, kind: str, terms: int | None) -> Sum:
    params = equation.params
    axes = params.get("axes", params.get("axis_name", ())) if kind in COLLECTIVE else ()
    axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    shape = tuple(result.aval.shape)
    return Sum(kind, result.aval.dtype.name, shape, terms, *_source(equation), axes)


def _source(equation: Any) -> tuple[str, str]:
    """file:line and function of the innermost frame in the package, else of the innermost frame."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback else []
    inner = [frame for frame in frames if Path(frame.file_name).is_relative_to(PACKAGE)]
    for frame in inner or frames:
        path = Path(frame.file_name)
        shown = path.relative_to(PACKAGE.parent) if inner else path
        return f"{shown}:{frame.line_num}", frame.function_name
    return "?", "?"
