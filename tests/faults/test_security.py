"""Data is not run, not unpacked, and not trusted to name another file."""

import ast
import dataclasses
import gzip
import io
import json
import marshal
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from etils import epath

from jaxlm.checkpoint import record as records
from jaxlm.cli.main import main
from jaxlm.core.errors import DataError, JaxlmError
from jaxlm.data import dataset, text_digest, tokenizer_file
from jaxlm.data.config import DataConfig
from jaxlm.data.shards import TokenShards
from tests.cli import test_exchange
from tests.faults import harness
from tests.faults.conftest import ONE_DEVICE, ROOT

SOURCES = sorted((ROOT / "jaxlm").rglob("*.py"))

BANNED_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "torch.load"}
# Python programs that the user names: a config, and the file of an own objective, optimizer or
# family. What a run directory records is run only from the user's own copy
# (tests/recipes/test_user_code.py).
PROGRAMS = [
    ("core/config_file.py", "spec.loader.exec_module"),
    ("core/user_code.py", "exec"),
    ("core/user_code.py", "compile"),
    # answers of models and their tests, with --allow_code, in a limited process
    *[
        ("evals/code_program.py", name)
        for name in ("compile", "exec", "exec", "compile", "compile", "exec")
    ],
    ("rl/worker.py", "exec"),  # reward functions of the user, in a process of their own
    ("rl/worker.py", "compile"),
]


