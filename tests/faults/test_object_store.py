"""Runs with checkpoints on an object store, killed at each point of a save and at random ones."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxlm.cli.main import main
from jaxlm.training.launch import free_port
from tests import s3 as servers
from tests.faults import harness

pytestmark = pytest.mark.slow

# Gloo waits 30 s for a rank that compiles.
FAST = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
SAVE_POINTS = ("save.begin", "save.files", "save.upload", "save.digest", "save.commit")


@pytest.fixture(scope="module")
def s3():
    with servers.serving() as server:
        server.bucket("runs")
        yield server


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    """The same run with its checkpoints in the run directory: losses and state are the same."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    code, said = harness.run(harness.words(config, workdir))
    assert code == 0, said
    return workdir


@pytest.fixture
def place(s3, tmp_path, monkeypatch):
    """The flag of a prefix of its own; this process has the keys too."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return f"--config.checkpoint.directory=s3://runs/{tmp_path.name}"


def require_same(run, other):
    assert harness.losses(run).items() >= harness.losses(other).items()
    assert harness.state_digest(run) == harness.state_digest(other)


def test_every_point_of_a_save_may_be_the_last_one(config, unbroken, place, tmp_path):
    """After each kill the last committed step is there; the end is that of an unbroken run."""
    workdir, committed = tmp_path / "run", 0
    for number, point in enumerate(SAVE_POINTS):
        step = 2 * number + 2
        code, said = harness.run(harness.words(config, workdir, place), f"{point}:sigkill@{step}")
        assert code == -signal.SIGKILL, said
        newest = harness.steps(workdir)
        assert not newest or newest[-1] >= committed, "a committed step is lost"
        # Killed in the save of `step`: the save before it was committed.
        committed = newest[-1] if newest else 0
        assert committed == step - 2, (point, newest)
    code, said = harness.run(harness.words(config, workdir, place))
    assert code == 0, said
    require_same(workdir, unbroken)


def test_kills_at_random_instants_lose_no_committed_step(config, unbroken, place, tmp_path, s3):
    draw, workdir, committed, kills, in_save = random.Random(1), tmp_path / "run", 0, 0, 0
    slow = "save.upload:sleep=0.05"
    while kills < 8:
        process = harness.start(
            harness.words(config, workdir, place, "--config.train.steps=40"), slow
        )
        begun = len(s3.requests)
        while process.poll() is None and not any(
            method == "PUT" and path.endswith(".zarray") for method, path in s3.requests[begun:]
        ):
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 3))
        if process.poll() is not None:
            break
        process.kill()
        harness.outputs_of([process])
        kills += 1
        steps = harness.steps(workdir)
        assert not steps or steps[-1] >= committed
        committed = steps[-1] if steps else committed
        opened = harness.store(workdir)
        torn = [name for name in opened.directory.names() if name.isdigit()]
        in_save += len(torn) > len(steps)
        assert all(opened.problems(step) == [] for step in steps)
    assert kills >= 4
    assert in_save >= 2, "the kills must fall into saves"
    code, said = harness.run(harness.words(config, workdir, place, "--config.train.steps=40"))
    assert code == 0, said
    assert (
        harness.losses(workdir).items()
        >= {
            key: loss for key, loss in harness.losses(unbroken).items() if key[0] == "train"
        }.items()
    )


def test_every_command_finds_the_checkpoints(config, unbroken, place, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert main(harness.words(config, workdir, place)) == 0

    def answer(run, *words):
        capsys.readouterr()
        assert main([*words, f"--workdir={run}", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert answer(workdir, "checkpoint", "verify")["sound"] == [8, 10, 12]
    listed = answer(workdir, "checkpoint", "list")
    assert (listed["newest"], [row["step"] for row in listed["steps"]]) == (12, [8, 10, 12])
    words = ("checkpoint", "diff", "--step=12", f"--other_workdir={unbroken}")
    assert answer(workdir, *words)["is_identical"]
    prompt = ("generate", "--prompt=one", "--max_tokens=3")
    for words in (("eval",), prompt):
        ours, theirs = answer(workdir, *words), answer(unbroken, *words)
        assert {**ours, "workdir": ""} == {**theirs, "workdir": ""}
    weights = []
    for run in (workdir, unbroken):
        answer(run, "export", f"--out={tmp_path / 'out' / run.parent.name}")
        weights.append((tmp_path / "out" / run.parent.name / "model.safetensors").read_bytes())
        child = tmp_path / "child" / run.parent.name
        flags = (f"--init_from={run}", "--config.checkpoint.directory=None", "--stop_at=2")
        assert main(harness.words(config, child, *flags)) == 0
        weights.append(harness.state_digest(child))
    assert weights[:2] == weights[2:]


def test_a_rewind_quarantines_on_the_store_and_survives_the_loss_of_the_disk(
    config, place, tmp_path
):
    flags = ("--config.train.steps=16", "--config.checkpoint.keep_last=9")
    flags += ("--config.guard.budget=2", "--config.guard.rewind_steps=4", "--config.guard.skip=4")
    local, workdir = tmp_path / "local", tmp_path / "run"
    code, output = harness.run(harness.words(config, local, *flags), "batch:nan@9-11")
    assert code == 0, output
    command = harness.words(config, workdir, *flags, place)
    code, output = harness.run([*command, "--stop_at=14"], "batch:nan@9-11")
    assert code == 0, output
    quarantined = [url.rpartition("/")[2] for url, _ in harness.store(workdir).quarantined()]
    assert quarantined == sorted(p.name for p in (local / "quarantine").iterdir() if p.is_dir())
    assert (local / "rewinds.json").read_text() == (workdir / "rewinds.json").read_text()
    workdir.rename(tmp_path / "lost")
    code, output = harness.run(command)
    assert code == 0, output
    assert harness.state_digest(workdir) == harness.state_digest(local)


def test_a_full_quota_ends_a_run_with_74_and_the_same_command_resumes(
    config, unbroken, place, tmp_path, s3
):
    workdir = tmp_path / "run"
    full = ("403 Forbidden", "QuotaExceeded")

    def fault(method, path):
        is_late = any(f"/{step}/" in path for step in range(6, 13))
        return full if method == "PUT" and is_late else None

    s3.fault = fault
    try:
        code, output = harness.run(harness.words(config, workdir, place))
    finally:
        s3.fault = lambda method, path: None
    assert code == 74, output
    assert "trying once more" in (workdir / "log.txt").read_text()
    assert "the quota of the object store is full" in output
    assert harness.steps(workdir) == [2, 4]
    code, output = harness.run(harness.words(config, workdir, place))
    assert code == 0, output
    require_same(workdir, unbroken)


def test_two_processes_share_no_disk(config, place, tmp_path):
    """Each has the run directory on a disk of its own, and the first may lose it."""
    flags = ("--config.mesh.fsdp=2", "--config.mesh.data=1", place)

    def live(*more, names=("zero", "one")):
        outputs = start(*more, names=names)
        if "Gloo context initialization failed: DEADLINE_EXCEEDED" in outputs[1]:
            outputs = start(*more, names=names)  # a busy machine compiled for 30 s
        assert outputs[0] == [0, 0], outputs[1]

    def start(*more, names):
        address = f"127.0.0.1:{free_port()}"
        ranks = []
        for rank, name in enumerate(names):
            (tmp_path / name).mkdir(exist_ok=True)
            cluster = (f"--coordinator={address}", "--num_processes=2", f"--process_id={rank}")
            command = harness.words(config, "/proc/self/cwd/run", *flags, *cluster, *more)
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jaxlm", *command, "--cpu_devices=1"],
                    cwd=tmp_path / name,
                    env=os.environ | FAST,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        output = "\n".join(harness.outputs_of(ranks))
        return [rank.returncode for rank in ranks], output

    live("--stop_at=6")
    assert not (tmp_path / "one/run/config.json").exists()
    assert not list((tmp_path / "one/run/checkpoints/process-1").iterdir())
    # A new machine, whose disk is empty, replaces that of the first process.
    live(names=("new", "one"))
    assert [r["step"] for r in harness.records(tmp_path / "new/run", "starts.jsonl")] == [6]
    assert harness.steps(tmp_path / "new/run")[-1] == 12
    whole = tmp_path / "whole/run"
    code, said = harness.run([*harness.words(config, whole), "--cpu_devices=2", *flags[:2]], **FAST)
    assert code == 0, said
    ours, theirs = harness.losses(tmp_path / "new/run"), harness.losses(whole)
    for key, loss in ours.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(theirs[key]), rel=1e-5)
