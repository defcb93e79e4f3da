"""The scaling model draws its table and plot from counted FLOPs and bytes."""

import importlib.util
from pathlib import Path

import pytest

from jaxlm.core import config
from jaxlm.recipes.config import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "scripts/scaling_model.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


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
