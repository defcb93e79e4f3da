"""Profiler trace of a few steps, and the time breakdown from the JSON that JAX writes with it."""

import contextlib
import gzip
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.monitor import formatting
from jaxlm.monitor.config import ProfileConfig

MARK = "jaxlm "  # prefix of the loop's annotations in a trace
KINDS = ("matmul", "attention", "communication", "other")
TOP = 10  # operations listed
MAX_EVENTS = 1_000_000  # limit of the JSON that JAX writes
GRAPH = "command_buffer"  # the operation of all kernels of a CUDA graph: their names are kept

Kind = tuple[str, str, bool]  # of an operation; its source line, and whether it is in the program
Classify = Callable[[str], Kind]  # by the operation's name


class TraceEvent(NamedTuple):
    """A named event; times are in microseconds."""

    name: str
    begin: float
    end: float


Spans = list[tuple[TraceEvent, str]]  # with the kind that each counts for


def newest_trace(folder: Path) -> Path:
    """Return the newest trace under `folder`. Raises ValueError if there is none."""
    traces = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise ValueError(f"no *.trace.json.gz under {folder}")
    return traces[-1]


def summary(path: Path, classify: Classify) -> dict[str, Any]:
    """Return the top operations by time, and the shares of the window's time, which add up to 1.

    A moment is divided equally among all operations that run in it, on any device or thread. A
    moment without operations counts as `data_wait` while the loop waits for its batch, else as
    `python`: Python, kernel launches, and everything else. Raises ValueError if the trace is
    damaged or holds no operation.
    """
    try:
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        operations, marks, where = _spans(events)
    except (EOFError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
    kinds = {name: classify(name) for name in {span.name for span in operations}}
    operations = [span for span in operations if kinds[span.name][0] != "control"]
    if not operations:
        raise ValueError(f"{path.name} holds no operation of a device")
    begin = min(span.begin for span in marks or operations)
    end = max(span.end for span in (*marks, *operations))
    spans = [(span, kinds[span.name][0]) for span in operations]
    spans += [(span, "data_wait") for span in marks if span.name == "data"]
    shares = dict.fromkeys((*KINDS, "data_wait", "python"), 0.0)
    for what, time in _shared(spans, begin, end):
        shares[what] += time / (end - begin)
    unknown = sum(not kinds[span.name][2] for span in operations)
    return {
        "seconds": (end - begin) / 1e6,
        "steps": sum(span.name == "step" for span in marks),
        "shares": shares,
        "operations": _top(operations, kinds),
        "not_told": _limits(f"{unknown} of {len(operations)}", where, bool(marks), len(events)),
        "trace": path.name,
    }


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Format a summary as labeled lines."""
    shares = result["shares"]
    names = {"other": "other operations", "data_wait": "data wait", "python": "Python and other"}
    kinds = [f"{share:6.1%} {names.get(kind, kind)}" for kind, share in shares.items()]
    rows = [
        f"{each['share']:6.1%} {formatting.number(1e3 * each['seconds'], 3)} ms "
        f"in {each['count']}: {', '.join(filter(None, map(each.get, ('name', 'kind', 'source'))))}"
        for each in result["operations"]
    ]
    blocks = {"share of time": kinds, "operations": rows, "limits": result["not_told"]}
    return [(label, "\n".join(lines)) for label, lines in blocks.items()]


def _spans(events: list[dict[str, Any]]) -> tuple[list[TraceEvent], list[TraceEvent], str]:
    """Return the operations, the loop's annotations, and "devices" or "threads of the host".

    A TPU has a lane of operations; a GPU has streams, and other lanes that repeat them; a CPU's
    operations are among other events of the host's threads. XLA runs most kernels of a GPU as CUDA
    graphs, and a trace has only the names of the kernels in them.
    """
    named = [each for each in events if each.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = [each for each in named if each["name"] == "thread_name"]
    lanes = {(each["pid"], each["tid"]): each["args"]["name"] for each in threads}
    on_device, on_host, marks = [], [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        begin, args = float(event["ts"]), event.get("args", {})
        end = begin + float(event.get("dur", 0))
        process, lane = processes.get(event["pid"], ""), lanes.get((event["pid"], event["tid"]), "")
        if event["name"].startswith(MARK):
            marks.append(TraceEvent(event["name"].removeprefix(MARK), begin, end))
        elif not process.startswith("/device:"):
            if "hlo_op" in args:
                on_host.append(TraceEvent(args["hlo_op"], begin, end))
        elif lane.startswith("XLA Ops" if "TPU" in process else "Stream"):
            operation = args.get("hlo_op", GRAPH)
            name = event["name"] if operation.startswith(GRAPH) else operation
            on_device.append(TraceEvent(name, begin, end))
    return on_device or on_host, marks, "devices" if on_device else "threads of the host"


def _shared(spans: Spans, begin: float, end: float) -> Iterator[tuple[str, float]]:
    """Yield the kind that each interval between two events counts for, and its length."""
    edges = [(span.begin, what, 1) for span, what in spans]
    edges += [(span.end, what, -1) for span, what in spans]
    running: Counter[str] = Counter()
    last = begin
    for time, what, change in (*sorted(edges), (end, "", 0)):
        stretch, last = time - last, max(time, last)
        if stretch > 0:
            total = sum(running[each] for each in KINDS)
            for each in KINDS:
                if running[each]:
                    yield each, stretch * running[each] / total
            if not total:
                yield "data_wait" if running["data_wait"] else "python", stretch
        running[what] += change


def _top(operations: list[TraceEvent], kinds: dict[str, Kind]) -> list[dict[str, Any]]:
    """Return the operations with the largest total time; shares are of all operations."""
    counts = Counter(span.name for span in operations)
    times: defaultdict[str, float] = defaultdict(float)
    for span in operations:
        times[span.name] += (span.end - span.begin) / 1e6
    total = sum(times.values()) or 1.0
    rows = []
    for name, seconds in sorted(times.items(), key=lambda item: -item[1])[:TOP]:
        kind, source, _ = kinds[name]
        row = {"name": name, "kind": kind, "source": source, "count": counts[name]}
        rows.append({**row, "seconds": seconds, "share": seconds / total})
    return rows


def _limits(unknown: str, where: str, has_marks: bool, events: int) -> list[str]:
    """Return the limits of what the figures can show."""
    name_only = "their kind is derived from the name alone"
    lines = [
        f"{unknown} operations are not in the step's program: {name_only}",
        f"operations ran on {where}; simultaneous operations share a moment equally",
        "operations fused with a matmul count as matmul; evaluation, saving and Python are one",
    ]
    if not has_marks:
        lines.append("the wait for data is unknown: the trace does not contain the loop")
    if events >= MAX_EVENTS:
        lines.append(f"events after the first {MAX_EVENTS:,} are missing: the file ends there")
    return lines


class Trace:
    """Traces the steps of the config's window in this process with jax.profiler.

    `before(step)` must be called before each step with the number of completed steps, and `written`
    is called once the trace is on the disk. Read the result in the `folder` with `tensorboard
    --logdir` and its profile plugin, or xprof.
    """

    def __init__(
        self,
        config: ProfileConfig,
        folder: str | os.PathLike[str],
        written: Callable[[], object] = lambda: None,
    ):
        self.folder, self._window, self._written = Path(folder), config.window, written
        self._running = False
        self._mark = contextlib.ExitStack()

    def is_due(self, step: int) -> bool:
        """Return True if the trace begins or ends before this step."""
        return self._running != (step in self._window)

    def before(self, step: int) -> None:
        """Begin or end the trace if due, with idle devices, so that it contains whole steps."""
        if not self.is_due(step):
            return
        import jax

        jax.block_until_ready(jax.live_arrays())
        if self._running:
            self.close()
            return
        # Tracing Python's calls, thousands a step, slows steps and crowds out operations.
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._running = True

    def enter(self, phase: str) -> None:
        """Annotate the following phase of the loop in the trace: "data" or "step"."""
        self._mark.close()
        if self._running:
            import jax

            self._mark.enter_context(jax.profiler.TraceAnnotation(f"{MARK}{phase}"))

    def close(self) -> None:
        """End a running trace."""
        self._mark.close()
        if self._running:
            import jax

            jax.profiler.stop_trace()
            self._running = False
            self._written()
