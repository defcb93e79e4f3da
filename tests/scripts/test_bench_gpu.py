"""scripts/bench_gpu without a GPU: its commands, their environment, and its refusals."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.test_setup import Machine

ROOT = Path(__file__).parents[2]

# Its packages are listed in the file `has` of its folder; an installation adds all. It prints the
# command of a script.
PYTHON = """#!/bin/sh
has=$(dirname "$0")/has
lacks() {
  grep -q "$1" "$has" && return
  printf 'Traceback:\\nModuleNotFoundError: %s\\n' "$1" >&2; exit 1
}
case "$1 $2" in
  "-c "*ensurepip*) echo 3.13 ;;
  "-c "*version_info*) echo 3.13 ;;
  "-c "*torch*) lacks torch ;;
  "-c "*jaxlm*) lacks jax ;;
  "-c "*executable*) echo "$0" ;;
  "--version ") echo "Python 3.13" ;;
  "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip") echo "$@" >> "$PIP_CALLS"; echo "$INSTALLED" > "$has" ;;
  "scripts/"*) echo "ran $*"; echo "path $PYTHONPATH"; exit 3 ;;
esac
"""


class Bench(Machine):
    """A clone with the script, a GPU or none, and python3 with some packages."""

    def __init__(self, folder, *, gpus=1, has=""):
        super().__init__(folder)
        shutil.copy(ROOT / "scripts/bench_gpu", self.clone / "scripts")
        self._put("nvidia-smi", f"#!/bin/sh\nexit {0 if gpus else 9}\n")
        self._put("python3", PYTHON)
        (self.bin / "has").write_text(has)

    def _put(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def bench(self, words="", installed="torch jax"):
        return self.run(f"exec bash scripts/bench_gpu {words}", INSTALLED=installed)


def test_shellcheck_finds_nothing():
    tool = Path(sys.executable).parent / "shellcheck"  # of the test extra
    done = subprocess.run(
        [tool, "-x", "scripts/bench_gpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert os.access(ROOT / "scripts/bench_gpu", os.X_OK)


def test_without_a_gpu_it_is_one_clear_line_with_what_can_be_tried(tmp_path):
    done = Bench(tmp_path, gpus=0).bench()
    assert done.returncode == 66
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nvidia-smi lists no NVIDIA GPU;")
    assert "--alone --size=gpt2-tiny,llama-tiny" in line


def test_a_python_that_has_all_is_used_as_it_is(tmp_path):
    machine = Bench(tmp_path, has="torch jax")
    done = machine.bench("llama-1B@2048 gpt2-124M@2048 --rounds=2 --config.loss.chunk=2048")
    assert done.returncode == 3, done.stderr
    which, ran, path = done.stdout.splitlines()
    assert which == f"== with {machine.bin}/python3"
    assert ran == (
        "ran scripts/bench_torch.py --on=gpu --size=llama-1B@2048,gpt2-124M@2048 --minutes=8.5 "
        "--out=bench_gpu.json --rounds=2 --config.loss.chunk=2048"
    )
    assert path == f"path {machine.clone}"
    assert machine.installs == []


@pytest.mark.parametrize("has", ["", "torch", "jax"])
def test_an_environment_is_made_where_no_python_has_all(tmp_path, has):
    machine = Bench(tmp_path, has=has)
    done = machine.bench()
    assert done.returncode == 3, done.stderr
    lacking = "jax" if "torch" in has else "torch"
    assert done.stdout.startswith(f"== not with python3: ModuleNotFoundError: {lacking}\n")
    assert "== with .venv-gpu/bin/python" in done.stdout
    assert "ran scripts/bench_torch.py --on=gpu --minutes=8.5 --out=bench_gpu.json\n" in done.stdout
    assert [call.split()[-3] for call in machine.installs] == [".[cuda,parity]"]


def test_an_environment_without_cuda_is_said(tmp_path):
    done = Bench(tmp_path).bench(installed="jax")
    assert done.returncode == 66
    assert "error: .venv-gpu/bin/python: ModuleNotFoundError: torch; name one" in done.stderr
