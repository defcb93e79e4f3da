"""A function of parameters, computed in parts, with each parameter deleted once it is used up."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import Literal, jaxpr_as_fun

from jaxlm.generate.config import PARTS


def consume(
    function: Callable[[Any], list[Array]], params: Any, retained: Sequence[Array] = ()
) -> list[Array]:
    """Return `function(params)`, and delete the parameters that are not among its results.

    The results that read a parameter are in one part, and the parameter is deleted when the part
    exists. The memory at a time is that of what is left of the parameters, of the parts so far, and
    of the next one.

    Args:
      function: a function that can be traced.
      params: a tree of arrays.
      retained: arrays of the tree that are not deleted.
    """
    leaves, tree = jax.tree.flatten(params)
    whole = jax.make_jaxpr(lambda *leaves: function(jax.tree.unflatten(tree, leaves)))(*leaves)
    places = {var: number for number, var in enumerate(whole.jaxpr.invars)}
    results: dict[int, Array] = {}
    for number, var in enumerate(whole.jaxpr.outvars):
        if not isinstance(var, Literal) and var in places:
            results[number] = leaves[places[var]]
    held = {id(each) for each in (*results.values(), *retained)}
    for part, read in _parts(whole):
        part = [number for number in part if number not in results]
        make = jax.jit(jaxpr_as_fun(_restricted(whole, part, read)))
        made = jax.block_until_ready(make(*(leaves[number] for number in read)))
        results |= zip(part, made, strict=True)
        for leaf in (leaves[number] for number in read):
            if id(leaf) not in held:
                leaf.delete()
    for leaf in leaves:  # that nothing reads
        if id(leaf) not in held and not leaf.is_deleted():
            leaf.delete()
    return [results[number] for number in range(len(results))]


def _restricted(whole: Any, part: list[int], read: list[int]) -> Any:
    """Return the program of some results, which reads some of the parameters."""
    jaxpr = whole.jaxpr
    outvars = [jaxpr.outvars[number] for number in part]
    needed = {var for var in outvars if not isinstance(var, Literal)}
    equations = list[Any]()
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.insert(0, equation)
            needed.update(var for var in equation.invars if not isinstance(var, Literal))
    invars = [jaxpr.invars[number] for number in read]
    info = jaxpr.debug_info.with_unknown_names()
    program = jaxpr.replace(invars=invars, outvars=outvars, eqns=equations, debug_info=info)
    return whole.replace(jaxpr=program)


def _parts(whole: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the numbers of the results of each part, and of the parameters that they read.

    A part, but for the last, has at least 1 / PARTS of the bytes of all results.
    """
    sources = {var: {number} for number, var in enumerate(whole.jaxpr.invars)}
    for equation in whole.jaxpr.eqns:
        inputs = [var for var in equation.invars if not isinstance(var, Literal)]
        read = set().union(*(sources.get(var, set()) for var in inputs))
        sources |= dict.fromkeys(equation.outvars, read)
    groups: list[tuple[list[int], set[int]]] = []  # without a parameter in common
    for number, var in enumerate(whole.jaxpr.outvars):
        results, read = [number], set() if isinstance(var, Literal) else set(sources[var])
        for group in [each for each in groups if each[1] & read]:
            groups.remove(group)
            results, read = results + group[0], read | group[1]
        groups.append((results, read))
    sizes = [aval.size * aval.dtype.itemsize for aval in whole.out_avals]
    part, read = list[int](), set[int]()
    for results, leaves in groups:
        part, read = part + results, read | leaves
        if sum(sizes[number] for number in part) * PARTS >= sum(sizes):
            yield part, sorted(read)
            part, read = [], set()
    if part:
        yield part, sorted(read)
