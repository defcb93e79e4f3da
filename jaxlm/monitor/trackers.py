"""Experiment trackers as sinks: Weights & Biases offline, trackio and MLflow on this machine.

A run is complete without them: metrics.jsonl has every record that a tracker fails to take.
"""

import contextlib
import importlib
import importlib.util
import io
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, installs
from jaxlm.monitor.sinks import NullSink, Record, Sink, numbers, replace

MODULES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}  # by name of the sink


def check(names: Iterable[str]) -> None:
    """Raise CommandError if a tracker is not installed."""
    for name in names:
        if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
            what = f"log.sinks names {name}, which is not installed"
            why = f"there is no module {MODULES[name]} in this environment"
            raise CommandError(what, where="log.sinks", why=why, fix=installs(name))


class GuardedSink:
    """A sink that warns at its first failure and is ignored afterwards; the run continues."""

    def __init__(self, name: str, make: Callable[[], Sink], warn: Log):
        self._name, self._warn = name, warn
        self._sink: Sink = NullSink()
        self._sink = self._tried(make) or self._sink

    def write(self, record: Record) -> None:
        """Write a record, or warn that the tracker failed."""
        self._tried(lambda: self._sink.write(record))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Write a continuation of a prompt, if the tracker shows text."""
        if add := getattr(self._sink, "sample", None):
            self._tried(lambda: add(step, prompt, text))

    def flush(self) -> None:
        """Flush the tracker unless it failed."""
        self._tried(self._sink.flush)

    def close(self) -> None:
        """Close the tracker; a second call does nothing."""
        self._tried(self._sink.close)
        self._sink = NullSink()

    def _tried(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # trackers raise any error, of networks and disks too
            self._sink = NullSink()
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            failed = f"{self._name} failed and gets no more records: {reason}"
            self._warn(f"{failed}; the run continues, and metrics.jsonl has all records")
            return None


def open_tracker(name: str, workdir: Path, settings: Mapping[str, Any]) -> Sink:
    """Open a tracker that writes below the run directory; a resumed run continues its record."""
    folder = workdir / name
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Any] = {"wandb": _Wandb, "trackio": _Trackio, "mlflow": _Mlflow}
    return makers[name](folder, workdir.resolve().name, settings)


class _Wandb(NullSink):
    """Weights & Biases, offline unless WANDB_MODE is set; `wandb sync` uploads the run later.

    It gets the settings and the records, but no command line, code, git state or output.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project="jaxlm",
            name=name,
            id=_identity(folder),
            resume=None if mode == "offline" else "allow",
            dir=str(folder),
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(
                **dict(console="off", silent=True, disable_git=True, disable_code=True),
                **dict(x_disable_meta=True, x_disable_stats=True, x_save_requirements=False),
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log({"step": record["step"], **numbers(record)})

    def close(self) -> None:
        self._run.finish()


class _Trackio(NullSink):
    """trackio, in files of the run directory: `TRACKIO_DIR=RUN/trackio trackio show`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # read at import
        self._trackio = importlib.import_module("trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # stdout is reserved for one JSON object
            options = dict(resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
            config = dict(settings)
            self._run = self._trackio.init(project="jaxlm", name=name, config=config, **options)

    def write(self, record: Record) -> None:
        self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()


class _Mlflow(NullSink):
    """MLflow, in files of the run directory: `mlflow ui --backend-store-uri RUN/mlflow`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the default is a database
        tracking = importlib.import_module("mlflow.tracking")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = tracking.MlflowClient(tracking_uri=folder.resolve().as_uri())
        existing = self._client.get_experiment_by_name("jaxlm")
        experiment = existing.experiment_id if existing else self._client.create_experiment("jaxlm")
        id_file = folder / "run.txt"
        if id_file.exists():
            self._id = id_file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._id, key, str(value)[:500])
        replace(id_file, self._id.encode())

    def write(self, record: Record) -> None:
        stamp, step = int(1000 * record["time_unix"]), record["step"]
        named = numbers(record).items()
        metrics = [self._entities.Metric(name, value, stamp, step) for name, value in named]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _identity(folder: Path) -> str:
    """Return the run's id for a tracker, the same whenever the run resumes."""
    id_file = folder / "run.txt"
    if not id_file.exists():
        replace(id_file, uuid.uuid4().hex[:12].encode())
    return id_file.read_text().strip()
