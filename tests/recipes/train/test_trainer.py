"""Records have the speed of a run's steps, and the pauses; by the command line."""

import itertools
import statistics

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config, faults
from jaxlm.monitor import host_machine
from jaxlm.parallel import mesh
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from jaxlm.recipes.train import programs, trainer
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

# A step takes at least this long, and a pause many times as long: noise of the machine is small
# compared with both.
STEP_SECONDS, PAUSE_SECONDS = 0.1, 0.4
SETTINGS = {
    "train.steps": 24,
    "eval.every": 6,
    "checkpoint.every": 9,
    "checkpoint.keep_best": 0,
    "sample.every": 12,
    "sample.prompts": ("one ",),
    "sample.max_tokens": 4,
}
DUE = {"eval": (6, 12, 18), "save": (9, 18), "sample": (12,)}  # and at the end, behind all rows


# What makes steps slow, and every how many of them are logged; the first pair is in fast tests.
RUNS = {
    "slow steps": ("step.before", 1),
    "slow data, every second step": ("data.next", 2),
    "slow steps, every second step": ("step.before", 2),
    "slow data": ("data.next", 1),
}


POLICY = {"objective.name": "policy", "data.kind": "prompts", "data.train": "prompts.jsonl"}
POLICY |= {"reward.functions": "ended", "rl.samples": "2", "rl.max_tokens": "8"}
TEACHER = {"objective.name": "distill", "objective.teacher": "RUN", "objective.weight": "1"}
PAIRS = {"objective.name": "reward", "data.kind": "pairs", "data.train": "pairs.jsonl"}
KINDS = {
    "policy": POLICY,
    "policy with an adapter": POLICY | {"tune.name": "lora"},
    "samples for a teacher": POLICY | TEACHER | {"objective.sampled": "1"},
    "reward": PAIRS,
    "pairs": {"model.family": "t5", "objective.name": "span"},
    "mtp": {"objective.name": "mtp"},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_the_flops_of_a_step_are_those_of_the_plan(settings):
    """Only samples of a policy have logits."""
    sizes = {"vocab": 64, "width": 32, "depth": 1, "heads": 2}
    model = {f"model.{name}": str(size) for name, size in sizes.items()}
    settings = model | {"model.family": "gpt2", "data.sequence": "32"} | settings
    run = config.load(Run, None, [*settings.items()]).value
    engine = programs.without_data(run, mesh.build(run.mesh), 64)
    half, _ = trainer.flops_per_token(engine, 32)
    plan = predict.forecast(run, host_machine.this_machine(1, []))
    assert half == pytest.approx(plan.flops_per_token, rel=1e-12)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=[pytest.mark.slow] * (number > 0), id=name)
        for number, (name, each) in enumerate(RUNS.items())
    ],
)
def run(request, tmp_path_factory):
    """The records of a run with slow steps, and evaluations and saves that are much slower."""
    point, every = request.param
    folder = tmp_path_factory.mktemp("run")
    config = harness.write_config(folder, SETTINGS | {"log.every": every})
    slow = {point: STEP_SECONDS, "eval": PAUSE_SECONDS, "save.begin": PAUSE_SECONDS}
    plan = ",".join(f"{name}:sleep={seconds}" for name, seconds in slow.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "_faults", faults.parse(plan))
        assert main(harness.words(config, folder / "run")) == 0
    return harness.records(folder / "run")


@pytest.fixture(scope="module")
def rows(run):
    return [record for record in run if record["split"] == "train"]


def intervals(rows):
    """(first, last) of each interval between rows: the tokens and steps before it, and its row."""
    begin = {"step": 0, "tokens": 0, "elapsed_seconds": 0.0}
    return list(itertools.pairwise([begin, *rows]))


@pytest.mark.slow
@pytest.mark.few(1)
def test_tokens_over_speed_and_pauses_are_the_time_that_elapsed(rows):
    seconds = 0.0
    for before, row in intervals(rows):
        stepping = (row["tokens"] - before["tokens"]) / row["tokens_per_second"]
        assert stepping == pytest.approx((row["step"] - before["step"]) * row["step_seconds"])
        seconds += stepping + row["pause_seconds"]
        assert row["elapsed_seconds"] == pytest.approx(seconds)
        parts = [value for name, value in row.items() if name.startswith("pause_seconds/")]
        assert sum(parts) == pytest.approx(row["pause_seconds"])


@pytest.mark.few(1)
def test_elapsed_seconds_are_those_of_the_clock_on_the_wall(rows):
    wall = rows[-1]["time_unix"] - rows[0]["time_unix"]
    # A line is written up to one step after the step that it is of.
    late = 2 * max(row["step_seconds"] for row in rows) + 0.1
    elapsed = rows[-1]["elapsed_seconds"] - rows[0]["elapsed_seconds"]
    assert elapsed == pytest.approx(wall, abs=late)


def test_no_evaluation_or_save_changes_the_speed_of_the_steps_around_it(rows):
    """Medians, as a busy machine delays single steps."""
    pauses = {step for steps in DUE.values() for step in steps}
    before = [row["step_seconds"] for row in rows if row["step"] in pauses]
    after = [
        row["step_seconds"] for last, row in itertools.pairwise(rows) if last["step"] in pauses
    ]
    assert 3 <= len(before) == len(after)
    ratio = statistics.median(after) / statistics.median(before)
    assert 1 / 1.7 < ratio < 1.7, (before, after)


def test_a_pause_is_in_the_row_of_the_step_behind_it_under_its_own_name(rows):
    for kind, steps in DUE.items():
        noted = [
            row["step"] for _, row in intervals(rows) if row.get(f"pause_seconds/{kind}", 0.0) > 0
        ]
        expected = [
            row["step"]
            for before, row in intervals(rows)
            if any(before["step"] <= step < row["step"] for step in steps)
        ]
        assert noted == expected, kind
    paused = [row["pause_seconds"] for row in rows if "pause_seconds/eval" in row]
    assert min(paused) >= PAUSE_SECONDS
    still = [row["pause_seconds"] for row in rows if not row["pause_seconds"]]
    assert still, "rows without a pause"


def test_goodput_is_the_share_of_the_time_that_steps_took(rows):
    paused = sum(row["pause_seconds"] for row in rows)
    last = rows[-1]
    assert last["goodput"] == pytest.approx(1 - paused / last["elapsed_seconds"])
