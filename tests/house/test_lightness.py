"""Commands that must answer at once import no JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorboardX", "matplotlib")
LIGHT = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for pattern in (
        "*/config.py",
        "models/cost/model_cost.py",
        "recipes/scaling/loss_law.py",
        "optim/schedule_config.py",
        "optim/moments.py",
        "recipes/plan/divisibility.py",
        "recipes/plan/hardware.py",
        "recipes/plan/predict.py",
        "recipes/train/api.py",
        "recipes/plan/device_memory.py",
        "recipes/plan/search.py",
        "recipes/diagnose/schedule_plot.py",
        "recipes/compare/*.py",
        "recipes/scaling/plan.py",
        "recipes/scaling/law.py",
        "recipes/scaling/plan.py",
        "recipes/scaling/resize_model.py",
        "models/families/*.py",
        "cli/**/*.py",
        "monitor/*.py",
        "data/*.py",
        "corpus/**/*.py",
    )
    for path in (ROOT / "jaxlm").glob(pattern)
)


def heavy_after(statement: str) -> list[str]:
    """Heavy packages that a fresh Python has imported after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_configs_costs_data_the_command_line_and_the_monitor_import_no_jax():
    assert len(LIGHT) > 10
    assert heavy_after("\n".join(f"import {module}" for module in LIGHT)) == []


@pytest.mark.parametrize("module", ["jaxlm.core.precision", "matplotlib"])
def test_a_heavy_import_would_be_seen(module):
    assert heavy_after(f"import {module}") != []


def test_a_start_imports_no_kernels_for_other_hardware_and_no_scipy():
    names = "('splash' in n or n == 'scipy')"
    code = f"import sys, jaxlm.recipes.train.run; print(*(n for n in sys.modules if {names}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
