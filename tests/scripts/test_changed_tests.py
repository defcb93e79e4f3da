"""scripts/changed_tests.py selects the tests that a change can break."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("changed_tests", ROOT / "scripts/changed_tests.py")
changed_tests = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(changed_tests)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changed", "included", "excluded"),
    [
        ("jaxlm/optim/muon.py", "tests/optim/test_muon.py", "tests/corpus/test_pii.py"),
        ("jaxlm/corpus/filters/pii.py", "tests/corpus/test_pii.py", "tests/optim/test_muon.py"),
        ("jaxlm/core/mean.py", "tests/objectives/test_token_nll.py", "tests/corpus/test_pii.py"),
        ("jaxlm/cli/plan.py", "tests/cli", "tests/optim/test_muon.py"),
        ("tests/optim/arms.py", "tests/optim/test_build.py", "tests/corpus/test_pii.py"),
        ("scripts/bench_step.py", "tests/scripts/test_bench_step.py", "tests/cli"),
        ("README.md", "tests/house", "tests/cli"),
    ],
)
def test_a_change_selects_the_tests_that_import_it(changed, included, excluded):
    selected = changed_tests.selected([changed])
    assert included in selected
    assert excluded not in selected


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "tests/conftest.py", "configs/quickstart.py"]
)
def test_a_change_that_no_import_shows_selects_all_tests(changed):
    assert changed_tests.selected([changed]) == ["tests"]


def test_no_change_selects_no_test():
    assert changed_tests.selected([]) == []
