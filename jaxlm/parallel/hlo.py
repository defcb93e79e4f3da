"""Collectives and operations of a compiled program, parsed from its text (optimized HLO).

XLA prints a program as computations with one instruction a line. JAX has no interface that gives
the bytes, the device groups and the source line of a collective. A collective in the body of a
loop runs once an iteration, so calls are followed from the entry and trip counts multiplied.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute"
    " collective-broadcast".split()
)
BITS = {f"{kind}{bits}": bits for kind in "sufc" for bits in (2, 4, 8, 16, 32, 64, 128)}
BITS |= {"pred": 8, "bf16": 16, "token": 0}
CONTROL = frozenset({"while", "conditional", "call"})  # their bodies' operations are reported

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_END = re.compile(r"\}(?:$|, execution_thread=)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
_FUSED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_CONSTANT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LISTED = r"\{((?:\{[\d,]*\},?)*)\}"
_ATTENTION = re.compile(r"/ops/(attention|cudnn|flash|splash)\.py:")
# Names of kernels, and of operations of a program whose text is not available.
_NAMES = {
    "communication": r"[nr]ccl|all.?(reduce|gather|to.?all)|reduce.?scatter|collective",
    "attention": r"fmha|flash|splash|attention|sdpa",
    "matmul": r"gemm|\bdot\b|matmul|convolution|cutlass|xmma|nvjet|cublas",
    "control": r"^(while|conditional|call)(\.\d+)?$",
}

WORK = ("matmul", "attention")  # kinds that a device can run while it communicates


class Shape(NamedTuple):
    """An array's dtype and sizes, as XLA writes them: bf16 and (4, 8)."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.ceil(self.elements * BITS.get(self.dtype, 8) / 8)  # float8 has many names

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


class HloResult(NamedTuple):
    """An array computed on one device; `op_name` is its path in the traced program."""

    op: str
    shape: Shape
    op_name: str
    source: str


class Operation(NamedTuple):
    """Kind of an operation: matmul, attention, communication, control or other; source line."""

    kind: str
    source: str = ""


