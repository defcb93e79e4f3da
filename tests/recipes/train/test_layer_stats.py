"""Layers watched through the front door: what is written when, and that nothing else moves."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core.span import Span
from jaxlm.monitor import sinks
from jaxlm.monitor.config import LogConfig
from jaxlm.nn.intermediates import Intermediates
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.layer_stats import LayerStatsCollector, is_observed
from jaxlm.training import observe
from jaxlm.training.config import TrainConfig
from jaxlm.training.gradient import SQUARE
from jaxlm.training.observe import Observed
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {"train.steps": 6, "checkpoint.every": "100%", "data.validation": (), "log.every": 2}
WATCH = "--config.log.layers=('norms','activations','attention','noise')"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without its layers watched, and one with."""
    folder = tmp_path_factory.mktemp("texts")
    config = harness.write_config(folder, SETTINGS)
    plain, watched = folder / "plain", folder / "watched"
    assert main(harness.words(config, plain)) == 0
    flags = (WATCH, "--config.log.layers_every=3", "--config.log.sinks=('tensorboard',)")
    assert main(harness.words(config, watched, *flags)) == 0
    return plain, watched


@pytest.mark.slow
def test_watching_changes_no_bit_of_the_run(runs):
    plain, watched = runs
    assert harness.losses(plain) == harness.losses(watched)
    assert harness.state_digest(plain) == harness.state_digest(watched)


@pytest.mark.slow
def test_figures_of_layers_stand_in_the_first_logged_step_of_each_interval(runs):
    plain, watched = (harness.records(run) for run in runs)
    assert not any(name.startswith("layers/") for record in plain for name in record)
    by_step = {record["step"]: record for record in watched}
    assert [step for step, record in by_step.items() if "layers/0/grad_norm" in record] == [4, 6]
    record = by_step[6]
    for layer in range(2):
        for name in ("grad_norm", "mlp/down/weight/update_norm", "stream_rms", "dead_units"):
            assert f"layers/{layer}/{name}" in record
    parts = ("0", "1", "embedding/table", "final_norm/scale", "unembedding/weight")
    whole = np.linalg.norm([record[f"layers/{part}/grad_norm"] for part in parts])
    # Dropout draws by micro-batch, and noise is estimated from more of them than the step has.
    np.testing.assert_allclose(whole, record["grad_norm"], rtol=0.03)
    assert record["gradient_noise"] > 0
    advised = "the noise scale of the gradient is " in (runs[1] / "report.html").read_text()
    assert advised == (record.get("noise_scale_tokens", 0) > 0)
    assert runs[1].joinpath("events").is_dir()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("every", "span", "due"),
    [
        (1, "50%", [6, 12]),
        (5, 5, [5, 10, 12]),
        (5, 6, [10, 12]),
        (4, 1, [4, 8, 12]),
        (1, 0, [12]),
    ],
)
def test_a_step_is_watched_where_it_is_logged(every, span, due):
    log = LogConfig(layers=("norms",), every=Span.parse(every), layers_every=Span.parse(span))
    run = Run(train=TrainConfig(steps=12), log=log)
    assert [step for step in range(1, 13) if is_observed(run, step)] == due
    off = dataclasses.replace(run, log=dataclasses.replace(log, layers=()))
    assert not any(is_observed(off, step) for step in range(1, 13))


def test_a_step_is_logged_after_the_next_one_was_observed():
    run = Run(
        train=TrainConfig(steps=4),
        log=LogConfig(layers=("norms",), every=Span.parse(1), layers_every=Span.parse(1)),
    )

    def observed(size):
        norm = {"embedding/table": np.float32(size)}
        return Observed({"grad_norm": norm}, Intermediates({}, {}), np.float32(0), np.float32(1))

    seen = LayerStatsCollector(run, {}, ())
    for completed in (1, 2):
        seen.observe_if_due(functools.partial(observed, 10 * completed), completed)
    for completed in (1, 2):
        assert seen.take(completed) == {"layers/embedding/table/grad_norm": 10.0 * completed}
    assert seen.take(1) == seen.take(3) == {}


