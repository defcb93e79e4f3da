"""The scaling model's bytes in closed form are those that a compiled step sends."""

import importlib.util
from pathlib import Path

import jax
import pytest

from jaxlm.core import config
from jaxlm.parallel import collectives, mesh
from jaxlm.recipes import topology, traffic
from jaxlm.recipes.config import Run

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model.vocab": "512",
    "model.depth": "3",
    "model.width": "32",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.hidden": "64",
    "data.sequence": "14",
    "train.batch": "8",
    "train.remat": "full",
    "mesh.data": "1",
}
TOKENS, MARK, VOCAB = 8 * 14, 7, 512


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "scripts/scaling_model.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def sent(settings, devices):
    """Bytes that a device of a compiled step sends, by kind, axis and content; matrices apart from vectors."""
    run = config.load(Run, None, list((SETTINGS | settings).items())).value
    grid = mesh.build(run.mesh, jax.devices()[:devices])
    text = topology.compile_step(run, grid).as_text()
    total = {}
    for each in collectives.read(text):
        axes = each.axes(grid.shape)
        for shape in each.shapes:
            if sum(size > 1 for size in shape.sizes) < 2:
                continue  # norms, sums
            content = traffic.content_of(shape, TOKENS, VOCAB, MARK)
            key = (each.kind, *axes, content)
            one = each.sent * shape.bytes / each.bytes * each.times
            if (
                each.kind == "collective-permute"
            ):  # the devices that do not send in one do in another
                one *= len(each.groups.members) / grid.size
            total[key] = total.get(key, 0) + one
    return total, run, dict(grid.shape)


def work(model, run, sizes, **given):
    rows = run.train.batch // (sizes["data"] * sizes["fsdp"])
    return model.Work(
        model=run.model.build(),
        sequence=run.data.sequence // sizes["context"],
        rows=rows,
        microbatches=run.train.microbatches,
        **(dict(weight_bytes=4, gradient_bytes=4, activation_bytes=4) | given),
    )


def test_fsdp_and_tensor_send_what_the_closed_form_says(model):
    found, run, sizes = sent({"mesh.fsdp": "2", "mesh.tensor": "2"}, 4)
    gathered = model.fsdp_bytes(work(model, run, sizes, gradient_bytes=0), sizes)
    assert found["all-gather", "fsdp", "parameters"] == gathered
    # XLA for CPU writes a scatter of sums as a sum, which a ring sends twice.
    scattered = model.fsdp_bytes(work(model, run, sizes, weight_bytes=0), sizes)
    assert found["all-reduce", "fsdp", "parameters"] == 2 * scattered
    assert found["all-reduce", "tensor", "activations"] == model.tensor_bytes(
        work(model, run, sizes), sizes
    )


@pytest.mark.slow
def test_stages_send_what_the_closed_form_says(model):
    """Two layers a stage: weights of a single one would be gathered once, ahead of the loop over ticks."""
    settings = {"model.depth": "4", "mesh.pipe": "2", "train.microbatches": "4"}
    found, run, sizes = sent(settings | {"mesh.fsdp": "2"}, 4)
    gathered = model.fsdp_bytes(work(model, run, sizes, gradient_bytes=0), sizes)
    assert found["all-gather", "fsdp", "parameters"] == gathered
    scattered = model.fsdp_bytes(work(model, run, sizes, weight_bytes=0), sizes)
    assert found["all-reduce", "fsdp", "parameters"] == 2 * scattered
    handed_on = found["collective-permute", "pipe", "activations"]
    summed = found["all-reduce", "pipe", "activations"]
    assert handed_on + summed == model.pipe_bytes(work(model, run, sizes), sizes)
    found, run, sizes = sent(settings | {"mesh.data": "2"}, 4)
    assert found["all-reduce", "data", "parameters"] == model.data_bytes(
        work(model, run, sizes), sizes
    )


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_split_row_sends_what_the_closed_form_says(model, microbatches):
    settings = {"mesh.context": "2", "mesh.fsdp": "2", "train.microbatches": str(microbatches)}
    found, run, sizes = sent(settings, 4)
    keys = model.context_bytes(work(model, run, sizes, gradient_bytes=0), sizes)
    gathered = found["all-gather", "context", "activations"]
    assert gathered + found["all-reduce", "context", "activations"] / 2 == keys
    summed = model.context_bytes(work(model, run, sizes, activation_bytes=0), sizes)
    assert found["all-reduce", "context", "parameters"] == summed


@pytest.mark.slow
def test_data_sends_what_the_closed_form_says(model):
    found, run, sizes = sent({"mesh.data": "4", "train.microbatches": "2"}, 4)
    assert found["all-reduce", "data", "parameters"] == model.data_bytes(
        work(model, run, sizes), sizes
    )
    assert not any("activations" in key for key in found)


def test_the_table_covers_both_models_and_marks_what_does_not_pay(model, tmp_path):
    models = {
        name: config.load(Run, str(ROOT / f"configs/{name}.py")).value.model.build()
        for name in ("llama_8b", "llama_70b")
    }
    for name, decoder in models.items():
        text = model.table(name, decoder, tokens=8192, sequence=4096)
        assert "4,096" in text
        assert all(strategy.name in text for strategy in model.STRATEGIES)
        found = list(model.outcomes(decoder, tokens=8192, sequence=4096))
        assert all(each.compute_seconds > 0 for each in found)
        assert any(each.pays for each in found)
        assert not all(each.pays for each in found)
    model.draw(models, tmp_path / "plot.png", tokens=8192, sequence=4096)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_compute_is_six_flops_a_parameter_and_a_third_again_for_remat(model):
    decoder = config.load(Run, str(ROOT / "configs/llama_8b.py")).value.model.build()
    found = model.outcome(model.STRATEGIES[1], decoder, 64, tokens=4096, sequence=4096)
    least = 8 * 7.5e9 * 4096 / model.PEAK_FLOPS
    assert least < found.compute_seconds < 1.3 * least
    assert model.outcome(model.STRATEGIES[1], decoder, 64, tokens=2048, sequence=4096) is None
