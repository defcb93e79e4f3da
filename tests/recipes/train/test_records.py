"""`log.sinks` of a run: what each of them is handed."""

import json

import pytest

from jaxlm.cli.main import main
from jaxlm.monitor import trackers
from tests.faults import harness
from tests.monitor.test_sinks import scalars

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {"train.steps": 4, "eval.every": 2, "checkpoint.every": 4}
SINKS = "--config.log.sinks=('tensorboard','wandb','mlflow')"


class Kept:
    """A tracker that keeps what it is handed, or takes no more than a number of records."""

    def __init__(self, most):
        self.most, self.records, self.closed = most, [], 0

    def write(self, record):
        if len(self.records) == self.most:
            raise OSError("the network is gone")
        self.records.append(record)

    def flush(self):
        pass

    def close(self):
        self.closed += 1


def test_trackers_get_each_record_once_and_one_that_fails_ends_no_run(tmp_path, monkeypatch):
    opened = {}

    def opening(name, workdir, settings):
        assert (workdir, settings["optim.lr"]) == (tmp_path / "run", 3e-3)
        return opened.setdefault(name, Kept({"wandb": 1000, "mlflow": 2}[name]))

    monkeypatch.setattr(trackers, "open_tracker", opening)
    monkeypatch.setattr(trackers, "MODULES", {"wandb": "json", "mlflow": "json"})
    config = harness.write_config(tmp_path, SETTINGS)
    assert main(harness.words(config, tmp_path / "run", SINKS)) == 0
    written = harness.records(tmp_path / "run")
    assert {record["split"] for record in written} == {"train", "val"}
    assert json.loads(json.dumps(opened["wandb"].records)) == written
    assert opened["wandb"].closed == 1
    assert json.loads(json.dumps(opened["mlflow"].records)) == written[:2]
    warned = (tmp_path / "run/warnings.jsonl").read_text()
    assert warned.count("mlflow failed and gets no more records: OSError: the network is gone") == 1
    events = {(step, tag): value for step, tag, value in scalars(tmp_path / "run/events")}
    for record in written:
        tag = record["step"], f"loss/{record['split']}"
        assert events.pop(tag) == pytest.approx(record["loss_nats"], rel=1e-6)
    assert not [tag for _, tag in events if tag.startswith("loss/")]
