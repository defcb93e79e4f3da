"""scripts/Dockerfile: what it copies makes the whole wheel, with the extras that it names."""

import json
import os
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


def copied(folder):
    """Do what the COPY lines do, below a folder."""
    for *sources, target in COPIES:
        for source in sources:
            place = folder / target.removeprefix("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)


@pytest.mark.slow
def test_its_steps_install_the_command_in_an_empty_environment(tmp_path):
    """The base image, the build by a container runtime, and extras for devices are not tested."""
    copied(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    environment["PATH"] = f"{tmp_path / 'venv/bin'}:{environment['PATH']}"
    steps = re.findall(r"^RUN (.*?[^\\])\n", TEXT, re.MULTILINE | re.DOTALL)
    assert len(steps) == 1
    for step in steps:
        words = ["sh", "-ec", step.replace("/source", f"{tmp_path}/source")]
        subprocess.run(words, env=environment, cwd=tmp_path, check=True)
    assert not (tmp_path / "source").exists()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", TEXT, re.MULTILINE)
    (default,) = re.findall(r"^CMD (.*)$", TEXT, re.MULTILINE)
    (folder,) = re.findall(r"^WORKDIR (.*)$", TEXT, re.MULTILINE)
    workspace = tmp_path / folder.removeprefix("/")
    workspace.mkdir()
    for name, value in re.findall(r"^ENV (\w+)=(.*)$", TEXT, re.MULTILINE):
        environment[name] = value.replace(folder, str(workspace))
    tokenize = ["data", "stats", "--config=quickstart", "--config.data.tokenizer=bytes"]
    for words in (json.loads(default), ["plan", "--config=quickstart", "--on=t4"], tokenize):
        command = [str(tmp_path / "venv/bin" / json.loads(entry)[0]), *words]
        subprocess.run(command, env=environment, cwd=workspace, check=True, capture_output=True)
    assert list((workspace / ".cache/jaxlm").iterdir()), "the cache is in the volume"


@pytest.mark.slow
def test_what_it_copies_makes_the_whole_wheel(tmp_path):
    copied(tmp_path)
    words = ["wheel", "--quiet", "--no-deps", f"--wheel-dir={tmp_path}", str(tmp_path / "source")]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxlm").rglob("*.py")}
    assert code <= names
    assert {"jaxlm/configs/quickstart.py", "jaxlm/docs/python.md"} <= names
