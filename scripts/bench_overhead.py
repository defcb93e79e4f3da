"""Host time of a step and of a save, by devices of a process and by processes.

    python scripts/bench_overhead.py --steps=200

Trains a model of 15,000 parameters on fake devices of a CPU: one process with 1, 2, 4 and 8
devices, then 1, 2 and 4 processes with two devices each on loopback. The batch has two rows for
each device. Processor time is that of the main thread, which dispatches steps, so that other
programs of the machine hardly change it. Times of the clock are medians. One line of JSON for each
layout, then the fits that scripts/scaling_model.md has:

- a process dispatches to its devices alone, so milliseconds of a step are fitted by its devices;
- requests to the coordinator and their milliseconds are fitted by processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.training.launch import free_port

ROOT = Path(__file__).parent.parent
DEVICES = (1, 2, 4, 8)  # of one process
PROCESSES = (1, 2, 4)  # with two devices each
FIRST = 20  # steps that are not counted: the first ones compile, and fill caches
SETTINGS = {
    "data.tokenizer": "bytes",
    "data.sequence": 32,
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.hidden": 64,
    "optim.lr": 1e-3,
    "eval.every": 0,
    "sample.every": 0,
    "log.every": 10,
    "log.sinks": "()",
    "mesh.data": 1,
    "mesh.fsdp": "auto",
}


class Recorder:
    """Seconds and numbers of calls by name, each in the order of its calls."""

    def __init__(self) -> None:
        self.processor: defaultdict[str, list[float]] = defaultdict(list)
        self.clock: defaultdict[str, list[float]] = defaultdict(list)
        self.begun: defaultdict[str, list[float]] = defaultdict(list)  # processor time

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Record the calls of a method of a class."""
        original: Callable[..., Any] = getattr(owner, method)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            clock, processor = time.perf_counter(), time.thread_time()
            self.begun[name].append(processor)
            try:
                return original(*args, **kwargs)
            finally:
                self.clock[name].append(time.perf_counter() - clock)
                self.processor[name].append(time.thread_time() - processor)

        setattr(owner, method, recorded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        sys.exit(record(options.train))
    layouts = [(1, devices) for devices in DEVICES] + [(count, 2) for count in PROCESSES[1:]]
    every: defaultdict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for layout in layouts:
                place = Path(folder) / f"{number}-{layout[0]}x{layout[1]}"
                every[layout].append(measure(*layout, place, options.steps))
    rows = {layout: medians(measured) for layout, measured in every.items()}
    for (processes, devices), row in rows.items():
        print(json.dumps({"processes": processes, "devices": devices} | row))
    by_devices = [rows[1, devices]["loop_ms"] for devices in DEVICES]
    print(json.dumps({"loop_ms_by_devices": fit(DEVICES, by_devices)}))
    for name in ("save_ms", "requests_per_step", "start_ms"):
        figures = [rows[processes, 2][name] for processes in PROCESSES]
        print(json.dumps({f"{name}_by_processes": fit(PROCESSES, figures)}))


def medians(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the medians of several rounds by name."""
    return {
        name: round(statistics.median(row[name] for row in measured), 3) for name in measured[0]
    }


def fit(counts: Sequence[int], figures: Sequence[float]) -> dict[str, float]:
    """Return the line through figures by counts: `at_one`, and `each` further one."""
    each, constant = np.polyfit(counts, figures, 1)
    return {"at_one": round(float(each + constant), 3), "each": round(float(each), 3)}


def measure(processes: int, devices: int, folder: Path, steps: int) -> dict[str, float]:
    """Train on a layout, and return the figures of its first process.

    Args:
      processes: number of processes.
      devices: fake devices of each process.
      folder: new folder of the run.
      steps: number of steps.
    """
    folder.mkdir()
    settings = SETTINGS | {
        "data.train": str(ROOT / "jaxlm" / "recipes" / "**" / "*.py"),
        "train.batch": 2 * devices * processes,
        "train.steps": steps,
        "checkpoint.every": steps // 10,
    }
    words = [f"--config.{name}={value}" for name, value in settings.items()]
    address = f"127.0.0.1:{free_port()}"
    started = []
    for rank in range(processes):
        several = [
            f"--coordinator={address}",
            f"--num_processes={processes}",
            f"--process_id={rank}",
        ]
        command = [
            *(sys.executable, __file__, "--train", "train", "--config=quickstart", "--quiet"),
            *(f"--workdir={folder / 'run'}", f"--cpu_devices={devices}", *words),
            *(several if processes > 1 else []),
        ]
        report = {"OVERHEAD_REPORT": str(folder / f"{rank}.json")}
        started.append(subprocess.Popen(command, env=os.environ | report))
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{processes} processes with {devices} devices ended with {codes}")
    return json.loads((folder / "0.json").read_text())


def record(words: list[str]) -> int:
    """Run a command of jaxlm, and write its figures to $OVERHEAD_REPORT."""
    from jaxlm.cli.main import main as run
    from jaxlm.monitor import plots
    from jaxlm.parallel import host, rendezvous
    from jaxlm.parallel.peers import Peers
    from jaxlm.recipes.train.programs import CompiledStep
    from jaxlm.recipes.train.trainer import Trainer
    from jaxlm.training.loop import TrainLoop

    recorder = Recorder()
    plots.draw = lambda run: []  # plots are no part of the loop
    recorder.wrap(CompiledStep, "__call__", "step")
    recorder.wrap(TrainLoop, "run", "loop")
    recorder.wrap(Trainer, "save", "save")
    recorder.wrap(host, "put", "put")
    recorder.wrap(rendezvous, "rendezvous", "start")
    recorder.wrap(Peers, "_get", "request")
    recorder.wrap(Peers, "barrier", "request")
    recorder.wrap(Peers, "signs", "poll")
    if code := run(words):
        return code
    calls, seconds = len(recorder.processor["step"]), sum(recorder.clock["loop"])
    figures = {
        "loop_ms": 1e3 * statistics.median(np.diff(recorder.begun["step"])[FIRST:]),
        "dispatch_ms": 1e3 * statistics.median(recorder.processor["step"][FIRST:]),
        "put_ms": 1e3 * statistics.median(recorder.processor["put"][FIRST:]),
        "save_ms": 1e3 * statistics.median(recorder.clock["save"]),
        "save_processor_ms": 1e3 * statistics.median(recorder.processor["save"]),
        "requests_per_step": len(recorder.clock["request"]) / calls,
        "request_ms": 1e3 * statistics.median(recorder.clock["request"] or [0.0]),
        "polls_per_second": len(recorder.clock["poll"]) / seconds,
        "start_ms": 1e3 * sum(recorder.clock["start"]),
    }
    Path(os.environ["OVERHEAD_REPORT"]).write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    main()
