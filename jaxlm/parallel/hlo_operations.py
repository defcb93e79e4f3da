"""What the operations of a compiled program are, by their names in it: products, attention, communication, or others."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxlm.parallel.hlo_collectives import INSTRUCTION, KINDS, Sources, computations

# Whose body's operations are told apart from them.
CONTROL = frozenset({"while", "conditional", "call"})
ATTENTION = re.compile(r"/ops/(attention|blockwise|cudnn|ring|splash)\.py:")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLS = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
# Names of kernels, and of operations of a program whose text is not at hand.
_NAMES = (
    ("communication", re.compile(r"nccl|rccl|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective", re.I)),
    ("attention", re.compile(r"fmha|flash|splash|attention|sdpa", re.I)),
    ("matmul", re.compile(r"gemm|\bdot\b|matmul|convolution|cutlass|xmma|nvjet|cublas", re.I)),
    ("control", re.compile(r"^(while|conditional|call)(\.\d+)?$")),
)  # fmt: skip


class Operation(NamedTuple):
    """What an operation does, `other` where it is none of those that have a name; and the line that it stems from."""

    kind: str
    source: str = ""


def read(text: str) -> dict[str, Operation]:
    """The operations in the text of an optimised program (`compiled.as_text()`), by name.

    Whatever stems from a line of an attention kernel is attention, its products too; a fusion that holds a product is a
    matmul. What encloses others, as a loop, is `control`.
    """
    found, _ = computations(text)
    sources = Sources(text, "/jaxlm/")
    told = {}
    for lines in found.values():
        for line in lines:
            if match := INSTRUCTION.match(line):
                source = sources.of(line)
                told[match["name"]] = Operation(_kind(match["op"], line, source, found), source)
    return told


def by_name(name: str) -> Operation:
    """An operation of which nothing but the name is known."""
    return Operation(next((kind for kind, names in _NAMES if names.search(name)), "other"))


def _kind(op: str, line: str, source: str, found: Mapping[str, list[str]]) -> str:
    if op in CONTROL:
        return "control"
    ops = {op} | _inside(line, found)
    if any(re.sub(r"-(start|done)$", "", each) in KINDS for each in ops):
        return "communication"
    if ATTENTION.search(source):
        return "attention"
    if ops & {"dot", "convolution", "ragged-dot"}:
        return "matmul"
    target = _TARGET.search(line)
    return by_name(target[1]).kind if target else "other"


def _inside(line: str, found: Mapping[str, list[str]]) -> set[str]:
    """What is computed in what an operation calls."""
    ops: set[str] = set()
    for name in _CALLS.findall(line):
        for inner in found.get(name, ()):
            if match := INSTRUCTION.match(inner):
                ops |= {match["op"]} | _inside(inner, found)
    return ops
