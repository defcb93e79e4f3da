"""One small run through the front door, with secrets all around it, for the tests that look at what a run leaves."""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main

ROOT = Path(__file__).parents[2]
CANARY = "c4nary-5ecret"  # followed by a number, so that a leak says where it came from

CONFIG = """
from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(arg=""):
    c = config.new(Run)
    c.data.train = ("{folder}/*.txt",)
    c.data.validation = ("20%",)
    c.data.tokenizer = "bytes"
    c.data.sequence = 32
    c.model.width, c.model.depth, c.model.heads, c.model.kv_heads = 32, 1, 4, 2
    c.train.steps = 4
    c.train.batch = 8
    c.eval.every = 2
    c.checkpoint.every = 2
    c.log.every = 1
    c.sample.prompts = ("one two",)
    c.sample.max_tokens = 4
    return c
"""

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
    """Where a run is, what it was made of, and what it said."""

    workdir: Path
    config: Path
    cache: Path
    said: str


def jaxlm(*words, env=None, umask=-1, cwd=None):
    """`jaxlm WORDS` as a process of its own, with 8 CPU devices."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "jaxlm", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}),
        umask=umask,
        cwd=cwd,
    )


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A finished run of four steps, started under umask 027 by somebody with secrets in the environment."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "texts").mkdir()
    draw = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    for number in range(40):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(3, 60)))
        (folder / f"texts/{number:02d}.txt").write_text(text)
    config = folder / "tiny.py"
    config.write_text(CONFIG.format(folder=folder / "texts"))
    workdir, cache = folder / "run", folder / "cache"
    done = jaxlm(
        *("train", f"--config={config}", f"--workdir={workdir}"),
        env=SECRETS | {"JAXLM_CACHE": str(cache)},
        umask=0o027,
    )
    assert done.returncode == 0, done.stderr
    return TinyRun(workdir, config, cache, done.stdout + done.stderr)


@pytest.fixture(scope="session")
def shards(tiny_run, tmp_path_factory):
    """Token shards of the tiny run's texts, to be copied and damaged."""
    out = tmp_path_factory.mktemp("shards") / "out"
    words = ["data", "tokenize", f"--config={tiny_run.config}", f"--out={out}", "--quiet"]
    assert main(words) == 0
    return out / "train"
