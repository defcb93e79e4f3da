"""`jaxlm import --from=hf:ORG/NAME`: the real huggingface_hub against a server of our own."""

import json
import os
import shutil
import subprocess
import sys
import time

import huggingface_hub.constants
import numpy as np
import pytest

import jaxlm
from jaxlm.checkpoint import hub_architecture, hub_download
from jaxlm.checkpoint.hub_folder import INDEX, Folder, write_tensors
from jaxlm.cli.main import main
from jaxlm.core.errors import CommandError, InputMissing
from jaxlm.recipes.exchange import import_model
from tests import hub_server, machine
from tests.cli.test_exchange import write
from tests.hub_server import COMMIT

NEVER = ("pytorch_model.bin", "modeling_own.py", "onnx/model.safetensors", "extra.safetensors")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server.serving(tmp_path, monkeypatch) as server:
        yield server


def publish(hub, name="own/tiny", shards=False):
    """A model of the family llama, and files that must not be fetched."""
    folder = hub.root / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(folder)
    if shards:
        whole = Folder(folder)
        family, _ = hub_architecture.read_family(whole, print)
        with whole.opened() as fetch:
            tensors = import_model.layout(family.build(), family.HUB)
            arrays = {
                each.name: fetch(each.name, tuple(map(slice, each.shape))) for each in tensors
            }
        (folder / "model.safetensors").unlink()
        write_tensors(
            folder, tensors, lambda each: arrays[each.name], np.dtype("f4"), shard_bytes=20_000
        )
    for file in NEVER:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"never fetched")
    return folder


def files_asked_for(hub):
    return [path.partition("/resolve/")[2][41:] for path in hub.asked if "/resolve/" in path]


def fetched(name, check=lambda config, where: None, **options):
    return hub_download.fetch_model(name, import_model.COMPANION_FILES, check=check, **options)


def test_a_model_is_imported_by_its_name_and_nothing_else_of_it_is_fetched(hub, tmp_path):
    """The command line in a process of its own, which finds the hub by the environment only."""
    folder = publish(hub)
    run = tmp_path / "run"
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    words = ["import", "--from=hf:own/tiny@v1", f"--workdir={run}", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["family"] == "llama"
    assert f"hf:own/tiny@{COMMIT}: 4 files, " in done.stderr
    assert "fetching model.safetensors, " in done.stderr
    assert json.loads((run / "imported.json").read_text())["source"] == f"hf:own/tiny@{COMMIT}"
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    assert sorted(files_asked_for(hub)) == sorted(names)
    assert (run / "hub/config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_shards_come_by_their_index_once_and_say_how_far_they_are(hub):
    folder = publish(hub, shards=True)
    shown, output = [], []
    name = "hf:own/tiny"
    fetched_folder = fetched(name, say=output.append, show=lambda *each: shown.append(each))
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    small = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(files_asked_for(hub)) == sorted([*small, INDEX, *shards])
    for shard in shards:
        size = (folder / shard).stat().st_size
        assert shown[-1][0] in shards
        assert [done for file, done, total in shown if (file, total) == (shard, size)][-1] == size
        assert (fetched_folder.path / shard).read_bytes() == (folder / shard).read_bytes()
    assert output[-1].endswith(f"({len(shards) + 4} of {len(shards) + 4})")
    assert Folder(fetched_folder.path).tensors() == tree_of(folder)
    hub.asked.clear()
    assert fetched(name) == fetched_folder
    assert files_asked_for(hub) == [], "what was fetched is there"


def tree_of(folder):
    (folder / "extra.safetensors").unlink()
    return Folder(folder).tensors()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("import --from=own/tiny --workdir=run", "--from=hf:own/tiny"),
        ("train --config=quickstart --workdir=run --init_from=own/tiny", "--init_from=hf:own/tiny"),
        ("data stats --config.data.train=own/texts", "--config.data.train=hf:own/texts"),
        ("init --data=own/texts", "--data=hf:own/texts"),
    ],
)
def test_a_name_of_the_hub_without_its_prefix_gets_it_in_the_fix(
    words, fix, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--json"]) == InputMissing.code
    assert json.loads(capsys.readouterr().out)["error"]["fix"].splitlines()[0] == fix
    (tmp_path / "own").mkdir()
    for local in (words, words.replace("own/", "runs/")):
        assert main([*local.split(), "--json"]) == InputMissing.code
        assert "hf:" not in json.loads(capsys.readouterr().out)["error"]["fix"]


def test_the_fix_of_a_name_without_its_prefix_imports_and_loads_the_model(
    hub, tmp_path, monkeypatch, capsys
):
    publish(hub)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    words = ["import", "--workdir=run", "--quiet", "--json"]
    assert main([*words, "--from=own/tiny"]) == InputMissing.code
    error = json.loads(capsys.readouterr().out)["error"]
    assert main([*words, error["fix"].splitlines()[0]]) == 0
    with pytest.raises(InputMissing) as caught:
        jaxlm.load("own/tiny")
    assert caught.value.fix == "jaxlm.load('hf:own/tiny')"


def test_what_config_json_rules_out_is_said_before_anything_large_is_fetched(hub, capsys, tmp_path):
    folder = publish(hub)
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    words = ("import", "--from=hf:own/tiny", f"--workdir={tmp_path / 'run'}", "--json")
    assert main(words) == 65
    error = json.loads(capsys.readouterr().out)["error"]
    assert "model type 'mamba' is not known" in error["what"]
    assert files_asked_for(hub) == ["config.json"]


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("hf:own/nothing", "the hub has no model own/nothing, or the model is private", "/models;"),
        ("hf:own/tiny@v2", "own/tiny has no revision v2", "/own/tiny/tree/main"),
        ("hf:own/gated", "available only to users who have accepted its terms", "hf auth login"),
        ("hf:own/pickled", "the model has no safetensors", "published as safetensors"),
        ("hf:own/llamas", "the model has no safetensors", "--from=tiny.gguf"),
    ],
)
def test_what_the_hub_does_not_give_is_one_plain_error(hub, name, what, fix):
    publish(hub)
    (publish(hub, "own/gated") / "GATED").touch()
    for model, file in (("pickled", "model.bin"), ("llamas", "tiny.gguf")):
        (hub.root / "own" / model).mkdir()
        (hub.root / "own" / model / file).touch()
    with pytest.raises(InputMissing) as caught:
        fetched(name)
    assert what in caught.value.what
    assert caught.value.where == f"--from={name}"
    assert fix in caught.value.fix
    assert len(str(caught.value).splitlines()) <= 8
    if name == "hf:own/pickled":
        assert "model.bin may run code" in caught.value.why
    assert not [file for file in files_asked_for(hub) if file != "config.json"]


