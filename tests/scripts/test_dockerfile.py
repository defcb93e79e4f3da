"""scripts/Dockerfile: what it copies makes the whole wheel, with the extras that it names."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "scripts/Dockerfile").read_text()
COPIES = [line.split()[1:] for line in TEXT.splitlines() if line.startswith("COPY ")]


def test_the_extras_that_it_names_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set(re.findall(r"EXTRA=(\w+)", TEXT)) | {"cuda12"}
    assert named == {"cuda", "cuda12", "tpu"} < set(extras)
    assert all((ROOT / source).exists() for *sources, _ in COPIES for source in sources)


@pytest.mark.slow
def test_what_it_copies_makes_the_whole_wheel(tmp_path):
    for *sources, target in COPIES:
        for source in sources:
            place = tmp_path / target.removeprefix("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    words = ["wheel", "--quiet", "--no-deps", f"--wheel-dir={tmp_path}", str(tmp_path / "source")]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxlm").rglob("*.py")}
    assert code <= names
    assert {"jaxlm/configs/quickstart.py", "jaxlm/docs/python.md"} <= names
