"""Trackers get every number and no secret, offline; what they cannot take ends nothing.

Those that this environment lacks are left out: they are extras, and too large for that of the
tests.
"""

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
import sys

import pytest

from jaxlm.core.errors import CommandError
from jaxlm.monitor import trackers
from jaxlm.monitor.trackers import GuardedSink
from tests.faults.conftest import ROOT

CANARY = "canary-5fd1"
# Two sessions of one run, each of three steps, in a process of their own.
SCRIPT = """
import json, pathlib, sys
from jaxlm.monitor import trackers
name, folder = sys.argv[1:]
for first in (1, 4):
    config = {"optim.lr": 0.001, "model.family": "llama"}
    sink = trackers.open_tracker(name, pathlib.Path(folder), config)
    for step in range(first, first + 3):
        record = {"step": step, "time_unix": 1e9 + step, "split": "train", "loss_nats": 1 / step}
        sink.write(record | {"layers/0/grad_norm": 2.0 * step, "note": "no number"})
    sink.flush()
    sink.close()
print(json.dumps("done"))
"""
EXPECTED = {
    step: {"train/loss_nats": 1 / step, "train/layers/0/grad_norm": 2.0 * step}
    for step in range(1, 7)
}


def of_mlflow(folder):
    (run,) = [path for path in folder.glob("*/*") if path.is_dir()]
    values = {}
    for path in (run / "metrics").rglob("*"):
        for line in path.read_text().splitlines() if path.is_file() else ():
            _, value, step = line.split()[:3]
            name = str(path.relative_to(run / "metrics"))
            values.setdefault(int(step), {})[name] = float(value)
    assert (run / "params/model.family").read_text() == "llama"
    return values


def of_trackio(folder):
    with contextlib.closing(sqlite3.connect(folder / "jaxlm.db")) as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
        assert database.execute("select count(distinct run_id) from metrics").fetchone() == (1,)
    return {step: json.loads(text) for step, text in rows}


def of_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    values = {}
    for path in folder.rglob("*.wandb"):
        for data in _leveldb(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if items:
                values[items["step"]] = {k: v for k, v in items.items() if k.startswith("train/")}
    return values


def _leveldb(log):
    """Records of LevelDB's log format: parts with checksum, length and kind, in 32 KiB blocks."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = struct.unpack("<HB", log[at + 4 : at + 7])
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a record that is whole, or its last part
            yield whole
            whole = b""


READERS = {"wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow}


@pytest.mark.trackers
@pytest.mark.parametrize("name", trackers.MODULES)
def test_s8_every_number_comes_back_over_two_sessions_and_no_secret(name, tmp_path):
    secrets = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"), CANARY * 4)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(tmp_path)],
        cwd=ROOT, env=env | secrets | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == '"done"\n'
    assert READERS[name](tmp_path / name) == EXPECTED
    for path in tmp_path.rglob("*"):
        assert CANARY.encode() not in (path.read_bytes() if path.is_file() else b""), path


class Failing:
    """A sink that takes one record and then finds the disk full."""

    def __init__(self):
        self.taken = []

    def write(self, record):
        if self.taken:
            raise OSError(28, "No space left on device\nand more")
        self.taken.append(record)

    def flush(self):
        pass

    def close(self):
        raise RuntimeError("never reached")


def test_a_sink_that_fails_is_said_once_and_left_alone():
    output, inner = [], Failing()
    sink = GuardedSink("wandb", lambda: inner, output.append)
    for step in range(4):
        sink.write({"step": step})
    sink.flush()
    sink.close()
    assert inner.taken == [{"step": 0}]
    (text,) = output
    assert text.startswith(
        "wandb failed and gets no more records: OSError: [Errno 28] No space left on device;"
    )


def test_a_sink_that_cannot_be_opened_ends_nothing():
    def refuse():
        raise ConnectionError("network down")

    output = []
    sink = GuardedSink("mlflow", refuse, output.append)
    sink.write({"step": 1})
    sink.close()
    assert len(output) == 1
    assert "network down" in output[0]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    trackers.check(("console", "tensorboard"))
    with pytest.raises(CommandError, match="which is not installed") as caught:
        trackers.check(("console", "wandb"))
    assert "jaxlm[wandb]" in caught.value.fix
