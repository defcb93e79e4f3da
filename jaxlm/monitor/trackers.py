"""Experiment trackers as sinks: Weights & Biases offline, trackio and MLflow on this machine.

A run is complete without them: what they fail to take stays in metrics.jsonl.
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

from jaxlm.core.errors import CommandError, installs
from jaxlm.monitor.sinks import Record, Sink, plain, replace

MODULES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}  # by name of the sink


def check(names: Iterable[str]) -> None:
    """Raises CommandError where a tracker is not installed."""
    for name in names:
        if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
            raise CommandError(
                f"log.sinks names {name}, which is not installed",
                where="log.sinks",
                why=f"there is no module {MODULES[name]} in this environment",
                fix=installs(name),
            )


class Guarded:
    """A sink whose first failure is said, and after which it is left alone: no run ends for it."""

    def __init__(self, name: str, make: Callable[[], Sink], warn: Callable[[str], None]):
        self._name, self._warn = name, warn
        self._sink: Sink | None = None
        self._sink = self._tried(make)

    def write(self, record: Record) -> None:
        """Takes one record, or says that it could not."""
        if (sink := self._sink) is not None:
            self._tried(lambda: sink.write(record))

    def flush(self) -> None:
        """As the sink flushes, where it still takes anything."""
        if (sink := self._sink) is not None:
            self._tried(sink.flush)

    def close(self) -> None:
        """Closes it; a second time does nothing."""
        if (sink := self._sink) is not None:
            self._tried(sink.close)
            self._sink = None

    def _tried(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # whatever a tracker raises, a network or a disk among it
            self._sink = None
            reason = (str(error).splitlines() or [""])[0][:200]
            self._warn(
                f"{self._name} takes nothing more: {type(error).__name__}: {reason}; the run goes on, "
                "and metrics.jsonl has it all"
            )
            return None


def open_tracker(name: str, workdir: Path, settings: Mapping[str, Any]) -> Sink:
    """The tracker of this name, writing below the run directory. A run that goes on goes on there too."""
    folder = workdir / name
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[..., Sink]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
    return makers[name](folder, workdir.resolve().name, settings)


class Wandb:
    """Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` sends it later.

    It is told the settings of the run and its records, and to look at nothing else: no command line, code, git or output.
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
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Queues the numbers of one record, each as split/name."""
        self._run.log({"step": record["step"], **numbers(record)})

    def flush(self) -> None:
        """What is queued is written by wandb's own process."""

    def close(self) -> None:
        """Waits until all is written."""
        self._run.finish()


class Trackio:
    """trackio, in files of the run directory: `TRACKIO_DIR=RUN/trackio trackio show`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # read when it is imported
        self._trackio = importlib.import_module("trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # that is for one object of JSON
            self._run = self._trackio.init(
                project="jaxlm",
                name=name,
                config=dict(settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, record: Record) -> None:
        """Queues the numbers of one record, each as split/name."""
        self._run.log(numbers(record), step=record["step"])

    def flush(self) -> None:
        """What is queued is written by trackio's own thread."""

    def close(self) -> None:
        """Waits until all is written."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()


class Mlflow:
    """MLflow, in files of the run directory: `mlflow ui --backend-store-uri RUN/mlflow`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its own default is a database
        tracking = importlib.import_module("mlflow.tracking")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = tracking.MlflowClient(tracking_uri=folder.resolve().as_uri())
        found = self._client.get_experiment_by_name("jaxlm")
        experiment = found.experiment_id if found else self._client.create_experiment("jaxlm")
        kept = folder / "run.txt"
        if kept.exists():
            self._id = kept.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._id, key, str(value)[:500])
        replace(kept, self._id.encode())

    def write(self, record: Record) -> None:
        """Writes the numbers of one record, each as split/name."""
        stamp = int(1000 * record["time_unix"])
        metrics = [
            self._entities.Metric(name, value, stamp, record["step"])
            for name, value in numbers(record).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def flush(self) -> None:
        """Each record is in its files when `write` returns."""

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._id)


def numbers(record: Record) -> dict[str, float]:
    """What of a record is a number, as split/name."""
    return {
        f"{record['split']}/{name}": value
        for name, given in record.items()
        if name not in ("step", "time_unix") and isinstance(value := plain(given), int | float)
    }


def _identity(folder: Path) -> str:
    """What names this run to a tracker, whenever it goes on."""
    kept = folder / "run.txt"
    if not kept.exists():
        replace(kept, uuid.uuid4().hex[:12].encode())
    return kept.read_text().strip()
