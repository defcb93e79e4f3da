"""The collectives of a compiled program, read from its text: what is sent, how often, across which axes, and from which line.

XLA prints an optimised program as computations of one instruction a line. A collective that lies in the body of a loop runs
once a turn, so calls are followed from the entry and the known trip counts multiplied.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxlm.parallel.hlo_groups import Groups, read_groups

KINDS = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
BITS = {"pred": 8, "bf16": 16, "token": 0} | {
    f"{kind}{bits}": bits for kind in "sufc" for bits in (2, 4, 8, 16, 32, 64, 128)
}

INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|body|condition|branch_computations|called_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Shape(NamedTuple):
    """An array's dtype and sizes, as XLA writes them: bf16 and (4, 8)."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes of them."""
        known = BITS.get(self.dtype, 8)  # there are many kinds of float8
        return math.ceil(self.elements * known / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


class Result(NamedTuple):
    """An array that an operation computes on one device; `op_name` is its place in the traced program."""

    op: str
    shape: Shape
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program.

    `shapes` are its arrays on one device: those that come out of a gather, those that go into any other. `times` is how
    often it runs in one run of the program, and None where the loop around it does not say. `source` is the innermost line of
    the package, or else of any file, that it stems from.
    """

    kind: str
    name: str
    shapes: tuple[Shape, ...]
    groups: Groups
    times: int | None
    op: str
    source: str

    @property
    def bytes(self) -> int:
        """Bytes of its arrays, for one time."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def sent(self) -> float:
        """Bytes that a device sends for one time, where a ring of the group's n devices does it.

        (n - 1) / n of the arrays for a gather, a scatter or an exchange, twice that for an all-reduce, which is a scatter
        and a gather, and all of them for a permutation.
        """
        n = self.groups.size
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        return self.bytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of the mesh, by their sizes in order, along which the devices that exchange something differ."""
        return self.groups.axes(mesh)


def read(text: str, package: str = "/jaxlm/") -> list[Collective]:
    """The collectives that the text of an optimised program (`compiled.as_text()`) holds, in its order.

    Source lines are those in files whose path has `package` in it. Of a conditional, every branch counts.

    Raises:
      ValueError: where the text is no program, or a collective cannot be read.
    """
    bodies, entry = computations(text)
    times = _times(bodies, entry)
    sources = Sources(text, package)
    devices = _devices(text)
    found = []
    for name, lines in bodies.items():
        shapes: dict[str, str] = {}
        for line in lines:
            if (match := INSTRUCTION.match(line)) is None:
                continue
            shapes[match["name"]] = match["type"]
            kind = match["op"].removesuffix("-start")
            if kind not in KINDS:
                continue
            found.append(
                Collective(
                    kind=kind,
                    name=match["name"],
                    shapes=_payload(kind, match, line, shapes),
                    groups=read_groups(line, devices),
                    times=times.get(name, 0),
                    op=_op_name(line),
                    source=sources.of(line),
                )
            )
    return [each for each in found if each.times != 0]


def results(text: str, package: str = "/jaxlm/") -> list[Result]:
    """Return every array that an optimised program computes on a device, those inside of fusions and loops too.

    Source lines are as in `read`. Raises ValueError if the text is no program.
    """
    bodies, _ = computations(text)
    sources = Sources(text, package)
    return [
        Result(match["op"], shape, _op_name(line), sources.of(line))
        for lines in bodies.values()
        for line in lines
        if (match := INSTRUCTION.match(line))
        for shape in _arrays(match["type"])
    ]


def _op_name(line: str) -> str:
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
    return found[1].replace("\\'", "'") if found else ""


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and which one is the entry."""
    found: dict[str, list[str]] = {}
    entry, inside = "", None
    for line in text.splitlines():
        if inside is None:
            if (match := _COMPUTATION.match(line)) and "->" in line:
                inside = found.setdefault(match["name"], [])
                entry = match["name"] if match["entry"] else entry
        elif line.startswith("}"):
            inside = None
        else:
            inside.append(line)
    if not entry:
        raise ValueError("the text has no entry computation: it is no optimised HLO")
    return found, entry


def _times(computations: Mapping[str, list[str]], entry: str) -> dict[str, int | None]:
    """How often each computation runs: from the entry down, once for each place that calls it, times the turns of a loop."""
    calls = {name: _calls(lines, computations) for name, lines in computations.items()}
    total: dict[str, int | None] = {}

    def visit(name: str, times: int | None) -> None:
        before = total.get(name, 0)
        total[name] = None if times is None or before is None else before + times
        for callee, turns in calls.get(name, ()):
            visit(callee, None if times is None or turns is None else times * turns)

    visit(entry, 1)
    return total


def _calls(lines: list[str], computations: Mapping[str, list[str]]) -> list[tuple[str, int | None]]:
    """The computations that these lines call and how often; None for a loop that does not say."""
    found: list[tuple[str, int | None]] = []
    for line in lines:
        match = INSTRUCTION.match(line)
        if match is None or match["op"] in KINDS:
            continue  # what a collective applies is a sum
        turns = _turns(line, computations) if match["op"] == "while" else 1
        for called in _CALLED.findall(line):
            found += [(name, turns) for name in re.findall(r"[\w.-]+", called)]
    return found


def _turns(line: str, computations: Mapping[str, list[str]]) -> int | None:
    """The turns of a loop: as it says, or the one number that its condition compares with, as scans count from 0 by 1."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    tests = "\n".join(computations.get(condition[1], ())) if condition else ""
    limits = re.findall(r"= [su]32\[\]\S* constant\((\d+)\)", tests)
    return int(limits[0]) if len(limits) == 1 else None


def _payload(
    kind: str, match: re.Match[str], line: str, shapes: Mapping[str, str]
) -> tuple[Shape, ...]:
    """What comes out of a gather, and what goes into the others; the operands' types stand before their names, or above."""
    if kind == "all-gather" and not match["op"].endswith("-start"):
        return _arrays(match["type"])
    operands = line[match.end() : _closing(line, match.end())]
    named = [shapes.get(name, "") for name in re.findall(r"%([\w.-]+)", operands)]
    inputs = _arrays(operands) or tuple(shape for each in named for shape in _arrays(each))
    if kind == "all-gather":  # the start of one gives (what goes in, what comes out)
        return _arrays(match["type"])[len(inputs) :]
    return inputs or _arrays(match["type"])


def _closing(line: str, start: int) -> int:
    """Where the parenthesis that was opened before `start` is closed."""
    depth = 1
    for place in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if not depth:
            return place
    return len(line)


def _arrays(type_: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(type_)
        if dtype in BITS or dtype.startswith("f8")
    )


def _devices(text: str) -> int:
    head = text.partition("\n")[0]
    counts = [int(n) for n in re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", head)]
    return math.prod(counts)


class Sources:
    """Where an instruction comes from: `source_file` and `source_line`, or a frame of the tables at the top of the text."""

    def __init__(self, text: str, package: str):
        self._package = package
        self._files = _table(text, "FileNames", r'"(.*)"')
        self._lines = _table(text, "FileLocations", r"\{file_name_id=(\d+).*?\bline=(\d+)")
        self._frames = _table(
            text, "StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        )

    def of(self, line: str) -> str:
        """`file:line` of the innermost frame in the package, the file as its path from there; else of the innermost."""
        if known := re.search(r'source_file="([^"]*)" source_line=(\d+)', line):
            return self._shown(known[1], known[2])
        frame = re.search(r"stack_frame_id=(\d+)", line)
        number, every = frame[1] if frame else "", []
        while number in self._frames:
            location, parent = self._frames[number]
            file, place = self._lines.get(location, ("", "0"))
            every.append((self._files.get(file, ("?",))[0], place))
            number = str(int(parent or 1) - 1)  # the caller's number, plus one
        ours = [each for each in every if self._package in each[0]]
        return self._shown(*(ours or every)[0]) if every else ""

    def _shown(self, file: str, line: str) -> str:
        _, found, rest = file.rpartition(self._package)
        return f"{self._package.strip('/')}/{rest}:{line}" if found else f"{file}:{line}"


def _table(text: str, title: str, entry: str) -> dict[str, tuple[str, ...]]:
    """The rows `number entry` under a title at the top of the text."""
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)
    rows = re.finditer(rf"^(\d+) {entry}", found[1] if found else "", re.M)
    return {row[1]: tuple(group or "" for group in row.groups()[1:]) for row in rows}
