"""Importance of inputs: that of a float64 model, under the names of the tensors that read them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.core import tree
from jaxlm.core.errors import DataError, NotWritable
from jaxlm.models.build import Blueprint
from jaxlm.recipes.exchange import importance
from jaxlm.recipes.exchange.importance import CalibrationText
from jaxlm.recipes.use import calibration_text, evaluate
from jaxlm.recipes.use.layer_runner import ExpertRange, LayerRunner
from tests.models.parameters import draw_params
from tests.mutation import mutate
from tests.recipes.use.test_calibrate import (
    BLUEPRINT,
    EXPERTS,
    FAMILY,
    PRECISION,
    READERS,
    layer_of_one_token,
    rows,
)

NAMES = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}


def measured(model, batches, patch, folder, log=None):
    """Return the importance of a model that is no run: its blueprint, parameters and family.

    Args:
      model: those three.
      batches: the text.
      patch, folder: fixtures.
      log: list that receives log lines.
    """
    blueprint, params, family = model
    patch.setattr(evaluate, "names_no_data", lambda _: True)
    patch.setattr(calibration_text, "read", lambda *_: batches)
    opened = SimpleNamespace(model=SimpleNamespace(blueprint=blueprint), params=params)
    tensors = layout(blueprint.config, family.HUB)
    text = CalibrationText(("a.txt",), 1, "jaxlm export")
    return importance.of_text(opened, tensors, text, folder, ([] if log is None else log).append)


def check_means(patch, folder):
    """Each token is a document, so that attention returns its values; some slots are padding."""
    params = draw_params(BLUEPRINT, std=0.1)
    flat = {name: np.asarray(leaf, np.float64) for name, leaf in tree.leaves(params).items()}
    segments = np.arange(1, 17, dtype=np.int32)
    segments[12] = 0
    alone = {"segments": np.tile(segments, (4, 1)), "positions": np.zeros((4, 16), np.int32)}
    batches = [each._replace(**alone) for each in rows()]
    made = measured((BLUEPRINT, params, FAMILY), batches, patch, folder)
    x = flat["embedding/table"][np.concatenate([b.tokens[b.segments > 0] for b in batches])]
    for layer in range(2):
        weights = {name: flat[f"stack/0/{name}/weight"][layer] for name in NAMES}
        norms = [flat[f"stack/0/{name}/scale"][layer] for name in READERS]
        inputs, x = layer_of_one_token(x, weights, norms)
        for name, theirs in NAMES.items():
            expected = np.square(inputs[name]).mean(0)
            each = made.of[f"model.layers.{layer}.{theirs}.weight"]
            np.testing.assert_allclose(each, expected / expected.mean(), rtol=1e-4)
    assert (len(made.of), made.unread) == (14, 0)


def test_means_are_those_of_a_float64_model_without_padding(monkeypatch, tmp_path):
    check_means(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (LayerRunner, "_through", "jnp.where((batch.segments > 0)[..., None], rows, 0.0)", "rows"),
        (importance, "_of_layer", "jax.tree.map(jnp.add, sums, added) if sums else added", "added"),
        (importance, "_of_layer", "stream.write(number, outputs)", "pass"),
        (importance, "of_text", "(first.path, first.lead[0])", "(first.path, 0)"),
    ],
)
@pytest.mark.slow
def test_faults_are_caught(owner, name, old, new, monkeypatch, tmp_path):
    mutate(monkeypatch, owner, name, old, new)
    with pytest.raises(AssertionError):
        check_means(monkeypatch, tmp_path)


def test_experts_have_the_inputs_that_they_are_chosen_for(monkeypatch, tmp_path):
    """Against Gram matrices of calibrated codes; one id alone leaves experts without tokens."""
    blueprint, said = Blueprint(EXPERTS.build(), PRECISION), []
    params = draw_params(blueprint, std=0.1)
    (batch,) = rows(count=1)
    batch = batch._replace(tokens=np.zeros_like(batch.tokens))
    made = measured((blueprint, params, EXPERTS), [batch], monkeypatch, tmp_path, said)
    runner = LayerRunner(blueprint, params)
    x, unread = np.asarray(runner.embed(batch)), 0
    for layer, place in enumerate(runner.places):
        block = runner.block(place)
        sums = runner.inputs(place, block, ExpertRange(0, 4), x, batch)
        for names, (grams, _) in sums.items():
            for expert, gram in enumerate(np.asarray(grams)):
                theirs = "w1" if "gate" in names else "w2"
                stem = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{theirs}.weight"
                squares = np.diag(gram)
                if squares.any():
                    expected = np.maximum(squares / squares.mean(), importance.LEAST)
                    np.testing.assert_allclose(made.of[stem], expected, rtol=1e-3)
                else:
                    assert stem not in made.of
                    unread += theirs == "w2"
        x = np.asarray(runner.outputs(place, block, x, batch))
    assert 0 < unread == made.unread < 8
    assert said == [f"experts that no token of the text chose, without importance: {unread}"]
    assert "model.layers.1.block_sparse_moe.gate.weight" not in made.of  # the router is exact


def test_inputs_that_are_not_finite_and_a_full_disk_are_named(monkeypatch, tmp_path):
    params = jax.tree.map(lambda leaf: leaf, draw_params(BLUEPRINT, std=0.1))
    params["embedding"]["table"] = params["embedding"]["table"] * np.inf
    with pytest.raises(DataError, match="not finite") as error:
        measured((BLUEPRINT, params, FAMILY), rows(count=1), monkeypatch, tmp_path)
    assert error.value.fix == "jaxlm export"
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match="inputs of a layer"):
        measured((BLUEPRINT, params, FAMILY), rows(count=1), monkeypatch, tmp_path / "file/folder")
