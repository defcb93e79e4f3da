"""Models of a family at other sizes: valid, in proportion, and the run's own at its own width."""

import dataclasses

import numpy as np
import pytest

from jaxlm.core import config
from jaxlm.models.cost import model_cost
from jaxlm.recipes.config import Run
from jaxlm.recipes.scaling import resize_model

CONFIGS = (
    "configs/quickstart.py",
    "configs/gpt2_124m.py",
    "configs/llama_8b.py",
    "configs/mixtral_8x7b.py",
    "configs/moe_fine.py",
)


@pytest.fixture(scope="module", params=CONFIGS)
def run(request):
    return config.load(Run, request.param).value


@pytest.mark.few(10)
@pytest.mark.parametrize("width", [8, 24, 40, 200, 384, 1000, 4096, 12_288])
def test_every_width_is_a_model_that_the_family_accepts(run, width):
    changed = run.changed(
        resize_model.settings_at_width(run, width)
    )  # raises where a rule of the family is broken
    assert changed.model.width == width
    share = width / run.model.width
    assert changed.model.depth == max(1, round(run.model.depth * share))
    model = dataclasses.replace(changed.model, vocab=512).build()
    assert model_cost.parameters(model) == model_cost.parameters(
        resize_model.decoder(run, 512, width)
    )


def test_the_width_of_the_run_changes_nothing(run):
    assert resize_model.settings_at_width(run, run.model.width) == {}


def test_heads_keep_their_size_where_the_width_allows_it():
    run = config.load(Run, "configs/llama_8b.py").value
    changed = run.changed(resize_model.settings_at_width(run, 1024)).model
    assert (changed.size_of_head, changed.heads, changed.kv_heads) == (128, 8, 2)
    assert (changed.depth, changed.hidden) == (8, 3584)


@pytest.mark.parametrize("parameters", [1e8, 1e9, 7e10])
def test_the_nearest_shape_has_about_so_many_parameters(run, parameters):
    width = resize_model.nearest(run, 50_304, parameters)
    nearest_count = model_cost.active_parameters(resize_model.decoder(run, 50_304, width))
    assert nearest_count == pytest.approx(parameters, rel=0.12)


def test_costs_are_those_of_the_models(run):
    table = resize_model.costs(run, 4096)
    assert (np.diff(table.parameters) > 0).all()
    for width in (96, 640, 2048):
        decoder = resize_model.decoder(run, 4096, width)
        each = model_cost.flops_per_token(decoder, run.data.sequence, causal=True)
        assert table.at(model_cost.active_parameters(decoder)) == pytest.approx(each, rel=0.06)
