"""Required libraries, and the programs that they compile."""

import ast
import datetime
import functools
import json
import operator
import os
import pickle
import random
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import zstandard

from jaxlm.core.errors import JaxlmError
from tests.faults import test_security
from tests.faults.conftest import ROOT

SOURCES = sorted((ROOT / "jaxlm").rglob("*.py"))


def bounds() -> dict[str, str]:
    """Requirements of pyproject.toml by normalized name; extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *functools.reduce(operator.iadd, project["optional-dependencies"].values(), []),
    ]
    limits = {}
    for line in requirements:
        match = re.fullmatch(r"([\w.-]+)(\[[\w,]+\])?([^;]*)(;.*)?", line)
        limits.setdefault(match[1].lower().replace("_", "-"), match[3].strip())
    return limits


def pins() -> dict[str, set[str]]:
    """The versions of scripts/constraints.txt, by name."""
    versions: dict[str, set[str]] = {}
    for line in (ROOT / "scripts/constraints.txt").read_text().splitlines():
        if match := re.match(r"([\w.-]+)==([\w.]+)", line):
            versions.setdefault(match[1].lower().replace("_", "-"), set()).add(match[2])
    return versions


def test_s14_every_dependency_has_a_lower_bound_and_a_tested_version_within_its_bounds():
    from packaging.specifiers import SpecifierSet

    limits, tested = bounds(), pins()
    assert len(limits) > 20
    assert {name for name, bound in limits.items() if not re.search(r">=|==", bound)} == set()
    assert set(limits) - set(tested) == set()
    outside = [
        (name, version, bound)
        for name, bound in limits.items()
        for version in tested[name]
        if not SpecifierSet(bound).contains(version)
    ]
    assert outside == []


def test_s14_libraries_that_decide_the_numbers_have_an_upper_bound():
    limits = bounds()
    names = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "sentencepiece", "tokenizers")
    assert [name for name in names if "<" not in limits[name]] == []


READERS = {
    *("tokenizers", "sentencepiece", "orbax-checkpoint", "tensorstore", "pyarrow", "zstandard"),
    *("ml-collections", "safetensors", "torch", "transformers"),
}


def test_s14_what_reads_bytes_from_outside_was_reviewed_on_a_date():
    text = (ROOT / "scripts/constraints.txt").read_text()
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    day = datetime.date.fromisoformat(re.search(r"Reviewed (\d{4}-\d\d-\d\d)", comments)[1])
    assert day >= datetime.date(2026, 11, 21)
    assert {name for name in READERS if not re.search(rf"\b{name}\b", comments)} == set()
    assert set(pins()) >= READERS


def test_s14_every_library_that_is_imported_is_asked_for():
    known = bounds()
    module_of = {"orbax-checkpoint": "orbax", "absl-py": "absl", "protobuf": "google"}
    module_of["pyyaml"] = "yaml"
    modules = {module_of.get(name, name.replace("-", "_")): name for name in known}
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"jaxlm"}
    assert len(foreign) > 8
    assert {name for name in foreign if name.lower() not in modules} - {"jaxlib"} == set()


def test_s14_the_run_directory_holds_the_versions(tiny_run):
    import importlib.metadata

    packages = json.loads((tiny_run.workdir / "environment.json").read_text())["packages"]
    installed = {name for name in bounds() if _is_installed(name)}
    assert len(packages) >= 10
    assert all(importlib.metadata.version(name) == version for name, version in packages.items())
    decisive = {"jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "sentencepiece"}
    assert decisive & installed <= set(packages)


def _is_installed(name: str) -> bool:
    import importlib.metadata

    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


COMPILING = """
import json, sys
from jaxlm.recipes import setup
setup.start()
import jax, jax.numpy as jnp
kept = jax.config.jax_persistent_cache_min_compile_time_secs
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
step = jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0) * 3)
answer = [float(value).hex() for value in step(jnp.linspace(0, 1, 30).reshape(5, 6))]
folder = jax.config.jax_compilation_cache_dir
print(json.dumps({"answer": answer, "folder": folder, "kept": kept}))
"""


def compiled(cache: Path) -> dict:
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        cwd=ROOT,
        env=env | {"JAXLM_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_s15_s1_the_compile_cache_is_private_and_a_garbage_entry_or_a_pickle_is_compiled_again(
    tmp_path,
):
    first = compiled(tmp_path / "cache")
    assert first["kept"] < 1  # many small programs compile in less than JAX's second
    folder = Path(first["folder"])
    assert folder.is_relative_to(tmp_path / "cache")
    for path in (tmp_path / "cache", folder.parent, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.getuid()
    entries = [path for path in folder.iterdir() if path.name.endswith("-cache")]
    assert len(entries) >= 2
    draw, marker = random.Random(0), tmp_path / "marker"
    bomb = pickle.dumps(test_security.Bomb(marker))
    as_an_entry = zstandard.compress(bytes(4) + bomb)  # after the time that compiling took
    for number, path in enumerate(entries):
        content = path.read_bytes()
        garbage = (
            as_an_entry,
            bomb,
            draw.randbytes(len(content)),
            b"",
            content[: len(content) // 2],
        )
        path.write_bytes(garbage[number % len(garbage)])
    folder.chmod(0o755)
    repeated = compiled(tmp_path / "cache")
    assert repeated == first
    assert not marker.exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_s15_another_user_compiler_or_processor_has_another_folder(tmp_path, monkeypatch):
    from jaxlm.recipes import setup

    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path))
    folders = {setup.compile_cache()}
    monkeypatch.setattr(setup, "_processor", lambda: "x86_64\nflags: avx512f")
    folders.add(setup.compile_cache())
    monkeypatch.setattr(setup.importlib.metadata, "version", lambda name: "0.0.1")
    folders.add(setup.compile_cache())
    mine = os.getuid()
    monkeypatch.setattr(setup.os, "getuid", lambda: mine + 1)
    with pytest.raises(JaxlmError) as caught:  # the folder of that user, made by this one
        setup.compile_cache()
    assert caught.value.code == 73
    assert len(folders) == 3
    assert len(list((tmp_path / "compiled").iterdir())) == 4


def test_s15_a_link_in_place_of_the_folder_is_refused(tmp_path, monkeypatch):
    from jaxlm.recipes import setup

    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    folder = setup.compile_cache()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JaxlmError) as caught:
        setup.compile_cache()
    assert caught.value.code == 73
