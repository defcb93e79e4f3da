"""The loop alone, with a step that only counts."""

import os
import signal

import jax.numpy as jnp
import pytest

from jaxlm.core.errors import Preempted
from jaxlm.training import guard
from jaxlm.training.loop import BudgetSpent, LoopLimits, Progress, TrainLoop
from jaxlm.training.signals import StopRequest


class Story(TrainLoop):
    """A loop that records its events, with a step whose state is the number of updates."""

    def __init__(self, losses=None, bad_steps=(), verdict=guard.LOSS_NOT_FINITE):
        self.events, self.losses, self.bad_steps = [], losses or {}, bad_steps
        self.verdict = verdict
        self.in_a_row = 0
        self.progress = Progress()

    def step(self, state, batch):
        self.events.append(("step", state + 1, batch))
        is_bad = state + 1 in self.bad_steps
        self.in_a_row = self.in_a_row + 1 if is_bad else 0
        metrics = {
            "loss_nats": float("nan") if is_bad else 1.0,
            "grad_norm": 1.0,
            "tokens": 0.0 if is_bad else 5.0,
            "learning_rate": 0.1,
            "verdict": float(self.verdict * is_bad),
            "skipped_in_a_row": self.in_a_row,
        }
        return state + 1, {
            "layers": {"w": jnp.ones(2)},
            **{name: jnp.float32(value) for name, value in metrics.items()},
        }

    def is_log_due(self, step):
        return self.due.get("log", lambda step: True)(step)

    def is_eval_due(self, step):
        return self.due.get("eval", lambda step: False)(step)

    def is_sample_due(self, step):
        return self.due.get("sample", lambda step: False)(step)

    def is_save_due(self, step):
        return self.due.get("save", lambda step: False)(step)

    def count(self, values, data_wait_seconds, begun_at, done_at):
        pass

    def log(self, step, values):
        self.events.append(("log", step))

    def evaluate(self, state, step):
        self.events.append(("evaluate", state, step))
        return self.losses.get(step)

    def sample(self, state, step):
        self.events.append(("sample", state, step))

    def save(self, state, step, loss_nats):
        self.events.append(("save", state, step, loss_nats))

    def note_skipped(self, step, values, layers):
        self.events.append(("skipped", step))

    def train(
        self, *, start=0, steps=4, stop_at=None, stop=None, patience=None, keep_best=False, **due
    ):
        self.due = due
        limits = LoopLimits(
            start=start,
            steps=steps,
            stop_at=stop_at or steps,
            patience=patience,
            keep_best=keep_best,
            budget=3,
        )
        batches = iter(range(start, 100))
        return self.run(self.step, start, batches, limits, stop or StopRequest())

    def named(self, name):
        return [event[1:] for event in self.events if event[0] == name]


def test_metrics_are_read_one_step_late():
    story = Story()
    story.train(steps=3)
    order = [event[:2] for event in story.events]
    assert order.index(("step", 2)) < order.index(("log", 1)) < order.index(("step", 3))
    assert story.named("log") == [(1,), (2,), (3,)]
    assert story.progress.tokens == 15


def test_the_last_step_is_saved_and_what_is_due_before_it():
    story = Story()
    assert story.train(steps=5, save=lambda step: step % 2 == 0) == 5
    assert [step for _, step, _ in story.named("save")] == [2, 4, 5]


def test_a_step_is_evaluated_before_it_is_saved_and_its_metrics_are_out():
    story = Story(losses={2: 0.5})
    story.train(steps=2, eval=lambda step: step == 2, save=lambda step: step == 2)
    assert [event[0] for event in story.events] == [
        "step",
        "step",
        "log",
        "log",
        "evaluate",
        "save",
    ]
    assert story.named("save") == [(2, 2, 0.5)]


def test_samples_have_a_cadence_of_their_own():
    story = Story(losses={4: 0.5, 8: 0.4})
    story.train(
        steps=9,
        eval=lambda step: step % 4 == 0,
        sample=lambda step: step % 3 == 0,
        save=lambda step: step == 6,
    )
    assert story.named("sample") == [(3, 3), (6, 6), (9, 9)]
    assert [step for _, step in story.named("evaluate")] == [4, 8]
    names = [event[0] for event in story.events]
    sampled = story.events.index(("sample", 6, 6))
    assert names[sampled - 1 : sampled + 2] == ["log", "sample", "save"], "on disk before the save"


def test_the_best_evaluation_is_saved_though_no_save_is_due():
    story = Story(losses={1: 3.0, 2: 2.0, 3: 2.5, 4: 2.2})
    story.train(steps=4, eval=lambda step: True, keep_best=True)
    assert [step for _, step, _ in story.named("save")] == [1, 2, 4]
    assert (story.progress.best_step, story.progress.best_loss) == (2, 2.0)


def test_patience_stops_early_and_saves():
    story = Story(losses={1: 1.0, 2: 1.5, 3: 1.2, 4: 0.1})
    assert story.train(steps=9, eval=lambda step: True, patience=2) == 3
    assert [step for _, step, _ in story.named("save")] == [3]


def test_an_evaluation_that_is_not_finite_is_never_the_best_and_spends_patience():
    nan = float("nan")
    story = Story(losses={1: nan, 2: 1.0, 3: nan, 4: nan, 5: 0.1})
    assert story.train(steps=9, eval=lambda step: True, patience=2, keep_best=True) == 4
    assert (story.progress.best_step, story.progress.best_loss) == (2, 1.0)
    assert [step for _, step, _ in story.named("save")] == [2, 4]


def test_a_step_that_was_not_applied_is_told_and_the_run_goes_on():
    story = Story(bad_steps=(3, 4))
    story.train(steps=9)
    assert story.named("skipped") == [(3,), (4,)]
    assert story.progress.tokens == 7 * 5
    assert story.progress.last_skipped == 4
    assert [step for _, step, _ in story.named("save")] == [9]


@pytest.mark.parametrize("verdict", [guard.OVERFLOW, guard.NO_WEIGHT])
def test_a_step_without_a_trained_token_is_no_sign_of_an_unhealthy_state(verdict):
    story = Story(bad_steps=(3, 4), verdict=verdict)
    story.train(steps=9)
    assert story.named("skipped") == [(3,), (4,)]
    assert story.progress.last_skipped is None


def test_too_many_of_them_in_a_row_end_the_loop_with_the_first_of_them():
    story = Story(bad_steps=(2, 4, 5, 6, 7, 8, 9))
    with pytest.raises(BudgetSpent) as caught:
        story.train(steps=9)
    assert (caught.value.first, caught.value.step) == (4, 6)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_says_that_the_run_goes_on(number):
    story = Story()
    with StopRequest() as stop:

        def save_due(step):
            if step == 3:
                os.kill(os.getpid(), number)
            return False

        with pytest.raises(Preempted) as caught:
            story.train(steps=9, stop=stop, log=save_due)
    assert caught.value.code == 75
    saved = [step for _, step, _ in story.named("save")]
    assert saved == [4], "the signal came while step 4 was under way"
    assert signal.getsignal(number) is not stop._take


def test_a_run_goes_on_with_the_next_batch():
    story = Story()
    story.train(start=2, steps=4)
    assert [batch for _, batch in story.named("step")] == [2, 3]


def test_a_signal_before_the_first_step_is_not_said_to_have_saved_one():
    story, stop = Story(), StopRequest()
    stop.reason = "SIGTERM"
    with pytest.raises(Preempted) as caught:
        story.train(stop=stop)
    assert caught.value.what == "the run was stopped by SIGTERM before step 1"
    assert not story.named("save")
