"""scripts/bench_step.py, which builds the step by hand and so breaks where its parts change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_step.py"


def bench(*words):
    """Figures of the script, on one core as in its docstring."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # which a process inherits
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words, "--json"],
            capture_output=True,
            text=True,
            cwd=SCRIPT.parents[1],
            # The hand-written side is as a person would write it, ranks promoted.
            env=os.environ | {"XLA_FLAGS": "", "JAX_NUMPY_RANK_PROMOTION": "allow"},
        )
    finally:
        os.sched_setaffinity(0, cores)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_both_sides_are_the_same_model_and_are_timed():
    figures = bench("--rounds=2", "--steps=2")
    assert len(figures["ratios"]) == 2
    assert min(figures["tokens_per_second"].values()) > 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("size", "parameters", "least"), [("quickstart", 3.476e6, 0.90), ("100m", 97.5e6, 0.97)]
)
def test_loop_config_and_flax_cost_at_most_their_share_of_a_step(
    size, parameters, least, record_property
):
    """The median over rounds; in each of them both sides take turns."""
    figures = bench(f"--size={size}")
    record_property(
        "table",
        f"jaxlm's step over a hand-written one, {size}: {figures['ratio']:.3f}, rounds "
        f"{[round(each, 3) for each in figures['ratios']]}",
    )
    assert figures["parameters"] == pytest.approx(parameters, rel=0.01)
    assert figures["ratio"] >= least
