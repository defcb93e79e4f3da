"""Fewer steps and smaller batches for sets that are small."""

import dataclasses
import re
from typing import Any

import pytest

from jaxlm.training.config import TrainConfig
from jaxlm.training.epochs import explain, explain_end, fewer_steps

TRAIN = TrainConfig(steps=500, batch=16, epochs=3)
BATCH, STEPS = "train.batch", "train.steps"


@pytest.mark.parametrize(
    ("rows", "unit", "batch", "steps"),
    [
        (1, 1, 1, 3),
        (7, 1, 1, 21),
        (10, 1, 1, 30),
        (20, 1, 2, 30),
        (127, 1, 15, 26),
        (128, 1, 16, 24),
        (2_666, 1, 16, 500),
        (10**6, 1, 16, 500),
        (20, 8, 8, 8),  # a row for each device
        (127, 4, 12, 32),
        (6, 8, 8, 3),  # too few: refused by the check of the batch
    ],
)
def test_an_epoch_has_eight_steps_if_its_rows_allow_that(rows, unit, batch, steps):
    assert fewer_steps(TRAIN, rows=rows, unit=unit, typed=()) == {BATCH: batch, STEPS: steps}


def test_typed_settings_and_a_growing_batch_stay():
    def made(train: TrainConfig, *typed: str) -> dict[str, Any]:
        return fewer_steps(train, rows=20, unit=1, typed=typed)

    assert made(TRAIN, STEPS) == {BATCH: 2, STEPS: 500}
    assert made(TRAIN, BATCH) == {BATCH: 16, STEPS: 4}
    assert made(TRAIN, BATCH, STEPS) == {BATCH: 16, STEPS: 500}
    assert made(dataclasses.replace(TRAIN, batch_warmup=("4@50%",))) == {BATCH: 16, STEPS: 4}
    assert made(dataclasses.replace(TRAIN, epochs=None)) == {}
    assert made(dataclasses.replace(TRAIN, epochs=0.01)) == {BATCH: 2, STEPS: 1}


def test_the_result_is_the_limit_of_a_run_that_begins_with_it():
    """A new run with the config.json of another one, on the same set, has its values."""
    for rows in (1, 9, 20, 127, 500):
        values = fewer_steps(TRAIN, rows=rows, unit=1, typed=())
        second = dataclasses.replace(TRAIN, batch=values[BATCH], steps=values[STEPS])
        assert fewer_steps(second, rows=rows, unit=1, typed=()) == values


def test_the_line_names_only_what_changed():
    after = dataclasses.replace(TRAIN, steps=24)
    line = explain(TRAIN, after, 128)
    assert "has 128 rows, so train.steps = 24 in place of 500; --config" in line
    assert "train.batch = " not in line
    assert "has 1 row, so" in explain(TRAIN, after, 1)


def test_steps_that_end_before_the_passes_are_named_with_those_that_make_them():
    assert explain_end(TRAIN, 2_666) == ""
    assert explain_end(dataclasses.replace(TRAIN, epochs=None), 10**6) == ""
    line = explain_end(TRAIN, 10_000)
    assert "train.steps = 500 ends the run after 0.8 of train.epochs = 3 passes over 10000" in line
    (steps,) = re.findall(r"--config.train.steps=(\d+)", line)
    assert explain_end(dataclasses.replace(TRAIN, steps=int(steps)), 10_000) == ""
    assert explain_end(dataclasses.replace(TRAIN, steps=int(steps) - 1), 10_000)


def test_steps_of_the_command_line_that_make_more_passes_are_named():
    line = explain_end(dataclasses.replace(TRAIN, steps=30, epochs=0.01), 9_000)
    assert line.startswith("train.steps = 30 makes 0.053 passes over 9000 rows, more than ")
    assert "train.epochs = 0.01" in line
