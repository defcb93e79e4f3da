"""List, inspect, compare and verify the checkpoints of a run. Nothing here writes."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoint import object_store
from jaxlm.checkpoint.record import StepRecord
from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.recipes.config import Run
from jaxlm.recipes.use import load

Place = Path | str  # a run directory, or the URL of its checkpoints


def listing(workdir: Place) -> dict[str, Any]:
    """Return a row per step from its record, and the quarantine. No array is read."""
    store = _open(workdir)
    rows = [_row(store, step) for step in store.steps()]
    return {
        "steps": rows,
        "newest": max((row["step"] for row in rows if not row["problem"]), default=None),
        "best": store.best(),
        "quarantine": [{"path": p, "reason": reason} for p, reason in store.quarantined()],
    }


def inspect(workdir: Place, step: int | None = None) -> dict[str, Any]:
    """Return the metadata and the state layout of a step, the newest by default."""
    store = _open(workdir)
    step = _named(store, step)
    record = _sound(store, step)
    leaves, groups = [], dict[str, int]()
    for path, layout in store.layout(step).items():
        name, _, sizes = layout.partition("[")
        shape = json.loads(f"[{sizes}")
        size = int(np.prod(shape)) * jnp.dtype(name).itemsize  # NumPy has no bfloat16
        leaves.append({"path": path, "dtype": name, "shape": shape, "bytes": size})
        group = path.partition("/")[0]
        groups[group] = groups.get(group, 0) + size
    meta = record.meta
    canonical = json.dumps(meta["config"], sort_keys=True).encode()
    return {
        **_row(store, step),
        "owner": record.owner,
        "finished": meta["finished"],
        "config_sha256": hashlib.sha256(canonical).hexdigest(),
        **{name: meta[name] for name in ("data", "progress", "evaluation", "rewinds")},
        "state_bytes": sum(groups.values()),
        "groups": groups,
        "leaves": leaves,
    }


def diff(workdir: Place, step: int, other_workdir: Place, other: int) -> dict[str, Any]:
    """Compare the state and the config of two steps, perhaps of two runs."""
    store, other_store = _open(workdir), _open(other_workdir)
    step, other_step = _named(store, step), _named(other_store, other)
    configs = []
    for each, number in ((store, step), (other_store, other_step)):
        raw = _sound(each, number).meta["config"]
        configs.append(config.from_json(Run, raw, where=f"config of step {number}"))
    layout, other_layout = store.layout(step), other_store.layout(other_step)
    shared = [path for path in layout if layout[path] == other_layout.get(path)]
    arrays = store.arrays(step), other_store.arrays(other_step)
    different = [
        {"path": path, **_difference(arrays[0][path], arrays[1][path])}
        for path in shared
        if arrays[0][path].tobytes() != arrays[1][path].tobytes()
    ]
    layouts = [
        {"path": path, "old": layout.get(path), "new": other_layout.get(path)}
        for path in layout | other_layout
        if layout.get(path) != other_layout.get(path)
    ]
    changes = [
        {
            "path": change.path,
            "old": config.json_value(change.old),
            "new": config.json_value(change.new),
        }
        for change in config.diff(*configs)
    ]
    return {
        "old": {"workdir": str(workdir), "step": step},
        "new": {"workdir": str(other_workdir), "step": other_step},
        "is_identical": not different and not layouts,
        "identical": len(shared) - len(different),
        "different": different,
        "layouts": layouts,
        "config": changes,
    }


def verify(workdir: Place, step: int | None = None, say: Log = lambda _: None) -> dict[str, Any]:
    """Compare size and sha256 of every file of a step, or of all steps, with the record."""
    store = _open(workdir, say)
    _named(store, step)
    sound, damaged = [], {}
    for each in store.steps() if step is None else [step]:
        lines = []
        with contextlib.suppress(FileNotFoundError):
            lines = store.problems(each)
        if each not in store.steps():  # a running job removes old checkpoints
            say(f"step {each}: removed by the run meanwhile")
        elif lines:
            say(f"step {each}: damaged")
            damaged[each] = lines
        else:
            say(f"step {each}: sound")
            sound.append(each)
    return {"sound": sound, "damaged": damaged}


def _open(workdir: Place, say: Log = lambda text: None) -> Store:
    if isinstance(workdir, str):
        return object_store.of_url(workdir, verifier=Verifier(say=say))
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        why, fix = "a run stores them in checkpoints/", "find . -name checkpoints"
        raise InputMissing("the run has no checkpoints", where=str(folder), why=why, fix=fix)
    return object_store.of_run(workdir, verifier=Verifier(say=say))


def _named(store: Store, step: int | None) -> int:
    """Return the step if it exists; for None the newest whose record can be read."""
    if step is None:
        steps = store.steps()
        readable = [each for each in steps if not _row(store, each)["problem"]]
        step = next(reversed(readable or steps), None)
    return load.committed_step(store, step)


def _sound(store: Store, step: int) -> StepRecord:
    """Return the record of an undamaged step; Orbax may read a damaged one without an error."""
    record = store.record(step)
    load.check_undamaged(store, step)
    return record


def _row(store: Store, step: int) -> dict[str, Any]:
    """Return one row of the list; `problem` is the reason if the record cannot be trusted."""
    row: dict[str, Any] = {"step": step, "problem": None}
    try:
        record = store.record(step)
    except DataError as error:
        unknown = dict.fromkeys(("bytes", "loss_nats", "healthy"))
        return row | unknown | {"problem": error.why, "time_unix": store.written(step)}
    return row | {
        "bytes": sum(size for size, _ in record.files.values()),
        "loss_nats": record.loss_nats,
        "healthy": record.healthy,
        "time_unix": store.written(step),
    }


def _difference(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Compare two arrays of one layout that differ in some bits."""
    size = a.dtype.itemsize
    words = [np.frombuffer(x.tobytes(), f"V{size}") for x in (a, b)]
    differs = words[0] != words[1]
    with np.errstate(invalid="ignore", over="ignore"):  # a diverged run has infinities
        gaps = np.abs(a.reshape(-1)[differs].astype(np.float64) - b.reshape(-1)[differs])
    return {"max_abs_difference": float(gaps.max()), "elements": len(gaps), "of": a.size}
