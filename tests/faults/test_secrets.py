"""Secrets stay where they are, and what a run makes is for its owner to share."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import JaxlmError
from jaxlm.recipes.config import Run
from tests.faults.conftest import CANARY, ROOT, SECRETS, jaxlm


def leaks(*folders: Path, text: str = "") -> list[tuple[str, str]]:
    """Return (file, text) for each canary in the bytes or the name of a file, or in `text`."""
    places = [("output", match) for match in re.findall(rf"{CANARY}-\w+", text)]
    for folder in folders:
        for path in folder.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            places += [
                (path.name, match.decode())
                for match in re.findall(rb"%s-\w+" % CANARY.encode(), content + path.name.encode())
            ]
    return places


def test_s8_a_run_writes_no_secret_of_its_environment(tiny_run, record_property):
    files = [path for path in tiny_run.workdir.rglob("*") if path.is_file()]
    assert len(SECRETS) == 12
    assert len(files) > 20
    record_property("S8", f"0 of {len(SECRETS)} secrets in {len(files)} files")
    assert {path.suffix for path in files} >= {".json", ".jsonl", ".sh", ".txt", ".html", ".png"}
    assert list(tiny_run.workdir.glob("events/*"))
    assert leaks(tiny_run.workdir, tiny_run.cache, text=tiny_run.output) == []
    written = json.loads((tiny_run.workdir / "environment.json").read_text())["variables"]
    assert written["NCCL_DEBUG"] == "https://***@host/log"


@pytest.mark.slow
def test_s8_an_exported_model_holds_no_secret(tiny_run, tmp_path):
    """The environment of the export has the same secrets."""
    out = tmp_path / "hub"
    done = jaxlm("export", f"--workdir={tiny_run.workdir}", f"--out={out}", env=SECRETS)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} >= {
        *("config.json", "model.safetensors", "tokenizer.json", "parity.json")
    }
    assert leaks(out, text=done.stdout + done.stderr) == []


def test_s8_a_leak_would_be_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/events").write_bytes(b"\x00\xff" + f"{CANARY}-1".encode() + b"\x00")
    assert leaks(tmp_path, text=f"see {CANARY}-2") == [
        ("output", f"{CANARY}-2"),
        ("events", f"{CANARY}-1"),
    ]


SECRET_WORDS = {
    "a setting": "--config.data.train=https://user:{c}@host/a.txt,b.txt",
    "a setting with a name alone": "--config.data.tokenizer=gs://{c}@bucket/tokenizer.json",
    "a signed address": "--config.data.train=https://host/a.txt?X-Amz-Signature={c}&x=1",
    "an unknown setting": "--config.log.password={c}",
    "an unknown section": "--config.wandb.api_key={c}",
    "an unknown flag": "--hf_token={c}",
    "the run directory": "--workdir=gs://user:{c}@bucket/run",
    "the argument of a config": "--config={f}:password={c}",
    "a named validation set": "--config.data.validation=web=s3://key:{c}@host/x.txt",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("trace", [[], ["--trace"]])
@pytest.mark.parametrize("case", SECRET_WORDS)
def test_s8_a_secret_on_the_command_line_is_refused_and_not_shown(
    case, trace, tiny_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    secret = f"{CANARY}-word"
    word = SECRET_WORDS[case].format(c=secret, f=tiny_run.config)
    words = ["train", f"--config={tiny_run.config}", f"--workdir={tmp_path}/run", word, *trace]
    assert main(words) == (73 if case == "the run directory" else 2)
    shown = capsys.readouterr()
    assert "***" in shown.err
    assert leaks(tmp_path, text=shown.out + shown.err) == []
    assert not (tmp_path / "run/config.json").exists()


def test_s8_a_secret_in_a_config_file_is_refused_with_the_line_and_a_fix_that_works(tmp_path):
    (tmp_path / "x.py").write_text(
        "from jaxlm.core import config\nfrom jaxlm.recipes.config import Run\n"
        "def get_config():\n    c = config.new(Run)\n"
        f"    c.data.train = ('https://user:{CANARY}-file@host/a.txt',)\n    return c\n"
    )
    with pytest.raises(JaxlmError) as caught:
        config.load(Run, f"{tmp_path}/x.py")
    assert caught.value.code == 2
    assert caught.value.where.endswith("x.py:5")
    assert CANARY not in str(caught.value)
    path, _, text = caught.value.fix.removeprefix("--config.").partition("=")
    fixed = config.load(Run, f"{tmp_path}/x.py", [(path, text)]).value
    assert fixed.data.train == ("https://host/a.txt",)


def test_s8_a_crash_writes_no_secret(tiny_run, tmp_path):
    """A bug of ours whose message quotes one: the traceback, log.txt and exit.json have stars."""
    program = f"""
import sys
from jaxlm.cli import main as front
from jaxlm.monitor import environment
def broken(*_):
    message = "cannot reach https://user:{CANARY}-crash@host/a and password={CANARY}-crash"
    raise RuntimeError(message)
environment.facts = broken
sys.exit(front.main(sys.argv[1:]))
"""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            "train",
            f"--config={tiny_run.config}",
            f"--workdir={tmp_path}/run",
        ],
        env=os.environ | SECRETS | {"JAXLM_CACHE": str(tiny_run.cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 70, done.stderr
    assert "Traceback" in done.stderr
    assert "https://***@host/a" in done.stderr
    ended = json.loads((tmp_path / "run/exit.json").read_text())
    assert ended["code"] == 70
    assert "***" in ended["cause"]
    assert leaks(tmp_path / "run", text=done.stderr + done.stdout) == []


def test_s11_files_follow_the_umask_and_the_lock_is_private(tiny_run):
    """The run was started under umask 027."""
    paths = [tiny_run.workdir, *tiny_run.workdir.rglob("*"), *tiny_run.cache.rglob("*")]
    assert len(paths) > 40
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o027} == {}
    assert modes[tiny_run.workdir / "config.json"] == 0o640
    assert modes[tiny_run.workdir / "checkpoints"] == 0o750
    assert modes[tiny_run.workdir / "lock"] == 0o600
    assert {
        path: oct(mode) for path, mode in modes.items() if ".lock" in path.name and mode != 0o600
    } == {}


def test_s11_nothing_is_world_writable_even_under_umask_0(tiny_run, tmp_path):
    folder = tmp_path / "made"
    flags = ("--config.data.tokenizer=characters", "--config.data.sequence=16")
    words = ("data", "tokenize", f"--config={tiny_run.config}", f"--out={folder}", *flags)
    done = jaxlm(*words, env={"JAXLM_CACHE": str(tmp_path / "cache")}, umask=0)
    assert done.returncode == 0, done.stderr
    paths = [folder, *folder.rglob("*"), *(tmp_path / "cache").rglob("*")]
    assert len(paths) > 10
    assert [path for path in paths if path.lstat().st_mode & 0o002] == []
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
