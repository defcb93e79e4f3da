"""One small run by the command line, with secrets around it, for tests of what a run leaves."""

import dataclasses
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from tests.faults import harness

ROOT = Path(__file__).parents[2]
ONE_DEVICE = {"XLA_FLAGS": f"{harness.FLAGS} --xla_force_host_platform_device_count=1".strip()}
CANARY = "c4nary-5ecret"  # followed by a number, so that a leak shows its source

# Its step is that of the harness, and compiled once for both.
SETTINGS = {
    "train.steps": 4,
    "eval.every": 2,
    "log.sinks": ("console", "tensorboard"),
    "sample.every": 2,
    "sample.prompts": ("one two",),
    "sample.max_tokens": 4,
}

SECRETS = {
    name: f"{CANARY}-{number}"
    for number, name in enumerate(
        (
            *("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "PASSWORD"),
            *("JAX_TOKEN", "JAXLM_API_KEY", "XLA_PASSWORD", "NCCL_SECRET", "private_key"),
        )
    )
} | {
    "DATABASE_URL": f"postgres://user:{CANARY}-url@host/table",
    "NCCL_DEBUG": f"https://user:{CANARY}-debug@host/log",  # a variable that is written down
}


@dataclasses.dataclass(frozen=True)
class TinyRun:
    """Folder of a run, its config, and its output."""

    workdir: Path
    config: Path
    cache: Path
    output: str


def jaxlm(*words, env=None, umask=-1, cwd=None):
    """`jaxlm WORDS` as a process of its own, with one device."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "jaxlm", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | ONE_DEVICE | {"PYTHONPATH": str(ROOT)} | (env or {}),
        umask=umask,
        cwd=cwd,
    )


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, worker_id):
    """A finished run of four steps, started under umask 027 with secrets in the environment.

    One for all workers, whose folders have the same parent. None of them changes it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "tiny"
    config, printed = folder / "tiny.py", folder / "printed.txt"
    workdir, cache = folder / "run", folder / "cache"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            (folder / "texts").mkdir(exist_ok=True)
            Path(harness.write_config(folder / "texts", SETTINGS)).rename(config)
            done = jaxlm(
                *("train", f"--config={config}", f"--workdir={workdir}"),
                env=SECRETS | {"JAXLM_CACHE": str(cache)},
                umask=0o027,
            )
            assert done.returncode == 0, done.stderr
            printed.write_text(done.stdout + done.stderr)
    return TinyRun(workdir, config, cache, printed.read_text())


@pytest.fixture(scope="session")
def shards(tiny_run, tmp_path_factory):
    """Token shards of the tiny run's texts, to be copied and damaged."""
    out = tmp_path_factory.mktemp("shards") / "out"
    words = ["data", "tokenize", f"--config={tiny_run.config}", f"--out={out}", "--quiet"]
    assert main(words) == 0
    return out / "train"
