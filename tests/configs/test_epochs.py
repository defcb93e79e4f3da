"""Configs that train on conversations and answers of users limit their passes."""

from pathlib import Path

import pytest

from jaxlm.core import config
from jaxlm.recipes.config import Run

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(
    path for part in ("finetune", "preference") for path in (CONFIGS / part).glob("*.py")
)


@pytest.mark.parametrize("path", NAMES, ids=lambda path: path.stem)
def test_a_set_of_any_size_is_trained_on_for_at_most_three_passes(path):
    loaded = config.load(Run, str(path), [("data.train", "answers.jsonl")])
    assert loaded.value.train.epochs == 3.0