@pytest.mark.parametrize("way", ["nothing listens", "set to be offline"])
def test_without_a_network_it_is_said_at_once_how_to_fetch_it_elsewhere(
    hub, monkeypatch, capsys, tmp_path, way
):
    constants = huggingface_hub.constants
    if way == "set to be offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    words = ("import", "--from=hf:own/tiny@v1", f"--workdir={tmp_path / 'run'}", "--json")
    assert main(words) == 66
    machine.require_clock(time.monotonic() - begun, 5)
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == f"own/tiny cannot be fetched from {constants.ENDPOINT}"
    assert "hf download own/tiny --revision=v1 --local-dir=tiny\n" in error["fix"]
    assert "--from=tiny" in error["fix"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:a b", "hf:../x", "hf:a/b@", "hf:own/--x"])
def test_what_is_no_name_is_refused(hub, name):
    with pytest.raises(CommandError, match="the name of a Hugging Face model is malformed"):
        fetched(name)
    assert hub.asked == []


def test_without_its_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputMissing) as caught:
        fetched("hf:own/tiny")
    assert "pip install 'jaxlm[hub]'" in caught.value.fix


def test_s5_an_index_that_names_files_elsewhere_makes_none_of_them_fetched(hub):
    folder = publish(hub, shards=True)
    index = json.loads((folder / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    for evil in ("../../../etc/passwd", "onnx/model.safetensors", "modeling_own.py"):
        index["weight_map"][first] = evil
        (folder / INDEX).write_text(json.dumps(index))
        shutil.rmtree(hub.cache, ignore_errors=True)
        fetched_folder = fetched("hf:own/tiny")
        assert evil not in files_asked_for(hub)
        assert not (fetched_folder.path / evil).is_file()


def test_s3_a_bit_that_flips_in_the_cache_is_refused_and_the_fix_fetches_the_file_anew(
    hub, capsys, tmp_path
):
    publish(hub)
    weights = fetched("hf:own/tiny").path / "model.safetensors"
    whole = weights.read_bytes()
    content = bytearray(whole)
    content[-100] ^= 4
    weights.write_bytes(content)
    assert sum(a != b for a, b in zip(whole, weights.read_bytes(), strict=True)) == 1
    words = ["import", "--from=hf:own/tiny", f"--workdir={tmp_path / 'run'}", "--json"]
    assert main(words) == 65
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == "model.safetensors changed since the digest was recorded"
    assert not (tmp_path / "run").exists()
    hub.asked.clear()
    subprocess.run(["sh", "-c", error["fix"]], check=True)
    assert main(words) == 0
    assert "compared by sha256: 4 of 4 files\n" in capsys.readouterr().err
    assert files_asked_for(hub) == ["model.safetensors"]
