"""Configs by name: shipped ones and published sizes, from any folder and from a wheel."""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config, shipped
from jaxlm.models.families.union import SIZES
from jaxlm.recipes.config import Run
from tests.faults import harness
from tests.house import test_readme

ROOT = Path(__file__).parents[2]
FILES = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.py")}
RUNS = {path.removesuffix(".py") for path in FILES if not path.startswith("data/")}


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A working directory without configs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(capsys, *words, code=0):
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_every_file_of_configs_has_a_name():
    assert {f"{name}.py" for name in shipped.every_name()} == FILES
    assert shipped.find("finetune/lora") == ROOT / "configs/finetune/lora.py"


# distill/draft needs the run that it is named with (test_drafts.py).
@pytest.mark.parametrize("name", sorted(RUNS - {"distill/draft"}))
def test_a_name_is_the_shipped_file(empty, name):
    is_text = not name.startswith(("finetune/", "preference/", "rl/"))
    chat = [] if is_text else [("data.train", "chat.jsonl")]
    by_file = config.load(Run, str(ROOT / f"configs/{name}.py"), chat)
    assert config.load(Run, name, chat) == by_file
    assert config.load(Run, name.replace("_", "-"), chat).value == by_file.value


def test_a_name_takes_the_argument_of_the_file(empty, capsys):
    shown = asked(capsys, "config", "show", "--config=llama_8b:8gpu")
    assert shown["config"]["mesh"]["fsdp"] == 8
    assert shown["provenance"]["mesh.fsdp"].startswith("jaxlm/configs/llama_8b.py:")
    error = asked(capsys, "config", "show", "--config=llama_8b:9gpu", code=2)["error"]
    first = error["fix"].splitlines()[0]
    assert first.startswith("--config=llama_8b:")
    assert asked(capsys, "config", "show", first)["config"]["model"]["width"] == 4096


@pytest.mark.parametrize("name", ["llama_8b:8gpu", "finetune/lora"])
def test_the_path_in_a_checkout_is_a_name_too(empty, name):
    file, colon, argument = name.partition(":")
    path, chat = f"configs/{file}.py{colon}{argument}", [("data.train", "chat.jsonl")]
    assert config.load(Run, path, chat) == config.load(Run, name, chat)
    (empty / "configs").mkdir()
    text = (ROOT / "configs/quickstart.py").read_text()
    (empty / "configs/llama_8b.py").write_text(text)  # a file of that name comes first
    assert config.load(Run, "configs/llama_8b.py").value.model.family == "qwen3"


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-0.6b", "gpt2", "llama3_8b"])
def test_a_published_size_is_the_default_config_with_that_model(empty, capsys, name):
    shown = asked(capsys, "config", "show", f"--config={name}", "--config.model.dropout=0.1")
    run = config.from_json(Run, shown["config"])
    published = SIZES[name.replace("_", "-")]
    expected = config.load(Run, None, [("model", name.replace("_", "-")), ("model.dropout", "0.1")])
    assert run == expected.value
    assert (run.model.width, run.model.depth) == (published.width, published.depth)


def test_a_file_of_the_working_directory_comes_first(empty):
    (empty / "quickstart").mkdir()  # a folder that is no run changes nothing
    assert config.load(Run, "quickstart").value.train.batch == 8
    saved = config.to_json(config.load(Run, None, [("train.batch", "3")]).value)
    (empty / "quickstart/config.json").write_text(json.dumps(saved))
    assert config.load(Run, "quickstart").value.train.batch == 3


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("quickstrat", "--config=quickstart"),
        ("quickstrat:long", "--config=quickstart:long"),
        ("finetune/lorra", "--config=finetune/lora"),
        ("lama3-8b", "--config=llama3-8b"),
        ("mine", "--config=mine.py"),
        ("llama_1b.py", "--config=llama_1b"),
        ("lora", "--config=finetune/lora"),
        ("finetune/simpo", "--config=preference/simpo"),
        ("rl/sft", "--config=chain/sft"),
        ("zzzzzz", "--config=quickstart"),
    ],
)
def test_an_unknown_name_has_the_nearest_as_its_fix(empty, capsys, typed, fix):
    (empty / "mine.py").write_text((ROOT / "configs/quickstart.py").read_text())
    error = asked(capsys, "config", "validate", f"--config={typed}", code=66)["error"]
    assert error["where"] == f"--config={typed}"
    assert error["fix"].splitlines()[0] == fix
    assert asked(capsys, "config", "validate", fix, "--config.data.train=a.jsonl")["valid"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The `jaxlm` of a wheel, in an environment of its own; dependencies come from this one."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if name.startswith("jaxlm/configs/")}
    assert names == {f"jaxlm/configs/{name}" for name in FILES}
    place = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    site = place / "lib" / Path(sysconfig.get_path("purelib")).parent.name / "site-packages"
    command = [*pip, f"--python={place / 'bin/python'}", "install", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True)
    # The dependencies of this environment, without the lines that add a checkout to the path.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return place / "bin/jaxlm"


def run(program, folder, *words):
    outside = os.environ | {"XLA_FLAGS": harness.FLAGS}
    outside.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(program), *words], cwd=folder, env=outside, capture_output=True, text=True
    )


def test_a_wheel_has_the_published_sizes(installed, tmp_path):
    where = run(installed, tmp_path, "config", "show", "--config=llama_8b:8gpu", "--json")
    assert json.loads(where.stdout)["config"]["mesh"]["fsdp"] == 8
    assert str(ROOT) not in where.stdout + where.stderr


@pytest.mark.slow
def test_a_wheel_trains_the_quickstart_from_an_empty_folder(installed, tmp_path):
    texts, empty = tmp_path / "texts", tmp_path / "empty"
    texts.mkdir()
    empty.mkdir()
    for number, path in enumerate(sorted((ROOT / "jaxlm/core").glob("*.py"))):
        (texts / f"{number}.txt").write_text(path.read_text())
    settings = test_readme.TINY | {
        "--config.data.train": f"{texts}/*.txt"
    }  # compiled once for both
    tiny = [f"{name}={value}" for name, value in settings.items()]
    done = run(installed, empty, "train", "--config=quickstart", "--workdir=a", *tiny)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stderr
    record = json.loads((empty / "a/exit.json").read_text())
    assert record["step"] == 4
    command = shlex.split((empty / "a/command.sh").read_text().splitlines()[1])
    assert command[:3] == ["jaxlm", "train", "--config=quickstart"]
    origins = json.loads((empty / "a/provenance.json").read_text())
    assert origins["optim.lr"].startswith("jaxlm/configs/quickstart.py:")
    assert not any(str(tmp_path / "installed") in origin for origin in origins.values())
