"""Saves that fail are tried once more, in any phase (line B6); rewinds and what they read."""

import json
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint import store
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import PARTIAL_SUFFIXES, Store
from jaxlm.core.errors import DataError, SaveFailed
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.checkpointing import CheckpointSaver, Rewinds, SaveRequest
from jaxlm.training.config import GuardConfig
from jaxlm.training.loop import Progress
from jaxlm.training.state import TrainState

GUARD = GuardConfig(rewind_steps=4, skip=2)
SPENT = SimpleNamespace(first=11, step=12, values={})


class Failing(Store):
    """Saves of these numbers, counted from 1, cannot begin, or fail in the background."""

    def __init__(self, folder, *, begin=(), background=()):
        super().__init__(folder, CheckpointConfig(keep_last=99))
        self._begin, self._background, self.number = begin, background, 0

    def save(self, *args, **kwargs):
        self.number += 1
        if self.number in self._begin:
            raise SaveFailed(
                "a checkpoint could not be written",
                where="run",
                why="no space",
                fix="--workdir=more",
            )
        super().save(*args, **kwargs)

    def _complete(self):
        if self.number in self._background:
            raise OSError("no space")
        super()._complete()


def saves(store, processes=1):
    programs = SimpleNamespace(data=SimpleNamespace(fingerprint={}), is_finite=lambda _: True)
    context = SimpleNamespace(
        run=Run(),
        processes=SimpleNamespace(peers=SimpleNamespace(count=processes)),
        directory=SimpleNamespace(is_writer=True, step=0),
        console=SimpleNamespace(say=lambda text: None, warn=lambda text, step: None),
        store=store,
        rewinds=SimpleNamespace(as_json=list),
    )
    made = CheckpointSaver(context, programs, SimpleNamespace(as_json=lambda step: []))

    def save(step):
        state = TrainState(jnp.int32(step), {"w": jnp.ones(8)}, {}, {})
        made.save(SaveRequest(step, state, Progress(), None, None))

    return made, save


def noticed(made):
    """The check of a step receives the failure, one or a few steps later."""
    for _ in range(200):
        made.check()
        if made.is_retry_due:
            return
        time.sleep(0.01)
    raise AssertionError("the failure was not noticed")


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["begin", "background"])
def test_a_save_that_fails_once_is_made_up_for_in_the_next_step(tmp_path, how):
    store = Failing(tmp_path, **{how: (1, 3)})
    made, save = saves(store)
    for failing, retried in (
        (4, 5),
        (8, 9),
    ):  # one that succeeds between makes them two single ones
        save(failing)
        noticed(made)
        save(retried)
        assert not made.is_retry_due
    made.finish()
    assert store.steps() == [5, 9]
    store.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["begin", "background"])
@pytest.mark.parametrize("second", [5, 6], ids=["the next step", "a later one"])
def test_two_failures_in_a_row_end_the_run(tmp_path, how, second):
    store = Failing(tmp_path, **{how: (1, 2)})
    made, save = saves(store)
    save(4)
    noticed(made)
    with pytest.raises(SaveFailed):
        save(second)
        noticed(made)
    store.release()
    assert store.steps() == []
    assert not list(tmp_path.iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["begin", "background"])
def test_the_last_save_of_a_run_is_tried_once_more_as_well(tmp_path, how):
    store = Failing(tmp_path, **{how: (1,)})
    made, save = saves(store)
    save(12)
    made.finish()
    assert store.steps() == [12]
    store.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["begin", "background"])
def test_the_last_save_failing_twice_is_an_error(tmp_path, how):
    store = Failing(tmp_path, **{how: (2, 3)})
    made, save = saves(store)
    save(8)
    save(12)
    with pytest.raises(SaveFailed):
        made.finish()
    store.release()
    assert store.steps() == [8]


def test_where_there_are_peers_the_first_failure_ends_the_run(tmp_path):
    store = Failing(tmp_path, begin=(1,))
    _, save = saves(store, processes=2)
    with pytest.raises(SaveFailed):
        save(4)
    store.close()


def test_what_a_rewind_gives_up_is_not_saved_again(tmp_path):
    store = Failing(tmp_path, background=(1,))
    made, save = saves(store)
    save(4)
    made.abandon()
    assert not made.is_retry_due
    made.finish()
    assert (store.number, store.steps()) == (1, [])
    save(3)
    made.finish()
    assert store.steps() == [3]
    store.close()


def test_what_a_failed_save_left_goes_though_its_writers_are_still_at_it(tmp_path, monkeypatch):
    opened = Store(tmp_path, CheckpointConfig())
    torn = tmp_path / f"4{PARTIAL_SUFFIXES[0]}"
    torn.mkdir()
    late = iter(range(3))

    def sleep(_):
        if next(late, None) is not None:
            (torn / "d").mkdir(parents=True)

    monkeypatch.setattr(store, "time", SimpleNamespace(sleep=sleep))
    opened.remove_torn()
    assert next(late, None) is None
    assert not torn.exists()
    opened.close()


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
