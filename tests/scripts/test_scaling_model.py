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
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kept_table_is_what_is_printed_now(model):
    table = (ROOT / "scripts/scaling_model.md").read_text()
    for name, decoder in model.models().items():
        assert model.table(name, decoder, tokens=8192, sequence=4096) in table
    assert (ROOT / "scripts/scaling_model.png").stat().st_size < 100_000


def test_the_table_covers_both_models_and_marks_what_does_not_pay(model, tmp_path):
    models = model.models()
    for name, decoder in models.items():
        text = model.table(name, decoder, tokens=8192, sequence=4096)
        assert "4,096" in text
        assert all(strategy.name in text for strategy in model.STRATEGIES)
        outcomes = list(model.outcomes(decoder, tokens=8192, sequence=4096))
        assert all(each.compute_seconds > 0 for each in outcomes)
        assert any(each.pays for each in outcomes)
        assert not all(each.pays for each in outcomes)
    model.draw(models, tmp_path / "plot.png", tokens=8192, sequence=4096)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# Llama 8B by hand: 32 layers, 4,096 wide, 8 of 32 heads for keys, 14,336 hidden, 128,256 ids, rows
# of 4,096 tokens.
BLOCKS = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
TABLE = 128256 * 4096
# 6 FLOPs for each weight, and for attention 12 T D a layer, half of it causal; forward again is a
# third of all.
TOKEN_SECONDS = 4 / 3 * (6 * (BLOCKS + TABLE) + 6 * 32 * 4096 * 4096) / 459e12
# In bf16 blocks and the unembedding are gathered twice and the embedding once; in fp32 gradients
# are scattered.
STATE = 2 * (2 * BLOCKS + 3 * TABLE) + 4 * (BLOCKS + 2 * TABLE)
# Two sums of the stream forward, five backward and one again in each layer, and two outside of the
# layers; of 4 or 8 chips' tokens.
STREAM = 4096 * 2 * (8 * 32 + 2)
FSDP_64 = 63 / 64 * STATE / 600e9  # six links, both ways
TENSOR_4 = (
    2 * 3 / 4 * 4 * STREAM / 200e9
)  # of 8 chips: no ring is closed, so two links of one way, and one for fsdp
FSDP_2 = 1 / 2 * STATE / 4 / 100e9
# Weights are gathered in float32, and their gradients scattered and gathered.
ZERO_1 = 63 / 64 * 3 * 4 * (BLOCKS + 2 * TABLE) / 600e9


@pytest.mark.parametrize(
    ("name", "chips", "tokens", "shown"),
    [
        ("fsdp", 64, FSDP_64 / TOKEN_SECONDS, "740'"),
        ("data, ZeRO 1", 64, ZERO_1 / TOKEN_SECONDS, "1,128'"),
        ("fsdp x tensor 4", 8, FSDP_2 / (TOKEN_SECONDS - TENSOR_4), "1,029"),
        ("fsdp x tensor 8", 4096, float("inf"), "never"),
        ("fsdp x tensor 8", 8, 0.0, "any"),
    ],
)
def test_where_a_strategy_stops_paying_is_what_a_calculation_by_hand_says(
    model, name, chips, tokens, shown
):
    decoder = config.load(Run, str(ROOT / "configs/llama_8b.py")).value.model.build()
    (strategy,) = (each for each in model.STRATEGIES if each.name == name)
    crossover = model.crossover(strategy, decoder, chips, sequence=4096)
    assert crossover.tokens == pytest.approx(tokens, rel=1e-3, abs=1e-6)
    assert str(crossover) == shown


def test_at_the_crossover_communication_takes_as_long_as_compute(model):
    decoder = config.load(Run, str(ROOT / "configs/llama_70b.py")).value.model.build()
    for strategy in model.STRATEGIES:
        where = model.crossover(strategy, decoder, 4096, sequence=64)
        if where is None or where.tokens < 16 * 64 or where.tokens == float("inf"):
            continue
        for factor in (0.8, 1.25):
            tokens = round(factor * where.tokens / 64) * 64
            outcome = model.outcome(strategy, decoder, 4096, tokens=tokens, sequence=64)
            assert (outcome.sent_total < outcome.compute_seconds) == (factor > 1), strategy.name


def test_compute_is_six_flops_a_parameter_and_a_third_again_for_remat(model):
    decoder = config.load(Run, str(ROOT / "configs/llama_8b.py")).value.model.build()
    outcome = model.outcome(model.STRATEGIES[2], decoder, 64, tokens=4096, sequence=4096)
    least = 8 * 7.5e9 * 4096 / model.PEAK_FLOPS
    assert least < outcome.compute_seconds < 1.3 * least
    assert model.outcome(model.STRATEGIES[2], decoder, 64, tokens=2048, sequence=4096) is None
