"""State and results of runs, from the files of their directories alone. Free of JAX."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing, InUse
from jaxlm.monitor import report, sinks
from jaxlm.monitor.sinks import Record
from jaxlm.training import lock
from jaxlm.training.rundir import imported_facts

FINISHED, DIVERGED = 0, 79  # exit codes after which a run does not continue
STOPPED = (75, 130)  # exit codes of a run that was interrupted, with its state saved
HIDDEN = ("checkpoints", "events", "plots", "quarantine")  # folders of a run without runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run directory in a line of `jaxlm runs`.

    Args:
      path: the run directory.
      status: running, finished, stopped (it can resume), killed (without an exit code), failed,
        damaged; or imported, merged, pruned, quantized, averaged, without steps of its own.
      code: exit code of the last start; None while it runs, or after a kill.
      cause: cause of the end, or what is damaged.
      step, steps: completed steps, and those of the config.
      best: lowest loss in nats of the validation set that ranks checkpoints; the negative of its
        highest reward if `is_rewarded`.
      tokens_per_second: median of the logged steps.
      time_unix: time of the last record or of the end.
      config: config.json.
      records: records of metrics.jsonl.
    """

    path: Path
    status: str
    code: int | None = None
    cause: str = ""
    step: int | None = None
    steps: int | None = None
    best: float | None = None
    is_rewarded: bool = False
    tokens_per_second: float | None = None
    time_unix: float | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    records: Sequence[Record] = dataclasses.field(default=(), repr=False)

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON, without config and records."""
        names = [field.name for field in dataclasses.fields(self) if field.repr]
        return {name: getattr(self, name) for name in names} | {"path": str(self.path)}


def find(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder and below it, the newest first; damaged ones among them.

    A folder that this process may not list is a damaged run.

    Raises InputMissing if there is no such folder, OSError if it cannot be listed.
    """
    if not folder.is_dir():
        raise InputMissing(
            "there is no such folder",
            where=str(folder),
            why="runs are searched in it and below it",
            fix="find . -name checkpoints",
        )
    unreadable = list[OSError]()
    runs = [summarize(path) for path in _run_folders(folder, unreadable.append)]
    for error in unreadable:
        if Path(error.filename) == folder:
            raise error
        cause = error.strerror or type(error).__name__
        runs.append(RunSummary(path=Path(error.filename), status="damaged", cause=cause))
    return sorted(runs, key=lambda run: (-(run.time_unix or 0.0), str(run.path)))


def _run_folders(folder: Path, onerror: Callable[[OSError], None]) -> Iterator[Path]:
    for path, names, files in os.walk(folder, onerror=onerror):
        has_steps = "config.json" in files and ("lock" in files or "checkpoints" in names)
        if has_steps or "exit.json" in files or "metrics.jsonl" in files:
            yield Path(path)
            names[:] = [name for name in names if name not in HIDDEN]
        names[:] = sorted(name for name in names if not name.startswith("."))


def summarize(path: Path) -> RunSummary:
    """Return the state and the results of a run; one that cannot be read is damaged."""
    try:
        return read(path)
    except (DataError, OSError) as error:
        cause = f"{error.where}: {error.why}" if isinstance(error, DataError) else str(error)
        return RunSummary(path=path, status="damaged", cause=cause)


def read(path: Path) -> RunSummary:
    """Return the state and the results of a run.

    Raises DataError if a file of the run is damaged.
    """
    config = report.read_object(path / "config.json")
    records = sinks.read(path / "metrics.jsonl")
    end = report.read_object(path / "exit.json", report.EXIT)
    train = [each for each in records if each.get("split") == "train"]
    speeds = [each["tokens_per_second"] for each in train if each.get("tokens_per_second")]
    ranking = ranking_split(config, records)
    # Step 0, before the first update, ranks no checkpoint.
    ranked = [
        record | {"loss_nats": sinks.ranking_loss(record)}
        for record in records
        if record.get("split") == ranking
    ]
    scores = [loss for step, loss in values(ranked, ranking, "loss_nats") if step]
    times = [each["time_unix"] for each in (*records[-1:], end) if each.get("time_unix")]
    steps = config.get("train", {}).get("steps")
    step = max((each["step"] for each in records), default=None)
    if sinks.is_step(end.get("step")):
        step = end["step"]
    made = imported_facts(path) if not records else {}
    # With patience a run may end before its last step.
    is_whole = step == steps or config.get("train", {}).get("patience") is not None
    status = str(made.get("status", "imported")) if made else _status(path, end, is_whole)
    return RunSummary(
        path=path,
        status=status,
        code=None if status == "running" else end.get("code"),
        cause=end.get("cause", "") if status in ("failed", "stopped") else "",
        step=step,
        steps=None if made else steps,
        best=min(scores, default=None),
        is_rewarded=has_rewards(records, ranking),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        time_unix=max(times, default=None),
        config=config,
        records=records,
    )


def _status(path: Path, end: Record, is_whole: bool) -> str:
    try:
        lock.check_free(path / "lock")
    except InUse:
        return "running"
    if not end:
        return "killed"
    if end["code"] in STOPPED:
        return "stopped"
    if end["code"] != FINISHED:
        return "failed"
    return "finished" if is_whole else "stopped"


def ranking_split(config: Record, records: Sequence[Record]) -> str | None:
    """Return the validation set that ranks checkpoints; None if none was evaluated."""
    splits = dict.fromkeys(each.get("split") for each in records if "loss_nats" in each)
    sets = [split for split in splits if split not in ("train", None)]
    followed = config.get("eval", {}).get("follow")
    return followed if followed in sets else next(iter(sets), None)


def has_rewards(records: Sequence[Record], split: str | None) -> bool:
    """Return whether records of a split have rewards; their losses are then the negatives."""
    return any("reward" in each for each in records if each.get("split") == split)


def values(records: Sequence[Record], split: str | None, metric: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric; a rewound step counts as it was computed last."""
    scored = [r for r in records if r.get("split") == split and r.get(metric) is not None]
    return sorted({each["step"]: each[metric] for each in scored}.items())
