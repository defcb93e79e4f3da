"""Where the time of a traced window went, read from the trace-event JSON that JAX writes beside its own format."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.monitor import formatting

MARK = "jaxlm "  # before the name of what the loop does, in the trace
KINDS = ("matmul", "attention", "communication", "other")
TOP = 10  # operations that are named
MOST_EVENTS = 1_000_000  # that JAX writes into the JSON

# The kind of an operation by its name, its source line, and whether more than the name told them.
Tell = Callable[[str], tuple[str, str, bool]]


class Span(NamedTuple):
    """An event with a name, in microseconds."""

    name: str
    begin: float
    end: float


def newest(folder: Path) -> Path:
    """The trace that was written last under `folder`. Raises ValueError where there is none."""
    found = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"no *.trace.json.gz under {folder}")
    return found[-1]


def summary(path: Path, tell: Tell) -> dict[str, Any]:
    """The top operations by time and the shares of what the window's time went to, which add up to 1.

    Each moment is shared equally between the operations that run in it, on whatever device or thread. A moment in which none
    runs is `data_wait` while the loop waits for its batch, else `python`: Python, launching, and whatever else.

    Raises:
      ValueError: where the trace is damaged or holds no operation.
    """
    try:
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        operations, marks, where = _spans(events)
    except (EOFError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
    told = {name: tell(name) for name in {span.name for span in operations}}
    operations = [span for span in operations if told[span.name][0] != "control"]
    if not operations:
        raise ValueError(f"{path.name} holds no operation of a device")
    waits = [span for span in marks if span.name == "data"]
    begin = min(span.begin for span in marks or operations)
    end = max(span.end for span in (*marks, *operations))
    shares = dict.fromkeys((*KINDS, "data_wait", "python"), 0.0)
    for what, time in _shared(operations, waits, begin, end, lambda name: told[name][0]):
        shares[what] += time / (end - begin)
    return {
        "seconds": (end - begin) / 1e6,
        "steps": sum(span.name == "step" for span in marks),
        "shares": shares,
        "operations": _top(operations, told),
        "not_told": list(_not_told(len(events), where, operations, told, bool(marks))),
        "trace": path.name,
    }


def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A summary as labelled lines."""
    shares = found["shares"]
    names = {"other": "other operations", "data_wait": "data wait", "python": "Python and other"}
    lines = [("share of time", "\n".join(f"{share:6.1%} {names.get(kind, kind)}" for kind, share in shares.items()))]  # fmt: skip
    rows = [
        f"{each['share']:6.1%} {formatting.number(1e3 * each['seconds'], 3)} ms in {each['count']}: {each['name']}, {each['kind']}"
        + (f", {each['source']}" if each["source"] else "")
        for each in found["operations"]
    ]
    lines.append(("operations", "\n".join(rows)))
    lines.append(("not told", "\n".join(found["not_told"])))
    return lines


def _spans(events: list[dict[str, Any]]) -> tuple[list[Span], list[Span], str]:
    """The operations, the marks of the loop, and where the operations ran: a host's threads or devices.

    A TPU has a lane of operations; a GPU has streams, beside lanes that say the same again; a CPU's operations lie on the
    host's threads, among much else.
    """
    processes: dict[Any, str] = {}
    lanes: dict[Any, str] = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "M" and event["name"] == "thread_name":
            lanes[event["pid"], event["tid"]] = event["args"]["name"]
    on_device, on_host, marks = [], [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        begin, args = float(event["ts"]), event.get("args", {})
        end = begin + float(event.get("dur", 0))
        process, lane = processes.get(event["pid"], ""), lanes.get((event["pid"], event["tid"]), "")
        if event["name"].startswith(MARK):
            marks.append(Span(event["name"].removeprefix(MARK), begin, end))
        elif not process.startswith("/device:"):
            if "hlo_op" in args:
                on_host.append(Span(args["hlo_op"], begin, end))
        elif lane.startswith("XLA Ops" if "TPU" in process else "Stream"):
            on_device.append(Span(args.get("hlo_op", event["name"]), begin, end))
    return on_device or on_host, marks, "devices" if on_device else "threads of the host"


def _shared(
    operations: list[Span],
    waits: list[Span],
    begin: float,
    end: float,
    kind: Callable[[str], str],
) -> Iterator[tuple[str, float]]:
    """What each stretch between two events goes to, and how much of it."""
    edges = [(span.begin, kind(span.name), 1) for span in operations]
    edges += [(span.end, kind(span.name), -1) for span in operations]
    edges += [(span.begin, "data_wait", 1) for span in waits]
    edges += [(span.end, "data_wait", -1) for span in waits]
    running: Counter[str] = Counter()
    last = begin
    for time, what, change in (*sorted(edges), (end, "", 0)):
        stretch, last = time - last, max(time, last)
        if stretch > 0:
            total = sum(running[each] for each in KINDS)
            if total:
                for each in KINDS:
                    if running[each]:
                        yield each, stretch * running[each] / total
            else:
                yield "data_wait" if running["data_wait"] else "python", stretch
        running[what] += change


def _top(
    operations: Iterable[Span], told: dict[str, tuple[str, str, bool]]
) -> list[dict[str, Any]]:
    """The operations that took longest, all their times together; shares are of all operations."""
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for span in operations:
        times[span.name] += (span.end - span.begin) / 1e6
        counts[span.name] += 1
    total = sum(times.values()) or 1.0
    return [
        {
            "name": name,
            "kind": told[name][0],
            "source": told[name][1],
            "count": counts[name],
            "seconds": times[name],
            "share": times[name] / total,
        }
        for name in sorted(times, key=lambda name: -times[name])[:TOP]
    ]


def _not_told(
    events: int,
    where: str,
    operations: list[Span],
    told: dict[str, tuple[str, str, bool]],
    has_marks: bool,
) -> Iterator[str]:
    """What a reader could take the figures for, and should not."""
    unknown = sum(not told[span.name][2] for span in operations)
    yield f"{unknown} of {len(operations)} operations are not in the step's program: their names alone say their kind"
    yield f"operations ran on {where}; where several ran at once, each has an equal part of the moment"
    yield "what is fused with a matmul counts as matmul; evaluation, saving and Python are not told apart"
    if not has_marks:
        yield "the wait for data: the trace does not hold the loop"
    if events >= MOST_EVENTS:
        yield f"what came after the first {MOST_EVENTS:,} events: the file ends there"
