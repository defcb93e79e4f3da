"""The configs that we ship.

After a change that is meant: JAXLM_WRITE_GOLDENS=1 python -m pytest tests/configs
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import pytest

from jaxlm.core import config
from jaxlm.models.cost import model_cost
from jaxlm.parallel.config import factorizations
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests/golden/configs"
SHIPPED = {
    "quickstart": "quickstart.py",
    "quickstart_long": "quickstart.py:long",
    "shakespeare_char": "shakespeare_char.py:input.txt",
    "gpt2_124m": "gpt2_124m.py",
    "gpt2_1p5b": "gpt2_1p5b.py",
    "llama_1b": "llama_1b.py",
    "llama_8b": "llama_8b.py",
    "llama_70b": "llama_70b.py",
    "mixtral_8x7b": "mixtral_8x7b.py",
    "moe_fine": "moe_fine.py",
}
PUBLISHED = {  # parameters, and the devices that the docstring names
    "gpt2_124m": (124_439_808, 8),
    "gpt2_1p5b": (1_557_611_200, 8),
    "llama_1b": (1_235_814_400, 8),
    "llama_8b": (8_030_261_248, 64),
    "llama_70b": (70_553_706_496, 512),
    "mixtral_8x7b": (46_702_792_704, 64),
    "moe_fine": (16_375_728_128, 8),
}


def load(name: str) -> Run:
    return config.load(Run, str(ROOT / "configs" / SHIPPED[name])).value


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_what_it_was(name):
    resolved = config.to_json(load(name))
    golden = GOLDENS / f"{name}.json"
    if os.environ.get("JAXLM_WRITE_GOLDENS"):
        golden.write_text(json.dumps(resolved, indent=1) + "\n")
    assert resolved == json.loads(golden.read_text())


def test_every_shipped_config_has_a_golden_and_every_golden_a_config():
    files = {path.name for path in (ROOT / "configs").glob("*.py")}
    assert files == {entry.partition(":")[0] for entry in SHIPPED.values()}
    assert {path.stem for path in GOLDENS.glob("*.json")} == set(SHIPPED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_the_published_number_of_parameters(name):
    assert model_cost.parameters(load(name).model.build()) == PUBLISHED[name][0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_fits_the_devices_that_its_docstring_names(name):
    run, devices = load(name), PUBLISHED[name][1]
    assert f" {devices} GPUs" in (ROOT / f"configs/{name}.py").read_text()
    sizes = run.mesh.sizes(devices)
    assert sizes in factorizations(devices)
    assert run.train.batch % (sizes["data"] * sizes["fsdp"] * run.train.microbatches) == 0
    decoder = run.model.build()
    split = {"heads": decoder.pattern[0].attention.kv_heads, "vocab": decoder.vocab}
    assert all(size % sizes["tensor"] == 0 for size in split.values())
    assert decoder.width % sizes["fsdp"] == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_takes_any_number_of_steps(name):
    path = str(ROOT / "configs" / SHIPPED[name])
    run = config.load(Run, path, [("train.steps", "5")]).value
    assert run.schedule.warmup.steps(5, run.tokens_per_step) < 5


def test_the_quickstart_divides_over_the_meshes_that_readers_try():
    model, run = load("quickstart").model, load("quickstart")
    assert all(size % 2 == 0 for size in (model.depth, model.heads, model.kv_heads))
    assert run.data.sequence % 8 == run.train.batch % 8 == 0


def test_the_shakespeare_config_is_nanogpts_cpu_setting():
    """Except the initial weights: nanoGPT's own end above its loss, see scripts/LOG.md."""
    run = load("shakespeare_char")
    assert (run.model.init, run.model.activation) == ("xavier", "gelu")
    assert (run.model.depth, run.model.heads, run.model.width) == (4, 4, 128)
    assert (run.data.sequence, run.train.batch, run.train.steps) == (64, 12, 2000)
    assert (run.optim.lr, run.optim.b1, run.optim.b2) == (1e-3, 0.9, 0.99)
    assert (run.optim.weight_decay, run.optim.clip_norm) == (0.1, 1.0)
    assert run.schedule.warmup.steps(2000, run.tokens_per_step) == 100
    assert run.schedule.floor * run.optim.lr == pytest.approx(1e-4)
    assert (run.model.dropout, run.model.bias) == (0.0, False)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", ["quickstart", "shakespeare_char"])
def test_the_layers_of_a_small_config_are_no_loop_on_a_cpu(name):
    run = load(name)
    mesh = setup.build_mesh_for(run)
    ids = jax.ShapeDtypeStruct((8, 16), "int32")

    def loops(stack):
        settings = dataclasses.replace(run, train=dataclasses.replace(run.train, stack=stack))
        blueprint = setup.build_sharded_model(settings, 512, mesh).blueprint
        with jax.set_mesh(mesh):
            params = jax.eval_shape(blueprint.init, jax.random.key(0))
            traced = jax.make_jaxpr(lambda params, ids: blueprint.merge(params)(ids))(params, ids)
        return str(traced).count("scan[")

    assert run.train.stack == "auto"
    assert loops("auto") == loops("unroll") < loops("scan")


@pytest.mark.parametrize("setting", [[], [("data.train", "my.txt")]])
def test_the_shakespeare_config_takes_its_text_as_any_setting(setting):
    run = config.load(Run, str(ROOT / "configs/shakespeare_char.py"), setting).value
    assert run.data.train == (("my.txt",) if setting else ("input.txt",))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem
)
def test_a_config_opens_with_command_hardware_time_and_expectation(path):
    opening = path.read_text().split('"""')[1]
    assert f"jaxlm train --config={path.stem}" in opening
    assert "Hardware: " in opening
    assert re.search(r"[Mm]inutes|Hours|Days", opening)
    assert re.search(r"Expect|expect", opening)
