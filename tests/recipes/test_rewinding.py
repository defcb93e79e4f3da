"""The target of a rewind, and the checkpoints that it reads."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core.errors import DataError
from jaxlm.recipes.train.checkpointing import Rewinds
from jaxlm.recipes.train.spikes import skip_notice
from jaxlm.training.config import GuardConfig

GUARD = GuardConfig(rewind_steps=4, skip=2)
SPENT = SimpleNamespace(first=11, step=12, values={})


@pytest.fixture
def run(tmp_path):
    """A store with six steps, the fourth not healthy, and the rewinds of its run."""

    def make(*steps):
        store = Store(tmp_path / "checkpoints", CheckpointConfig(keep_last=99))
        for step in steps:
            state = {"w": jnp.full((64, 8), step)}
            store.save(step, state, {"rewinds": [], "step": step}, healthy=step != 8)
        store.wait()
        directory = SimpleNamespace(
            path=tmp_path,
            is_writer=True,
            write_json=lambda name, value: (tmp_path / name).write_text(json.dumps(value)),
        )
        return store, Rewinds(directory)

    return make


@pytest.fixture
def read(monkeypatch):
    """The steps whose files are hashed from now on."""
    steps, digest = [], records._digest

    def noted(path, *rest):
        steps.append(int(str(path).rpartition("/checkpoints/")[2].partition("/")[0]))
        return digest(path, *rest)

    def start():
        monkeypatch.setattr(records, "_digest", noted)
        return steps

    return start


def damage(store, *steps):
    for step in steps:
        files = store.record(step).files
        path = store.directory / str(step) / max(files, key=files.__getitem__)
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.slow
def test_a_rewind_reads_the_checkpoint_that_it_goes_back_to_and_no_other(run, read):
    store, rewinds = run(2, 4, 6, 8, 10, 12)
    steps = read()
    assert rewinds.rewind(SPENT, store, GUARD).to == 6, "four steps back at least"
    assert set(steps) == {6}
    assert store.steps() == [2, 4, 6]


def test_a_rewind_to_a_damaged_checkpoint_sets_it_aside_and_goes_further_back(run, read):
    store, rewinds = run(2, 4, 6, 8, 10, 12)
    damage(store, 2, 6)
    steps, output = read(), []
    assert rewinds.rewind(SPENT, store, GUARD, output.append).to == 4
    assert set(steps) == {6, 4}
    assert store.steps() == [2, 4], "2 was not looked at"
    assert "other contents" in (store.directory.parent / "quarantine/6.reason.txt").read_text()
    assert len(output) == 1
    assert output[0].startswith("checkpoint 6 is damaged (")


@pytest.mark.slow
def test_a_rewind_that_reaches_behind_the_oldest_checkpoint_goes_to_the_oldest_that_is_whole(run):
    store, rewinds = run(8, 9, 10, 12)
    damage(store, 9)
    assert rewinds.rewind(SPENT, store, GUARD).to == 10
    assert store.steps() == [8, 10], "8 is not healthy"


def test_a_rewind_without_a_checkpoint_begins_again(run):
    store, rewinds = run(8, 12)
    assert rewinds.rewind(SPENT, store, GUARD).to == 0


@pytest.mark.slow
def test_a_rewind_never_takes_fresh_weights_for_those_that_the_run_began_with(run):
    store, rewinds = run(0, 8, 12)
    damage(store, 0)
    with pytest.raises(DataError, match="no checkpoint to return to") as caught:
        rewinds.rewind(SPENT, store, GUARD)
    assert "is damaged" in caught.value.why
    assert rewinds.made == []
    assert store.steps() == [0, 8, 12], "nothing was moved"


def test_of_many_steps_that_were_not_applied_only_some_are_printed():
    values = {"loss_nats": 2.5, "grad_norm": 8.25}
    lines = [
        skip_notice(step, "gradient spike", values | {"skipped_total": step})
        for step in range(1, 101)
    ]
    printed = [step for step, line in enumerate(lines, start=1) if line]
    assert printed == [*range(1, 11), *range(20, 101, 10)]
    first = "step 1 was not applied: gradient spike (loss 2.5, gradient 8.25); 1 skipped so far"
    assert lines[0].startswith(first)
    assert "each 10th is printed" in lines[9]
