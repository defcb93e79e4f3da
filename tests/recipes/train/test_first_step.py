"""Files of recipes from `jaxlm train` to the first step: few, and run.py names them."""

import re
import sys
from pathlib import Path

import pytest

import jaxlm
from jaxlm.core import faults
from jaxlm.recipes.train import run as training  # class bodies run now, at import
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

RECIPES = Path(jaxlm.__file__).parent / "recipes"
MOST = 10


def test_the_way_to_the_first_step_has_ten_files_at_most(tmp_path, monkeypatch):
    config = harness.write_config(tmp_path, {"train.steps": 2})
    entered, point = set(), faults.point

    def at(name, *arguments, **options):
        if name == "step.after":
            sys.setprofile(None)
        return point(name, *arguments, **options)

    def profile(frame, event, _):  # called at each call of Python: nothing but a set is cheap
        if event == "call" and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename)

    monkeypatch.setattr(faults, "point", at)
    before = sys.getprofile()
    try:
        sys.setprofile(profile)
        jaxlm.train(config, workdir=tmp_path / "run", stop_at=1, quiet=True)
    finally:
        sys.setprofile(before)
    paths = [Path(name).relative_to(RECIPES) for name in entered if name.startswith(str(RECIPES))]
    # The plan guards the memory and the sharding: one name.
    entered = {"plan" if path.parts[0] == "plan" else str(path) for path in paths}
    assert "plan" in entered
    assert "train/trainer.py" in entered
    assert len(entered) <= MOST, sorted(entered)
    named = set(re.findall(r"^- `([\w/.]+)`", training.__doc__, re.M))
    assert named == {f"recipes/{name}" for name in entered}