def test_the_noise_scale_is_of_the_means_of_twenty_estimates_and_goes_on_after_a_resume():
    run = Run(
        train=TrainConfig(steps=60, batch=8, microbatches=4),
        log=LogConfig(layers=("noise",), every=Span.parse(1), layers_every=Span.parse(1)),
    )
    draw = np.random.default_rng(0)
    taken = [
        Observed(
            {}, Intermediates({SQUARE: np.float64(4 * small)}, {}), np.float64(big), np.float64(64)
        )
        for big, small in draw.uniform([3, 3.5], [3.4, 9], (30, 2))
    ]

    def told(seen, steps):
        for step in steps:
            seen.observe_if_due(lambda step=step: taken[step], step + 1)
        return [seen.take(step + 1) for step in steps]

    whole = told(LayerStatsCollector(run, {}, ()), range(30))
    each = [observe.gradient_noise(one, 4) for one in taken]
    for step, record in enumerate(whole):
        assert (record["gradient_square"], record["gradient_noise"]) == each[step]
        squares, traces = np.mean(each[max(0, step - 19) : step + 1], axis=0)
        assert squares > 0
        np.testing.assert_allclose(record["noise_scale_tokens"], traces / squares)
    resumed = LayerStatsCollector(run, {}, [{}, *whole[:17]])
    assert told(resumed, range(17, 30)) == whole[17:]
    # A run that rewinds continues as one that resumes there.
    resumed.continue_from([{}, *whole[:17]])
    assert told(resumed, range(17, 30)) == whole[17:]


def test_an_estimate_that_is_not_finite_is_in_no_mean():
    """A run that resumes after it reads null for it."""
    log = LogConfig(layers=("noise",), every=Span.parse(1), layers_every=Span.parse(1))
    run = Run(train=TrainConfig(steps=9, batch=8, microbatches=4), log=log)

    def estimate(seen, step, size):
        notes = Intermediates({SQUARE: np.float64(32 * size)}, {})
        observed = Observed({}, notes, np.float64(3 * size), np.float64(64))
        seen.observe_if_due(lambda: observed, step)
        return seen.take(step)

    seen = LayerStatsCollector(run, {}, ())
    records = [estimate(seen, step, size) for step, size in ((1, 1.0), (2, np.nan), (3, 2.0))]
    whole = estimate(seen, 4, 1.0)
    assert math.isnan(records[1]["gradient_noise"])
    assert records[0]["noise_scale_tokens"] > 0
    for each in (records[2], whole):
        assert each["noise_scale_tokens"] == pytest.approx(records[0]["noise_scale_tokens"])
    resumed = LayerStatsCollector(run, {}, map(sinks.finite, records))
    assert estimate(resumed, 4, 1.0) == whole


def test_a_clock_cannot_say_beforehand_which_step_is_logged():
    log = LogConfig(layers=("norms",), every=Span.parse("10s"), layers_every=Span.parse("1m"))
    assert [field for field, _, _ in log.problems()] == ["every", "layers_every"]
    assert not list(LogConfig(every=Span.parse("10s")).problems())


def test_the_noise_scale_of_a_known_problem_is_found():
    """Gradients of tokens are G plus normal noise of covariance S: the ratio is tr(S) / |G|^2."""
    draw = np.random.default_rng(0)
    true, deviations = np.array([1.0, -2.0, 0.5]), np.array([3.0, 1.0, 5.0])
    tokens, parts, estimates = 64, 4, []
    for _ in range(4000):
        each = true + deviations * draw.standard_normal((tokens, 3))
        means = each.reshape(parts, -1, 3).mean(1)
        square = (means.mean(0) ** 2).sum()
        notes = Intermediates({SQUARE: np.float64((means**2).sum())}, {})
        estimates.append(
            observe.gradient_noise(Observed({}, notes, square, np.float64(tokens)), parts)
        )
    averages = np.mean(estimates, axis=0)
    np.testing.assert_allclose(averages[0], (true**2).sum(), rtol=0.03)
    np.testing.assert_allclose(averages[1], (deviations**2).sum(), rtol=0.03)
