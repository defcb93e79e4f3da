"""Training as a function: what a notebook calls, and its callbacks."""

import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

import jaxlm
from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.recipes.config import Run
from tests import machine
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {"train.steps": 6, "eval.every": 3}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.mark.slow
def test_a_run_tells_its_callbacks_what_it_writes_and_ends_where_one_asks_or_fails(
    config, tmp_path
):
    """It ends after the step that is computed meanwhile, which is saved; the same call resumes."""
    events, run = [], tmp_path / "run"

    def stop(step, metrics):
        events.append(metrics)
        return step == 2

    same = {"workdir": run, "settings": {"optim.lr": 1e-3}, "quiet": True}
    result = jaxlm.train(config, callbacks=[stop], **same)
    assert (result.step, result.complete, result.workdir) == (3, False, run)
    assert [(r["split"], r["step"]) for r in events] == [
        ("train", 1), ("train", 2), ("train", 3), ("val", 3),
    ]  # fmt: skip
    written = harness.records(run)
    assert [r["loss_nats"] for r in events] == [r["loss_nats"] for r in written]
    assert result.metrics["loss_nats"] == written[-1]["loss_nats"]
    assert harness.steps(run)[-1] == 3
    assert "--config.optim.lr=0.001" in (run / "command.sh").read_text()

    def fail(step, metrics):
        if step == 4:
            raise ZeroDivisionError("mine")

    value = configs.load(Run, config).value
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        jaxlm.train(value, callbacks=[fail, events.append], **same)
    assert "fail" in [entry.name for entry in caught.traceback]
    assert harness.steps(run)[-1] == 5
    assert harness.exit_of(run)["code"] == 70
    assert f"--config={run}/config.json" in (run / "command.sh").read_text()
    assert len(events) == 4, "the other was not called any more"


class Moments(jaxlm.Callback):
    """Notes each moment and what it sees; fails at one of them."""

    def __init__(self, fails_at=None):
        self.seen, self.fails_at = [], fails_at

    def _see(self, moment, event):
        assert int(event.state.step) == event.step
        norm = float(jnp.linalg.norm(event.params["embedding"]["table"]))
        self.seen.append((moment, event.step, event.metrics.get("loss_nats"), norm))
        assert event.batch.tokens.shape == (8, 32)
        if self.fails_at == (moment, event.step):
            raise ZeroDivisionError("mine")

    def on_log(self, event):
        self._see("log", event)

    def on_evaluation(self, event):
        assert event.model(event.batch.tokens[:1]).shape[:2] == (1, 32)
        self._see("evaluation", event)

    def on_checkpoint(self, event):
        self._see("checkpoint", event)

    def on_end(self, event):
        assert harness.steps(event.workdir)[-1] == event.step
        self._see("end", event)


def test_callbacks_see_state_metrics_and_batch_of_their_moment_and_an_error_keeps_the_state(
    config, tmp_path
):
    run, failing = tmp_path / "run", Moments(("evaluation", 3))
    with pytest.raises(ZeroDivisionError, match="mine"):
        jaxlm.train(config, workdir=run, callbacks=[failing], quiet=True)
    moments = [each[:2] for each in failing.seen]
    assert moments == [
        ("log", 1), ("log", 2), ("checkpoint", 2), ("log", 3), ("evaluation", 3),
    ]  # fmt: skip
    assert harness.steps(run)[-1] == 3
    assert harness.exit_of(run)["code"] == 70
    whole = Moments()
    assert jaxlm.train(config, workdir=run, callbacks=[whole], quiet=True).complete
    assert [each[:2] for each in whole.seen] == [
        ("log", 4), ("checkpoint", 4), ("log", 5), ("log", 6), ("evaluation", 6),
        ("checkpoint", 6), ("end", 6),
    ]  # fmt: skip
    losses = {(r["split"], r["step"]): r["loss_nats"] for r in harness.records(run)}
    seen = [*failing.seen, *whole.seen]
    assert all(loss == losses["train", step] for name, step, loss, _ in seen if name == "log")
    assert whole.seen[-1][2] == losses["val", 6]
    assert len({norm for _, _, _, norm in seen}) == 6, "each step's parameters, and no others"
    assert whole.seen[-1][3] == float(jnp.linalg.norm(jaxlm.load(run).params["embedding"]["table"]))


def test_it_is_there_at_once_and_brings_no_jax():
    begun = time.perf_counter()
    code = (
        "import sys, jaxlm; print('jax' in sys.modules, callable(jaxlm.train), 'jax' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
    machine.require_clock(time.perf_counter() - begun, 20)


def test_a_config_of_a_notebook_is_taken_as_it_is():
    from jaxlm.recipes.train.api import _loaded

    draft = configs.new(Run)
    draft.optim.name = "lion"
    draft.schedule.warmup = "5%"
    config = _loaded(draft, {"optim.lr": 2e-4, "sample.prompts": ("a", "b")}).value
    assert (config.optim.name, config.optim.lr, str(config.schedule.warmup)) == ("lion", 2e-4, "5%")
    assert config.sample.prompts == ("a", "b")


@pytest.mark.slow
def test_the_command_line_calls_the_same_function(tmp_path, monkeypatch):
    from jaxlm.recipes.train import api

    called = {}

    def instead(config, **how):
        called.update(how, config=config)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "train", instead)
    config = harness.write_config(tmp_path)
    main(harness.words(config, tmp_path / "run", "--stop_at=7", "--config.optim.lr=0.5"))
    assert (called["workdir"], called["stop_at"]) == (tmp_path / "run", 7)
    assert called["config"].value.optim.lr == 0.5
