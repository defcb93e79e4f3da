"""Passes outside of training have as many rows as a part of its step, and no more logits."""

import json

import jax
import pytest
from jax.sharding import AbstractMesh

from jaxlm.cli.main import main
from jaxlm.evals import loss
from jaxlm.parallel.config import AXES
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from tests.faults import harness


def mesh_of(ways):
    sizes = [ways if axis == "data" else 1 for axis in AXES]
    return AbstractMesh(tuple(sizes), tuple(AXES))


@pytest.mark.parametrize(
    ("settings", "options", "ways", "rows"),
    [
        ({}, {}, 1, 32),
        ({"train.microbatches": 8}, {}, 1, 4),
        ({"train.microbatches": 8}, {}, 8, 8),
        ({"eval.batch": 12}, {}, 1, 12),
        ({"eval.batch": 12}, {"most": 5}, 1, 5),
        ({}, {"sequence": 2048}, 1, 8),
        ({}, {"sequence": 2048}, 4, 32),
        ({}, {"sequence": 32_768}, 1, 1),
        ({}, {"sequence": 2048, "most": 11}, 1, 6),  # 6 and 5, not 8 and 3
        ({}, {"most": 40}, 1, 20),
        ({}, {"most": 3}, 4, 4),
    ],
)
def test_a_pass_has_the_rows_of_a_part_of_the_step_if_they_fit_and_there_are_as_many(
    settings, options, ways, rows
):
    run = Run().changed({"train.batch": 32, "data.sequence": 128} | settings)
    assert setup.pass_rows(run, mesh_of(ways), **options) == rows


@pytest.mark.usefixtures("one_device", "without_plots")
def test_eval_reads_parts_of_the_step_and_its_totals_are_those_of_any_batch(
    tmp_path, capsys, monkeypatch
):
    settings = {"train.steps": 2, "train.batch": 8, "train.microbatches": 4}
    run = harness.trained(harness.write_config(tmp_path, settings), tmp_path / "run")
    shapes, evaluate = [], loss.evaluate

    def watched(step, batches, put, *more):
        batches = list(batches)
        shapes.append(jax.tree.leaves(batches[0])[0].shape[0])
        return evaluate(step, batches, put, *more)

    monkeypatch.setattr(loss, "evaluate", watched)
    results = []
    for words in ([], ["--batch=8"]):
        capsys.readouterr()
        assert main(["eval", f"--workdir={run}", "--json", *words]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert shapes == [2, 8]
    assert results[0]["loss_nats"] == pytest.approx(results[1]["loss_nats"], rel=1e-6)
