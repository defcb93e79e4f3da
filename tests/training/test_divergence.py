"""Losses that raise the alarm of a diverged run."""

import json
import math
import random

import pytest

from jaxlm.training.divergence import Divergence

UNIFORM, UNIGRAM = math.log(256), 4.0


def watch(steps=1000, **settings):
    return Divergence(steps=steps, uniform=UNIFORM, unigram=lambda: UNIGRAM, **settings)


def trained(it, losses, first=1):
    """Steps at which the verdict on the training loss changed, with the new verdict."""
    changes, worse = [], it.worse
    for step, loss in enumerate(losses, first):
        it.train(step, loss)
        if it.worse != worse:
            worse = it.worse
            changes.append((step, worse))
    return changes


def test_an_untrained_model_at_the_uniform_loss_is_no_alarm():
    it = watch()
    assert not trained(it, [UNIFORM + 0.1] * 400)
    assert it.evaluated(100, UNIFORM + 0.1) is None


def test_a_loss_above_where_it_began_is_diverged_after_a_tenth_of_the_steps():
    it = watch()
    ((step, worse),) = trained(it, [UNIFORM, *[9.0] * 200])
    assert (step, worse) == (100, "uniform")


def test_a_loss_that_had_been_better_is_diverged_at_once():
    falling = [UNIFORM - 0.05 * step for step in range(40)]
    it = watch()
    ((step, _),) = trained(it, [*falling, *[50.0] * 40])
    assert 40 < step < 70


def test_one_bad_batch_is_no_divergence():
    losses = [3.0] * 300
    losses[150] = 1e6
    assert not trained(watch(), losses)


def test_a_model_that_begins_far_above_uniform_and_descends_is_no_alarm():
    assert not trained(watch(), [30.0 - 0.05 * step for step in range(499)])


def test_a_model_that_is_still_above_uniform_at_the_end_has_learned_nothing():
    it = watch()
    trained(it, [30.0] * 500)
    assert it.evaluated(500, 29.0) == "uniform"


@pytest.mark.parametrize(
    ("step", "loss", "worse"),
    [(499, 4.5, None), (500, 4.5, "unigram"), (500, 4.05, None), (500, 3.9, None)],
)
def test_worse_than_the_unigram_coder_counts_from_half_of_the_steps(step, loss, worse):
    it = watch()
    trained(it, [UNIFORM])
    assert it.evaluated(step, loss) == worse


def test_worse_than_the_unigram_coder_again_counts_at_once():
    it = watch()
    trained(it, [UNIFORM])
    assert it.evaluated(50, 3.0) is None
    assert it.evaluated(60, 4.5) == "unigram"


def test_of_a_run_of_few_steps_nothing_is_expected():
    it = watch(steps=40)
    trained(it, [UNIFORM])
    assert it.evaluated(40, 5.5) is None


def test_a_loss_that_comes_back_ends_the_alarm():
    it = watch()
    changes = trained(it, [UNIFORM, *[9.0] * 200, *[3.0] * 100])
    assert [worse for _, worse in changes] == ["uniform", None]


def test_an_alarm_ends_only_below_the_coder_itself():
    it = watch()
    trained(it, [UNIFORM, *[9.0] * 200])
    assert it.evaluated(220, 1.01 * UNIFORM) == "uniform"
    assert it.evaluated(240, 0.99 * UNIFORM) is None
    assert not trained(it, [1.01 * UNIFORM] * 100, first=240)
    assert trained(it, [0.99 * UNIFORM] * 100, first=340)


def test_a_loss_that_is_not_finite_is_worse_than_any():
    it = watch()
    trained(it, [UNIFORM])
    assert it.evaluated(200, math.inf) == "uniform"
    assert it.evaluated(220, math.nan) == "uniform"


def test_an_evaluation_that_falls_is_no_alarm_if_its_text_is_harder_than_that_of_the_first_step():
    it = watch(steps=8)
    assert it.evaluated(0, 12.8) is None
    trained(it, [9.0])
    assert [it.evaluated(step, 12.8 - 0.3 * step) for step in range(1, 8)] == [None] * 7
    assert it.evaluated(8, 14.0) == "uniform"
    resumed = watch(steps=8, first=9.0, best=11.6)
    assert resumed.evaluated(5, 11.3) is None
    assert resumed.evaluated(6, 12.5) == "uniform"


def test_a_judge_that_goes_on_after_each_step_is_the_one_that_is_never_stopped():
    draw = random.Random(0)
    whole = watch(steps=120)
    judged, first = None, None
    for step in range(121):
        resumed = watch(steps=120, first=first, best=1.0, worse="unigram")
        if judged is not None:
            resumed.restore(judged)
        for it in (whole, resumed):
            state = draw.getstate()
            if step:
                it.train(step, draw.choice([3.0, 5.5, 5.6, 9.0, math.inf]))
            if step % 10 == 0:
                it.evaluated(step, draw.choice([3.0, 4.2, 5.6, 9.0, math.nan]))
            if it is whole:
                draw.setstate(state)
        if step:
            assert (resumed.worse, resumed.training) == (whole.worse, whole.training)
        judged, first = json.loads(json.dumps(whole.as_json())), whole.first


def test_without_a_unigram_coder_only_the_uniform_one_counts():
    it = Divergence(steps=1000, uniform=UNIFORM, unigram=lambda: None)
    trained(it, [UNIFORM])
    assert it.evaluated(900, 5.0) is None
    assert it.evaluated(900, 6.0) == "uniform"
