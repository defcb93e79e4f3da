import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_imports_only_go_down_and_oracles_are_no_dependencies():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def house(tmp_path):
    """A copy of the house that a test may damage."""
    for path in (ROOT / "jaxlm").rglob("*.py"):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "broken"),
    [
        ("core/upwards.py", "import jaxlm.models.config\n", "Imports only go down BROKEN"),
        ("data/sideways.py", "import jaxlm.nn.config\n", "Imports only go down BROKEN"),
        ("ops/oracle.py", "import torch\n", "Test oracles are no dependencies BROKEN"),
        ("nn/extra.py", "", "KEPT"),
    ],
)
def test_a_wrong_import_is_found(house, file, text, broken):
    (house / "jaxlm" / file).write_text(text)
    assert broken in lint(house).stdout


def test_a_config_that_imports_jax_is_found(house):
    config = house / "jaxlm/training/config.py"
    config.write_text(config.read_text() + "\nimport jax\n")
    assert "Reading a config starts no accelerator BROKEN" in lint(house).stdout


def test_cleaning_that_imports_jax_is_found(house):
    (house / "jaxlm/corpus/filters/scored.py").write_text("import jax\n")
    assert "Cleaning text needs no accelerator BROKEN" in lint(house).stdout


def test_a_room_that_nobody_planned_is_found(house):
    room = house / "jaxlm/utils"
    room.mkdir()
    (room / "__init__.py").touch()
    done = lint(house)
    assert done.returncode != 0
    assert "utils" in done.stdout
