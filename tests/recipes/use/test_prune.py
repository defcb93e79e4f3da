"""Runs of some layers of another run: exact weights, harm by layer, and what cannot be kept."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.families.deepseek import DeepSeekV2
from jaxlm.models.families.gemma import Gemma3
from jaxlm.recipes.compare import summary
from jaxlm.recipes.use import load, prune
from jaxlm.training.rundir import IMPORTED
from tests.faults import harness
from tests.models.parameters import draw_params

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "model.depth": 4,
    "model.dropout": 0.0,
    "train.steps": 4,
    "checkpoint.every": 2,
    "sample.prompts": (),
    "eval.batches": 2,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run of four layers."""
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "whole")


def keeping(whole, out, keep, *flags):
    return ["prune", f"--workdir={whole}", f"--out={out}", f"--keep={keep}", *flags]


@pytest.fixture(scope="module")
def pruned(whole, tmp_path_factory):
    """The run of layers 0, 2 and 3."""
    out = tmp_path_factory.mktemp("pruned") / "small"
    assert main(keeping(whole, out, "0,2,3")) == 0
    return out


def logits(loaded, ids, layers=None):
    """Logits of ids, or of the model whose other layers pass the stream on unchanged."""
    params = loaded.params
    if layers is not None:
        dead = [n for n in range(loaded.model.blueprint.config.depth) if n not in layers]
        params = tree.map_with_path(
            lambda path, x: (
                x.at[np.array(dead)].set(0)
                if path.endswith(("attention/out/weight", "mlp/down/weight")) and dead
                else x
            ),
            params,
        )
    return np.asarray(jax.jit(lambda params: loaded.model.blueprint.merge(params)(ids))(params))


@pytest.mark.few(1)
@pytest.mark.parametrize(("keep", "layers"), [("0,2,3", [0, 2, 3]), ("even:2", [0, 3]), ("1", [1])])
def test_the_logits_are_those_of_the_whole_model_with_the_other_layers_skipped(
    whole, pruned, tmp_path, keep, layers
):
    small = pruned
    if keep != "0,2,3":
        small = tmp_path / "small"
        assert main(keeping(whole, small, keep)) == 0
    assert json.loads((small / IMPORTED).read_text())["kept"] == layers
    assert summary.summarize(small).status == "pruned"
    ids = np.array([[5, 80, 90, 100, 9]])
    one, other = load.load_run(whole), load.load_run(small)
    np.testing.assert_allclose(logits(other, ids), logits(one, ids, layers), atol=1e-5)
    for path, leaf in tree.leaves(one.params).items():
        expected = leaf[np.array(layers)] if path.startswith("stack/") else leaf
        assert np.array_equal(tree.leaves(other.params)[path], expected), path


def test_the_harm_of_a_layer_is_the_loss_of_the_run_without_it(whole, tmp_path, capsys):
    out = tmp_path / "small"
    assert main(keeping(whole, out, "harm:3", "--json", "--batches=1000")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["harm_nats"]) == 4
    least = int(np.argmin(answer["harm_nats"]))
    assert answer["kept"] == [n for n in range(4) if n != least]
    assert main(["eval", f"--workdir={out}", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["loss_nats"]
    losses = answer["loss_nats"]
    assert losses["after"] == pytest.approx(measured, rel=1e-5)
    assert losses["after"] - losses["before"] == pytest.approx(min(answer["harm_nats"]), abs=1e-5)


@pytest.mark.slow
def test_a_student_of_kept_layers_trains_and_resumes_to_the_same_bits(config, whole, tmp_path):
    small = tmp_path / "small"
    assert main(keeping(whole, small, "0,3")) == 0
    flags = [f"--init_from={small}", "--config.model.depth=2"]
    flags += ["--config.objective.name=distill", f"--config.objective.teacher={whole}"]
    assert main(harness.words(config, tmp_path / "a", *flags)) == 0
    assert main(harness.words(config, tmp_path / "b", *flags, "--stop_at=2")) == 0
    assert main(harness.words(config, tmp_path / "b", *flags)) == 0
    assert harness.losses(tmp_path / "a") == harness.losses(tmp_path / "b")


def test_another_width_is_refused(config, pruned, tmp_path, capsys):
    flags = [f"--init_from={pruned}", "--config.model.width=64"]
    assert main(harness.words(config, tmp_path / "run", *flags)) == 2
    assert "--config.model.width=32" in capsys.readouterr().err


SIZES = {"vocab": 64, "width": 16, "heads": 2, "depth": 8, "hidden": 32}
KINDS = {
    "gemma3": (Gemma3(**SIZES, kv_heads=1), [0, 1, 2, 3, 4, 5], {}),
    "deepseek_v2": (
        DeepSeekV2(**SIZES, dense_hidden=16, experts=2, top_k=1, groups=1, top_groups=1),
        [0, 3, 7],
        {"dense_depth": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_layers_of_several_kinds_keep_their_bits(name):
    """The layers of a smaller model are those of the whole one, wherever their kinds are stored."""
    family, numbers, settings = KINDS[name]
    small = dataclasses.replace(family, depth=len(numbers), **settings).build()
    before = Blueprint(family.build(), Precision.float32())
    after = Blueprint(small, Precision.float32())
    params = draw_params(before)
    chosen = prune.kept(params, before.config, small, numbers)
    shapes = jax.tree.map(lambda x: x.shape, after.shapes)
    assert jax.tree.map(lambda x: x.shape, chosen) == shapes
    for new, number in enumerate(numbers):
        (folder, row), (target, place) = (
            prune._place(each, n) for each, n in ((before.config, number), (small, new))
        )
        name = "attention/out/weight"
        one = tree.leaves(params)[f"{folder}/{name}"][row]
        assert np.array_equal(tree.leaves(chosen)[f"{target}/{name}"][place], one)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("keep", "text"),
    [
        ("0,4", "the run has 4 layers"),
        ("0,1,4", "--keep=even:3"),
        ("1,1", "--keep=1"),
        ("2,0", "--keep=0,2"),
        ("even:0", "at least one layer"),
        ("harm:9", "--keep=harm:2"),
        ("harm:4", "4 layers, and all stay"),
        ("0,1,2,3", "--keep=even:2"),
        ("", "no list of numbers"),
        ("some", "no list of numbers"),
        ("-1", "no list of numbers"),
    ],
)
def test_layers_that_cannot_be_kept_are_refused(whole, tmp_path, capsys, keep, text):
    assert main(keeping(whole, tmp_path / "out", keep)) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