def runs_what_it_reads(tree: ast.Module) -> list[str]:
    """The calls and imports of a module that can run what is in a file."""
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            calls += [name for name in names if name.partition(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in BANNED_MODULES:
                calls.append(f"from {node.module}")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BANNED_CALLS or called.endswith(".exec_module"):
                calls.append(called)
            calls += [
                "allow_pickle=True"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            ]
    return calls


def test_s1_no_source_file_can_run_what_it_reads():
    calls = [
        (path.relative_to(ROOT / "jaxlm").as_posix(), call)
        for path in SOURCES
        for call in runs_what_it_reads(ast.parse(path.read_text()))
    ]
    assert len(SOURCES) > 90
    assert calls == PROGRAMS


@pytest.mark.parametrize(
    "line",
    [
        *(
            "import pickle",
            "import torch, pickle as p",
            "from joblib import load",
            "import marshal",
        ),
        *("eval(text)", "exec(text)", "yaml.load(file)", "torch.load(path)", "import dill.source"),
        *("numpy.load(path, allow_pickle=True)", "from cloudpickle.x import y", "__import__(name)"),
    ],
)
def test_s1_each_way_to_run_what_is_read_would_be_found(line):
    assert runs_what_it_reads(ast.parse(line))


class Bomb:
    """Pickled, it leaves a marker where it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def payloads(marker: Path) -> dict[str, bytes]:
    """The same bomb in each form that trainers have loaded."""
    plain = pickle.dumps(Bomb(marker))
    array = io.BytesIO()
    np.save(array, np.array([Bomb(marker)], object), allow_pickle=True)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", plain)
        file.writestr("archive/version", "3")
    code = compile(f"open({str(marker)!r}, 'w')", "bomb", "exec")
    return {
        "pickle": plain,
        "ascii pickle": pickle.dumps(Bomb(marker), protocol=0),
        "object array": array.getvalue(),
        "torch zip": archive.getvalue(),
        "marshal": marshal.dumps(code),
        "python": f"open({str(marker)!r}, 'w')\n".encode(),
    }


def test_s1_the_bombs_are_live(tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(payloads(marker)["pickle"])
    assert marker.exists()


FORMS = list(payloads(Path("x")))


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
def test_s1_a_pickle_posing_as_a_tokenizer_or_a_shard_file_is_refused_and_not_run(
    form, shards, tmp_path
):
    marker = tmp_path / "marker"
    content = payloads(marker)[form]
    refused = 0
    for name in (
        "tokenizer",
        "manifest.json",
        "files.json",
        "tokens-00000.bin",
        "documents-00000.bin",
    ):
        folder = tmp_path / name
        shutil.copytree(shards, folder)
        (folder / name).write_bytes(content)
        with pytest.raises(JaxlmError) as caught:
            opened = TokenShards.open(folder)
            opened.verify()
            opened.tokenizer.encode("a")
            opened.origin(0)
        assert caught.value.code == 65
        refused += 1
    for name in ("a.json", "a.model"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError):
            tokenizer_file.read(tmp_path / name)
        refused += 1
    assert refused == 7
    assert not marker.exists()


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
def test_s1_a_pickle_posing_as_a_file_of_a_run_or_a_checkpoint_is_refused_and_not_run(
    form, tiny_run, tmp_path, capsys
):
    marker = tmp_path / "marker"
    content = payloads(marker)[form]
    run = tmp_path / "run"
    shutil.copytree(tiny_run.workdir, run)
    step = Path("checkpoints/4")
    names = [step / "digests.json", *(step / name for name in records.read(run / step).files)]
    assert len(names) >= 4
    for name in (Path("config.json"), Path("tokenizer"), *names):
        original = (run / name).read_bytes()
        (run / name).write_bytes(content)
        assert main(["generate", f"--workdir={run}", "--max_tokens=1", "--step=4"]) in (2, 65), name
        (run / name).write_bytes(original)
    assert "Traceback" not in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
def test_s1_a_pickle_posing_as_a_file_of_the_cache_is_refused_or_made_again_and_not_run(
    form, tmp_path, monkeypatch
):
    """Digests of text, tokenizers, shards and plans, as preparing a text leaves them."""
    monkeypatch.setattr(text_digest, "SETTLED_SECONDS", 0)
    marker = tmp_path / "marker"
    content = payloads(marker)[form]
    (tmp_path / "a.txt").write_text("a few words " * 90)
    names = (f"{tmp_path}/a.txt",)
    settings = DataConfig(train=names, validation=(), tokenizer="characters", sequence=16)

    def first_row() -> bytes:
        made = dataset.open_data(settings, seed=0, root=tmp_path / "cache")
        return made.train.at(0, batch=2, rows=slice(0, 2)).tokens.tobytes()

    known = first_row()
    paths = [path for path in sorted((tmp_path / "cache").rglob("*")) if path.is_file()]
    paths = [path for path in paths if path.suffix != ".lock"]
    assert {path.relative_to(tmp_path / "cache").parts[0] for path in paths} == {
        *("digests", "tokenizers", "shards", "plans")
    }
    refused = []
    for path in paths:
        original = path.read_bytes()
        path.write_bytes(content)
        try:
            assert first_row() == known, path
        except JaxlmError as error:
            refused.append(error.code)
        path.write_bytes(original)
    assert len(paths) >= 8
    assert {*refused} <= {65}
    assert not marker.exists()


def test_s2_a_program_inside_a_run_a_checkpoint_a_data_or_a_model_folder_is_never_run(
    tiny_run, tmp_path
):
    """Put programs of names that Python looks for into every folder, and run each verb."""
    marker = tmp_path / "marker"
    bomb = (
        f"with open({str(marker)!r}, 'a') as file: file.write(__file__)\n"
        "def get_config(): return 1\n"
    )
    run, texts, model = (tmp_path / name for name in ("run", "texts", "model"))
    shutil.copytree(tiny_run.workdir, run)
    test_exchange.write(model)
    shutil.copytree(tiny_run.config.parent / "texts", texts)
    names = (
        "config.py",
        "__init__.py",
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "jax.py",
        "json.py",
        "jaxlm.py",
        "modeling.py",
        "tokenizer.py",
        "setup.py",
    )
    places = [texts, model, *(path for path in (run, *run.rglob("*")) if path.is_dir())]
    for place in places:
        for name in names:
            (place / name).write_text(bomb)
    assert len(places) >= 7
    verbs = (
        ["train", f"--config={run}/config.json", f"--workdir={run}"],
        ["train", f"--config={run}", f"--workdir={run}"],
        ["eval", f"--workdir={run}", f"--text={texts}/*.txt", "--sequence=16"],
        ["generate", f"--workdir={run}", "--max_tokens=1"],
        ["report", f"--workdir={run}"],
        ["config", "show", f"--workdir={run}"],
        ["data", "peek", f"--workdir={run}", f"--config.data.train={texts}/*.txt"],
        ["import", f"--from={model}", f"--workdir={tmp_path / 'imported'}"],
    )
    program = """
import json, os, sys
from jaxlm.cli.main import main
codes = []
for words in json.loads(sys.argv[1]):
    os.chdir(sys.argv[3 if words[0] == "import" else 2])
    codes.append(main(words))
print("codes", codes)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, json.dumps(verbs), run, model],
        env=os.environ | ONE_DEVICE | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert f"codes {[0] * len(verbs)}" in done.stdout, done.stdout + done.stderr
    assert not marker.exists(), marker.read_text()
    assert main(["config", "show", f"--config={run}/config.py"]) == 2  # named, it would have run
    assert marker.exists()


UNPACKERS = {"unpack_archive", "extract", "extractall"}
ARCHIVES = {"tarfile", "zipfile", "py7zr", "rarfile", "patoolib"}


def test_s4_no_source_file_unpacks_an_archive():
    """gzip and zstd hold one stream and name no file; they are read as text, piece by piece.

    Members of archives are streams too, in the one module for archives;
    tests/corpus/test_readers.py has bombs and names that lead out.
    """
    calls = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            calls += [(path.name, name) for name in modules if name.partition(".")[0] in ARCHIVES]
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in UNPACKERS:
                calls.append((path.name, called.attr))
    assert calls == [("archives.py", "tarfile"), ("archives.py", "zipfile")]


BOMBS = ("a.txt.gz", "line.jsonl.zst", "blank.jsonl.gz")
UNPACK = """
import sys
from jaxlm.cli.main import main
from jaxlm.monitor import host_machine

stats = ["data", "stats", sys.argv[1]]
codes = [main([*stats, f"--config.data.train={path}"]) for path in sys.argv[2:]]
print(*codes, host_machine.peak_memory([]).bytes >> 20)
"""


def test_s4_ten_gigabytes_from_a_small_file_are_refused_in_little_memory(tmp_path, record_property):
    """A document, a line, and lines without one: streams of ten megabytes one after another."""
    paths = [tmp_path / name for name in BOMBS]
    for path in paths:
        part = b" " * (10**7 - 1) + b"\n" if "blank" in path.name else b"x" * 10**7
        pack = gzip.compress if path.suffix == ".gz" else zstandard.compress
        path.write_bytes(pack(part) * 1000)
        assert path.stat().st_size < 10e9 / 500
    done = subprocess.run(
        [sys.executable, "-c", UNPACK, f"--config={harness.write_config(tmp_path)}", *paths],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    *codes, megabytes = map(int, done.stdout.splitlines()[-1].split())
    assert codes == [65] * len(BOMBS), done.stderr
    assert done.stderr.count("unpacks to more than the limit of a document") == len(BOMBS)
    assert all(str(path) in done.stderr for path in paths)
    record_property("S4", f"{megabytes} MiB for ten gigabytes, three times")
    assert megabytes < 1300


@pytest.fixture
def opened():
    """The names of all files that are opened while the test runs."""
    seen: list[str] = []
    OPENED.append(seen)
    yield seen
    OPENED.remove(seen)


OPENED: list[list[str]] = []


def _hear(event: str, arguments: tuple) -> None:
    if event == "open" and OPENED:
        for seen in OPENED:
            seen.append(str(arguments[0]))


sys.addaudithook(_hear)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind", ["above", "absolute", "a link", "a link in place of a file", "a link to a folder"]
)
def test_s5_a_checkpoint_record_that_names_a_file_outside_is_refused_and_the_file_not_opened(
    kind, tiny_run, tmp_path, opened, capsys
):
    """The forger has the file outside and its digest, and can hash the record as jaxlm does."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("elsewhere")
    digest = records.digests(epath.Path(outside))["file"]
    run = tmp_path / "run"
    shutil.copytree(tiny_run.workdir, run)
    step = epath.Path(run / "checkpoints/4")
    record = records.read(step)
    first = next(iter(record.files))
    name = {
        "above": "../../../outside/file",
        "absolute": f"{outside}/file",
        "a link": "linked",
        "a link in place of a file": first,
        "a link to a folder": "linked/file",
    }[kind]
    if kind == "a link to a folder":
        (run / "checkpoints/4/linked").symlink_to(outside)
    elif kind.startswith("a link"):
        (run / "checkpoints/4" / name).unlink(missing_ok=True)
        (run / "checkpoints/4" / name).symlink_to(outside / "file")
    forged = dataclasses.replace(record, files=record.files | {name: digest})
    records.write(step, forged)
    assert records.read(step) == forged
    del opened[:]
    assert main(["generate", f"--workdir={run}", "--max_tokens=1", "--step=4"]) == 65
    assert f"{name} is missing" in capsys.readouterr().err
    assert len(opened) > 10
    assert not [path for path in opened if os.path.realpath(path).startswith(str(outside))]