# Sets of devices that exchange data, by number in the mesh; (from, to) for a permutation.
DeviceGroups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program.

    `shapes` are its arrays on one device: the results of a gather, the operands of any other.
    `times` is the number of runs in one run of the program, None if a loop around it has an
    unknown trip count. `source` is the innermost line in the package, or else in any file. It is
    overlapped if it is asynchronous, and matrix products or attention run before it has ended.
    """

    kind: str
    name: str
    shapes: tuple[Shape, ...]
    groups: DeviceGroups
    times: int | None
    op: str
    source: str
    is_overlapped: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of its arrays, for one run."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run, by a ring over the group's n devices.

        (n - 1) / n of the arrays for a gather, a scatter or an exchange; twice that for an
        all-reduce, which is a scatter and a gather; all of them for a permutation.
        """
        n = max(map(len, self.groups), default=1)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        return self.bytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes of a mesh, given by ordered sizes, along which a group differs."""
        sizes = tuple(mesh.values())
        coordinates = np.array(np.unravel_index(np.arange(math.prod(sizes)), sizes)).T
        differs = np.zeros(len(mesh), bool)
        for group in self.groups:
            differs |= (coordinates[list(group)] != coordinates[group[0]]).any(0)
        return tuple(axis for axis, is_crossed in zip(mesh, differs, strict=True) if is_crossed)


class _Program:
    """The instructions of each computation, and the tables of source lines."""

    def __init__(self, text: str, package: str):
        bodies: dict[str, list[str]] = {}
        self.entry, inside = "", None
        for line in text.splitlines():
            if inside is None:
                if (match := _COMPUTATION.match(line)) and "->" in line:
                    inside = bodies.setdefault(match["name"], [])
                    self.entry = match["name"] if match["entry"] else self.entry
            elif _END.match(line):
                inside = None
            elif line.startswith(" ") or not inside:
                inside.append(line)
            else:  # the metadata of a kernel has line breaks
                inside[-1] += line
        self.computations = {
            name: [match for line in lines if (match := _INSTRUCTION.match(line))]
            for name, lines in bodies.items()
        }
        if not self.entry:
            raise ValueError("the text has no entry computation: it is not optimized HLO")
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", text.partition("\n")[0])
        self.devices = math.prod(map(int, counts))
        self._package = package
        self._files = _table(text, "FileNames", r'"(.*)"')
        self._places = _table(text, "FileLocations", r"\{file_name_id=(\d+).*?\bline=(\d+)")
        frame = r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        self._frames = _table(text, "StackFrames", frame)

    def instructions(self) -> Iterator[tuple[str, re.Match[str]]]:
        """Yield the computation and the match of each instruction; `match.string` is its line."""
        for name, matches in self.computations.items():
            yield from ((name, match) for match in matches)

    def source(self, line: str) -> str:
        """Return `file:line` of the innermost frame, in the package (by its path there) if any."""
        frames = re.findall(r'source_file="([^"]*)" source_line=(\d+)', line)[:1]
        frame = None if frames else re.search(r"stack_frame_id=(\d+)", line)
        number = frame[1] if frame else ""
        while number in self._frames:
            location, parent = self._frames[number]
            file, row = self._places.get(location, ("", "0"))
            frames.append((self._files.get(file, ("?",))[0], row))
            number = str(int(parent or 1) - 1)  # stored plus one
        if not frames:
            return ""
        file, row = next((each for each in frames if self._package in each[0]), frames[0])
        _, is_inside, rest = file.rpartition(self._package)
        return f"{self._package.strip('/')}/{rest}:{row}" if is_inside else f"{file}:{row}"

    def run_counts(self) -> dict[str, int | None]:
        """Return how often each computation runs: over all its calls, times the trips of loops."""
        total: dict[str, int | None] = {}

        def visit(name: str, times: int | None) -> None:
            before = total.get(name, 0)
            total[name] = None if times is None or before is None else before + times
            for callee, trips in self._calls(name):
                visit(callee, None if times is None or trips is None else times * trips)

        visit(self.entry, 1)
        return total

    def _calls(self, name: str) -> Iterator[tuple[str, int | None]]:
        """Yield the computations that one calls, and how often; None for an unknown count."""
        for match in self.computations.get(name, ()):
            if match["op"] not in COLLECTIVES:  # which apply a sum
                trips = self._trips(match.string) if match["op"] == "while" else 1
                called = " ".join(_CALLED.findall(match.string))
                yield from ((callee, trips) for callee in re.findall(r"[\w.-]+", called))

    def _trips(self, line: str) -> int | None:
        """Return a loop's trip count: known, or from its condition's one limit and its increment.

        Loops count from 0. The increment of a scan is 1, that of a product in parts that a
        partitioned operand was divided into (`windowed_dot_general`) may be 2.
        """
        if known := _TRIPS.search(line):
            return int(known[1])
        condition, body = (
            {each["name"]: each.string for each in self.computations.get(name, ())}
            for name in re.findall(r"(?:condition|body)=%?([\w.-]+)", line)
        )
        limits = _CONSTANT.findall("\n".join(condition.values()))
        return -(-int(limits[0]) // _increment(condition, body)) if len(limits) == 1 else None

    def overlapped(self) -> set[str]:
        """Return the names of collectives between whose start and end products run."""
        names: set[str] = set()
        for matches in self.computations.values():
            running: dict[str, bool] = {}  # by the name of a start
            starts: dict[str, str] = {}  # of those and of their updates
            lines = {match["name"]: match.string for match in matches}
            for match in matches:
                op, line = match["op"], match.string
                operand = re.search(r"%([\w.-]+)", line[match.end() :])
                start = starts.get(operand[1], "") if operand else ""
                if op.endswith("-start"):
                    running[match["name"]] = False
                    starts[match["name"]] = match["name"]
                elif op.endswith("-update"):
                    starts[match["name"]] = start
                elif op.endswith("-done"):
                    if running.pop(start, False):
                        names |= {start} | self._inside(lines[start])
                elif not all(running.values()) and self.kind(op, line, self.source(line)) in WORK:
                    running = dict.fromkeys(running, True)
        return names

    def _inside(self, line: str) -> set[str]:
        """Return the names of the operations that an asynchronous call runs."""
        called = re.findall(r"[\w.-]+", " ".join(_CALLED.findall(line)))
        return {match["name"] for name in called for match in self.computations.get(name, ())}

    def kind(self, op: str, line: str, source: str) -> str:
        """Return the kind of an operation."""
        if op in CONTROL:
            return "control"
        ops = {op} | self._fused_ops(line)
        if any(re.sub(r"-(start|done)$", "", each) in COLLECTIVES for each in ops):
            return "communication"
        if _ATTENTION.search(source):
            return "attention"
        if ops & {"dot", "convolution", "ragged-dot"}:
            return "matmul"
        target = _TARGET.search(line)
        return operation_by_name(target[1]).kind if target else "other"

    def _fused_ops(self, line: str) -> set[str]:
        ops: set[str] = set()
        for name in _FUSED.findall(line):
            for match in self.computations.get(name, ()):
                ops |= {match["op"]} | self._fused_ops(match.string)
        return ops


def read_collectives(text: str, package: str = "/jaxlm/") -> list[Collective]:
    """Return the collectives of an optimized program (`compiled.as_text()`), in its order.

    Source lines are those in files whose path contains `package`. Every branch of a conditional
    counts. Raises ValueError if the text is not a program, or a collective cannot be parsed.
    """
    program = _Program(text, package)
    times, overlapped = program.run_counts(), program.overlapped()
    types: dict[tuple[str, str], str] = {}
    collectives = []
    for name, match in program.instructions():
        line = match.string
        types[name, match["name"]] = match["type"]
        kind = match["op"].removesuffix("-start")
        if kind not in COLLECTIVES or times.get(name, 0) == 0:
            continue
        operands = line[match.end() : _closing(line, match.end())]
        named = [types.get((name, each), "") for each in re.findall(r"%([\w.-]+)", operands)]
        collectives.append(
            Collective(
                kind=kind,
                name=match["name"],
                shapes=_payload(match["op"], match["type"], operands, named),
                groups=read_groups(line, program.devices),
                times=times[name],
                op=_op_name(line),
                source=program.source(line),
                is_overlapped=match["name"] in overlapped,
            )
        )
    return collectives


def _increment(condition: Mapping[str, str], body: Mapping[str, str]) -> int:
    """Return the increment of a loop's counter, 1 if it is not an addition of a constant.

    Args:
      condition, body: the instructions by name.
    """
    places = re.findall(r"get-tuple-element\([^)]*\), index=(\d+)", "\n".join(condition.values()))
    roots = [line for line in body.values() if line.lstrip().startswith("ROOT")]
    if len(places) != 1 or not roots:
        return 1
    results = re.findall(r"%([\w.-]+)", roots[0].partition(" tuple(")[2])
    place = int(places[0])
    counter = body.get(results[place], "") if place < len(results) else ""
    added = re.findall(r"%([\w.-]+)", counter.partition(" add(")[2])[:2]
    steps = [int(step[1]) for name in added if (step := _CONSTANT.search(body.get(name, "")))]
    return steps[0] if len(steps) == 1 and steps[0] else 1


class ProgramFlops(NamedTuple):
    """FLOPs of one run of a program on one device; two for a multiplication with an addition.

    Elementwise operations do not count. `attention` is that of splash kernels with a causal mask.
    `unknown` is the number of products in loops with an unknown trip count, counted once, and of
    kernels without a formula, not counted.
    """

    products: float
    attention: float
    unknown: int

    @property
    def total(self) -> float:
        """FLOPs of products and of attention kernels."""
        return self.products + self.attention


def read_flops(text: str) -> ProgramFlops:
    """Count the FLOPs of an optimized program (`compiled.as_text()`), times the trips of loops.

    XLA's `cost_analysis` counts the body of a loop once. Every branch of a conditional counts.
    Raises ValueError if the text is not a program.
    """
    program = _Program(text, "/jaxlm/")
    times = program.run_counts()
    types: dict[tuple[str, str], str] = {}
    products, attention, unknown = 0.0, 0.0, 0
    for name, match in program.instructions():
        line, op = match.string, match["op"]
        types[name, match["name"]] = match["type"]
        runs = times.get(name, 0)
        is_kernel = op == "custom-call" and 'custom_call_target="tpu_custom_call"' in line
        if runs == 0 or not (is_kernel or op in ("dot", "convolution")):
            continue
        if is_kernel:
            flops = _kernel_flops(match["name"], line)
            attention += flops * (runs or 1)
            unknown += not flops or runs is None
            continue
        operands = line[match.end() : _closing(line, match.end())]
        named = [types.get((name, each), "") for each in re.findall(r"%([\w.-]+)", operands)]
        shapes = _arrays(operands) or tuple(shape for each in named for shape in _arrays(each))
        count = _dot_flops if op == "dot" else _convolution_flops
        products += count(line, _arrays(match["type"])[0], shapes) * (runs or 1)
        unknown += runs is None
    return ProgramFlops(products, attention, unknown)


def _dot_flops(line: str, result: Shape, operands: Sequence[Shape]) -> float:
    summed = _numbers(_option(r"lhs_contracting_dims=\{([\d,]*)\}", line)[0])
    return 2.0 * result.elements * math.prod([operands[0].sizes[axis] for axis in summed])


def _convolution_flops(line: str, result: Shape, operands: Sequence[Shape]) -> float:
    """Count the pairs of an input and a kernel element that are there; padding is none.

    The TPU compiler makes all products convolutions, with dimensions of a batch as windows.
    """
    labels = _option(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    left, right, out = (
        dict(zip(each, shape.sizes, strict=True))
        for each, shape in zip(labels, (*operands[:2], result), strict=True)
    )
    options = re.findall(r"(\w+)=([\dx_-]+)", _option(r"window=\{([^}]*)\}", line)[0])
    window = {name: values.split("x") for name, values in options}
    pairs = out["b"] * out["f"] * right["i"]
    spatial = [axis for axis in sorted(left) if axis.isdigit()]
    ones, unpadded = ["1"] * len(spatial), ["0_0"] * len(spatial)
    for number, axis in enumerate(spatial):
        stride, dilation, spread = (
            int(window.get(name, ones)[number]) for name in ("stride", "rhs_dilate", "lhs_dilate")
        )
        before = int(window.get("pad", unpadded)[number].split("_")[0])
        places = np.add.outer(np.arange(out[axis]) * stride, np.arange(right[axis]) * dilation)
        places -= before
        is_inside = (places >= 0) & (places <= (left[axis] - 1) * spread)
        pairs *= int((is_inside & (places % spread == 0)).sum())
    return 2.0 * pairs


def _option(pattern: str, line: str) -> tuple[str, ...]:
    """Return the groups of a pattern that every line of an operation has; empty strings if not."""
    match = re.search(pattern, line)
    return match.groups() if match else ("",) * re.compile(pattern).groups


# Products of a splash kernel for each pair of a query and a key: scores and sums; those and the
# gradients of the queries; those and the gradients of keys and values, where scores count again.
_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}


def _kernel_flops(name: str, line: str) -> float:
    """Count the blocks of a causal mask on and below the diagonal; 0 for another kernel."""
    products = next((n for kernel, n in _SPLASH.items() if name.startswith(kernel)), 0)
    if not products:
        return 0.0
    operands = _option(r"operand_layout_constraints=\{(.*?\})\}", line)[0]
    blocks, _, queries, keys, *_ = _arrays(operands)
    pairs = math.prod(queries.sizes) * keys.sizes[-2]
    count = max(blocks.sizes[-2:])
    return 2.0 * products * pairs * (count + 1) / (2 * count)


def read_results(text: str, package: str = "/jaxlm/") -> list[HloResult]:
    """Return every array that an optimized program computes on a device; see `read_collectives`."""
    program = _Program(text, package)
    return [
        HloResult(match["op"], shape, _op_name(match.string), program.source(match.string))
        for _, match in program.instructions()
        for shape in _arrays(match["type"])
    ]


def read_operations(text: str) -> dict[str, Operation]:
    """Return the operations of an optimized program (`compiled.as_text()`), by name.

    Those of an attention kernel's lines are attention, products too; a fusion with one is a matmul.
    """
    program = _Program(text, "/jaxlm/")
    return {
        match["name"]: Operation(program.kind(match["op"], match.string, source), source)
        for _, match in program.instructions()
        for source in [program.source(match.string)]
    }


def classifier(text: str) -> Callable[[str], tuple[str, str, bool]]:
    """Return a function of a profiled operation's name: kind, source line, and if it is known.

    A name that is not in the optimized program `text` has the kind that it suggests. A kernel of a
    GPU has an underscore for each point and hyphen of its operation's name.
    """
    operations = read_operations(text) if text else {}
    kernels = {re.sub(r"[.-]", "_", name): name for name in operations}

    def classify(name: str) -> tuple[str, str, bool]:
        name = name if name in operations else kernels.get(name, name)
        return (*operations.get(name, operation_by_name(name)), name in operations)

    return classify


def operation_by_name(name: str) -> Operation:
    """Guess an operation from its name alone."""
    kinds = (kind for kind, names in _NAMES.items() if re.search(names, name, re.I))
    return Operation(next(kinds, "other"))


def _op_name(line: str) -> str:
    name = _OP_NAME.search(line)
    return name[1].replace("\\'", "'") if name else ""


def _payload(op: str, type_: str, operands: str, named: list[str]) -> tuple[Shape, ...]:
    """Return the results of a gather, or operands: their types precede, or are of the `named`."""
    if op == "all-gather":
        return _arrays(type_)
    inputs = _arrays(operands) or tuple(shape for each in named for shape in _arrays(each))
    if op == "all-gather-start":  # its type is (operands, results)
        return _arrays(type_)[len(inputs) :]
    return inputs or _arrays(type_)


def _closing(line: str, start: int) -> int:
    """Return the index of the parenthesis that closes one opened before `start`."""
    depths = itertools.accumulate((letter == "(") - (letter == ")") for letter in line[start:])
    return next((start + i for i, depth in enumerate(depths) if depth < 0), len(line))


def _arrays(type_: str) -> tuple[Shape, ...]:
    arrays = _ARRAY.findall(type_)
    known = {dtype for dtype, _ in arrays if dtype in BITS or dtype.startswith("f8")}
    return tuple(Shape(dtype, _numbers(sizes)) for dtype, sizes in arrays if dtype in known)


def _table(text: str, title: str, entry: str) -> dict[str, tuple[str, ...]]:
    """Return the rows `number entry` under a title at the top of the text."""
    table = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)
    rows = re.finditer(rf"^(\d+) {entry}", table[1] if table else "", re.M)
    return {row[1]: tuple(group or "" for group in row.groups()[1:]) for row in rows}


def read_groups(line: str, devices: int) -> DeviceGroups:
    """Return the device groups of an instruction, which XLA writes in one of four forms.

    - listed: `replica_groups={{0,1},{2,3}}`, or `{}` for all devices together, or
      `source_target_pairs={{0,1},{1,0}}`
    - iota: `[2,2]<=[2,2]T(1,0)` counts from 0 in the right shape, transposes, reshapes to the left
    - mesh axes: `mesh['a'=2,'b'=2] {'b'}` groups the devices that differ along b; `'b':(1)2` is a
      part of b, 2 devices long, with 1 before it
    - mesh axes with `device_ids=([2,2]T(1,0))` or `device_ids=(0,2,1,3)`: the order of the devices

    Raises ValueError for any other form.
    """
    if pairs := re.search(rf"source_target_pairs={_LISTED}", line):
        return _listed(pairs[1])
    _, has_groups, rest = line.partition("replica_groups=")
    if not has_groups:
        raise ValueError(f"no replica_groups in {line.strip()[:200]!r}")
    if listed := re.match(_LISTED, rest):
        return _listed(listed[1]) or (tuple(range(devices)),)
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest):
        return _rows(_iota(iota[2]).reshape(_numbers(iota[1])))
    if meshed := re.match(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}", rest):
        return _mesh_groups(*meshed.groups())
    raise ValueError(f"replica_groups in an unknown form: {rest[:200]!r}")


def _listed(text: str) -> DeviceGroups:
    return tuple(_numbers(part) for part in re.findall(r"\{([\d,]*)\}", text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(text: str) -> np.ndarray:
    """Return the array of `[2,3]T(1,0)`: 0, 1, ... in a shape, then transposed."""
    shape, _, order = text.partition("T")
    sizes = _numbers(shape.strip("[]"))
    iota = np.arange(math.prod(sizes)).reshape(sizes)
    return iota.transpose(_numbers(order.strip("()"))) if order else iota


def _mesh_groups(mesh: str, ids: str | None, axes: str) -> DeviceGroups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.-]+)'?=(\d+)", mesh)}
    order = np.arange(math.prod(sizes.values()))
    if ids:
        order = _iota(ids).ravel() if ids.startswith("[") else np.array(_numbers(ids))
    crossed: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}  # parts of each axis
    for name, before, size in re.findall(r"'([\w.-]+)'(?::\((\d+)\)(\d+))?", axes):
        start = int(before or 1)
        crossed[name].append((start, start * int(size or sizes[name])))
    # Each axis is cut at the ends of its parts, so that whole axes of a finer mesh are crossed.
    shape: list[int] = []
    across: list[int] = []
    for name, size in sizes.items():
        for low, high in itertools.pairwise(sorted({1, size, *itertools.chain(*crossed[name])})):
            if any(start <= low and high <= stop for start, stop in crossed[name]):
                across.append(len(shape))
            shape.append(high // low)
    along = [axis for axis in range(len(shape)) if axis not in across]
    length = math.prod(shape[axis] for axis in across)
    return _rows(order.reshape(shape).transpose(along + across).reshape(-1, length))


def _rows(groups: np.ndarray) -> DeviceGroups:
    return tuple(map(tuple, groups.reshape(-1, groups.shape[-1]).tolist()))
