"""The recipes that we ship.

After a change that is meant: JAXLM_WRITE_GOLDENS=1 python -m pytest tests/configs
"""

import json
import os
import re
from pathlib import Path

import pytest

from jaxlm.core import config
from jaxlm.corpus.config import Recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs/data").glob("*.py"))
GOLDENS = ROOT / "tests/golden/recipes"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_what_it_was(path):
    resolved = config.to_json(config.load(Recipe, str(path)).value)
    golden = GOLDENS / f"{path.stem}.json"
    if os.environ.get("JAXLM_WRITE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps(resolved, indent=1) + "\n")
    assert resolved == json.loads(golden.read_text())


def test_every_golden_has_its_recipe():
    assert {path.stem for path in GOLDENS.glob("*.json")} == {path.stem for path in RECIPES}
    assert len(RECIPES) >= 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_command_hardware_and_expectation(path):
    opening = path.read_text().split('"""')[1]
    assert f"jaxlm data run --config=data/{path.stem}" in opening
    assert "Hardware: " in opening
    assert re.search(r"Expect|expect", opening)
