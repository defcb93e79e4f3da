"""Line B6: a save that fails is tried once more, in any phase; twice in a row ends the run."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxlm.checkpoint import store
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import PARTIAL_SUFFIXES, Store
from jaxlm.core.errors import SaveFailed
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.checkpointing import CheckpointSaver, SaveRequest
from jaxlm.training.loop import Progress
from jaxlm.training.state import TrainState


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
