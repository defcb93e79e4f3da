"""Lines A of the reliability bar: killed anywhere, a run comes back as if it had not been."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import TORN, Store
from jaxlm.cli.main import main
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SLOW = pytest.mark.slow
TWO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "unbroken"
    assert main(harness.words(config, workdir)) == 0
    return workdir


def is_same(workdir: Path, unbroken: Path) -> bool:
    return harness.losses(workdir) == harness.losses(unbroken) and harness.state_digest(
        workdir
    ) == harness.state_digest(unbroken)


@dataclasses.dataclass
class Kills:
    """What a series of kills has met."""

    landed: int = 0
    in_a_save: int = 0
    losses: int = 0
    conflicts: int = 0


def is_saving(workdir: Path) -> bool:
    return any((workdir / "checkpoints").glob(f"*{TORN[0]}*"))


def kill_again_and_again(
    command: list[str], workdir: Path, unbroken: Path, count: int, **env: str
) -> Kills:
    """SIGKILLs the run at random instants after the first step of each life, and at last lets it finish.

    Every second kill waits for a save to be under way first: chance alone may leave none there.
    """
    draw, kills = random.Random(0), Kills()
    known = harness.losses(unbroken)

    def compare() -> None:
        seen = harness.losses(workdir)
        kills.losses += len(seen)
        kills.conflicts += sum(value != known[key] for key, value in seen.items())

    while kills.landed < count:
        metrics = workdir / "metrics.jsonl"
        process = harness.start(command, **env)
        before = metrics.stat().st_size if metrics.exists() else 0
        cut = False
        while process.poll() is None:
            size = metrics.stat().st_size if metrics.exists() else 0
            cut = cut or size < before  # lines of steps that come again are cut at a start
            before = min(before, size)
            if size > before:
                break
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.4))
        while kills.landed % 2 == 1 and not is_saving(workdir) and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0
            break
        kills.landed += 1
        kills.in_a_save += is_saving(workdir)
        compare()
    code, said = harness.run(command, **env)
    assert code == 0, said
    compare()
    return kills


def test_a2_two_kills_change_no_bit(config, tmp_path):
    flags = ("--config.train.steps=80", "--config.eval.every=100%")
    assert main(harness.words(config, tmp_path / "whole", *flags)) == 0
    command = harness.words(config, tmp_path / "run", *flags)
    kills = kill_again_and_again(command, tmp_path / "run", tmp_path / "whole", 2)
    assert (kills.landed, kills.conflicts) == (2, 0)
    assert kills.in_a_save >= 1
    assert kills.losses > 80
    assert is_same(tmp_path / "run", tmp_path / "whole")


@SLOW
def test_a2_six_kills_on_two_devices_change_no_bit(config, tmp_path):
    flags = ("--config.train.steps=250", "--config.eval.every=100%")
    code, said = harness.run(harness.words(config, tmp_path / "whole", *flags), **TWO)
    assert code == 0, said
    command = harness.words(config, tmp_path / "run", *flags)
    kills = kill_again_and_again(command, tmp_path / "run", tmp_path / "whole", 6, **TWO)
    assert (kills.landed, kills.conflicts) == (6, 0)
    assert kills.in_a_save >= 2
    assert kills.losses > 250
    assert is_same(tmp_path / "run", tmp_path / "whole")


@SLOW
@pytest.mark.timeout(1800)
def test_a1_h5_fifty_kills_change_no_bit(config, tmp_path, capsys):
    """Says its goodput too: each life trains for a moment and starts for seconds, so that is small, and no figure to reach."""
    steps = ("--config.train.steps=600", "--config.eval.every=100%")
    code, said = harness.run(harness.words(config, tmp_path / "unbroken", *steps), **TWO)
    assert code == 0, said
    begun = time.monotonic()
    command = harness.words(config, tmp_path / "run", *steps)
    kills = kill_again_and_again(command, tmp_path / "run", tmp_path / "unbroken", 50, **TWO)
    wall = time.monotonic() - begun
    useful = sum(
        r["step_seconds"] or 0 for r in harness.records(tmp_path / "run") if r["split"] == "train"
    )
    with capsys.disabled():
        print(f"\nA1: {kills}, {wall:.0f} s, goodput {useful / wall:.2f}")
    assert useful > 0
    assert (kills.landed, kills.conflicts) == (50, 0)
    assert kills.in_a_save >= 20
    assert is_same(tmp_path / "run", tmp_path / "unbroken")


SAVE_POINTS = (
    pytest.param("save.begin", marks=SLOW),
    "save.files",
    pytest.param("save.digest", marks=SLOW),
    "save.commit",
    "save.retire",
    pytest.param("step.after", marks=SLOW),
)


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a3_a_kill_at_a_point_of_saving_costs_at_most_one_interval(
    config, unbroken, tmp_path, point
):
    words = harness.words(config, tmp_path / "run", "--config.checkpoint.keep_last=1")
    # Removing is asked with the step that is removed.
    at = 2 if point == "save.retire" else 8
    code, said = harness.run(words, f"{point}:sigkill@{at}")
    assert code == -signal.SIGKILL, said
    committed = [
        step
        for step in harness.steps(tmp_path / "run")
        if not harness.store(tmp_path / "run").problems(step)
    ]
    newest = max(r["step"] for r in harness.records(tmp_path / "run"))
    assert committed
    # One interval; and while a save was written, at most one more: the next save waits for it.
    assert newest - committed[-1] <= 2 * 2
    assert main(words) == 0
    assert is_same(tmp_path / "run", unbroken)
    assert not [p for p in (tmp_path / "run/checkpoints").iterdir() if not p.name.isdigit()]


def checkpoint_digest(workdir: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((workdir / "checkpoints").rglob("*")):
        digest.update(str(path.relative_to(workdir)).encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@SLOW
def test_a4_a_kill_during_a_restore_twice_harms_nothing(config, unbroken, tmp_path):
    words = harness.words(config, tmp_path / "run")
    assert main([*words, "--stop_at=6"]) == 0
    before = checkpoint_digest(tmp_path / "run")
    for _ in range(2):
        assert harness.run(words, "restore.read:sigkill@6")[0] == -signal.SIGKILL
        assert checkpoint_digest(tmp_path / "run") == before
    assert main(words) == 0
    assert is_same(tmp_path / "run", unbroken)


@SLOW
def test_a5_a_kill_while_old_steps_are_removed_leaves_a_good_one(config, unbroken, tmp_path):
    words = harness.words(config, tmp_path / "run", "--config.checkpoint.keep_last=1")
    assert harness.run(words, "save.retire:sigkill@4")[0] == -signal.SIGKILL
    left = [p.name for p in (tmp_path / "run/checkpoints").iterdir()]
    assert any(TORN[1] in name for name in left), "killed while it removed"
    assert harness.store(tmp_path / "run").newest_sound() is not None
    assert main(words) == 0
    assert not any(TORN[1] in p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert is_same(tmp_path / "run", unbroken)


@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        ("the wait for data", "data.next:sigterm@6,data.next:hang@6"),
        pytest.param("compiling", "step.before:sigterm@1", marks=SLOW),
        pytest.param("a step", "step.after:sigterm@7", marks=SLOW),
        pytest.param("an evaluation", "eval:sigterm@6", marks=SLOW),
        ("a save", "save.files:sigterm@6"),
    ],
)
def test_a7_a_sigterm_in_any_phase_saves_and_says_75(config, unbroken, tmp_path, phase, fault):
    words = harness.words(config, tmp_path / "run", "--config.eval.every=6")
    begun = time.monotonic()
    code, said = harness.run(words, fault)
    assert code == 75, said
    assert time.monotonic() - begun < 40
    exited = harness.exit_of(tmp_path / "run")
    assert exited["code"] == 75
    assert exited["step"] == harness.steps(tmp_path / "run")[-1] >= 1
    assert main(words) == 0
    ours, theirs = harness.losses(tmp_path / "run"), harness.losses(unbroken)
    assert all(ours[key] == value for key, value in theirs.items())


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=SLOW)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a9_a_second_signal_ends_the_process_within_two_seconds(config, tmp_path, number, code):
    process = harness.start(harness.words(config, tmp_path / "run"), "step.after:hang@5")
    try:
        while not (tmp_path / "run/checkpoints/4").exists():
            time.sleep(0.02)
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None, "the first asks for an orderly end"
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == code
        assert time.monotonic() - begun < 2
    finally:
        process.kill()
        process.communicate()
    assert harness.exit_of(tmp_path / "run")["code"] == code
    assert harness.store(tmp_path / "run").newest_sound() == 4


@SLOW
def test_a10_a_grace_shorter_than_the_save_costs_one_interval(config, unbroken, tmp_path):
    words = harness.words(config, tmp_path / "run")
    process = harness.start(words, "step.after:sigterm@7,save.digest:hang@7")
    try:
        while not list((tmp_path / "run/checkpoints").glob(f"7{TORN[0]}")):
            time.sleep(0.02)
            assert process.poll() is None
        time.sleep(1)
    finally:
        process.kill()
        process.communicate()
    assert harness.steps(tmp_path / "run")[-1] == 6
    assert main(words) == 0
    assert is_same(tmp_path / "run", unbroken)


def test_a11_a_finished_run_started_again_says_so_and_writes_nothing(config, unbroken, capsys):
    def everything() -> dict[str, bytes]:
        found = sorted(p for p in unbroken.rglob("*") if p.is_file() and p.name != "lock")
        return {str(p.relative_to(unbroken)): p.read_bytes() for p in found}

    before = everything()
    begun = time.monotonic()
    assert main(harness.words(config, unbroken)) == 0
    assert time.monotonic() - begun < 10
    assert "complete at step 12" in capsys.readouterr().out
    assert everything() == before


@SLOW
def test_a13_what_an_async_save_stores_is_the_state_at_its_step(config, tmp_path):
    """The state is donated to the next step while its copy is written: each saved step is that of a run which ends there."""
    keep = "--config.checkpoint.keep_last=99"
    assert main(harness.words(config, tmp_path / "all", keep, "--config.checkpoint.every=1")) == 0
    assert harness.steps(tmp_path / "all") == list(range(1, 13))
    for step in (1, 5, 9):
        assert main(harness.words(config, tmp_path / f"{step}", f"--stop_at={step}")) == 0
        assert harness.state_digest(tmp_path / f"{step}") == harness.state_digest(
            tmp_path / "all", step
        )


LEAKS = """
import os, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
def seen():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()
state = {"params": {"w": jnp.ones((256, 1024))}, "step": jnp.int32(0)}
shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
store = Store(sys.argv[1], CheckpointConfig())
for step in range(1, 201):
    store.save(step, state, {"step": step})
    store.wait()
    if step % 10 == 0:
        store.restore(step, shapes)
    if step == 20:
        first = seen()
last = seen()
store.close()
print(*first, *last)
"""


@SLOW
def test_a14_two_hundred_saves_leak_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LEAKS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    memory, files, threads, *after = map(int, done.stdout.split())
    assert after[0] - memory <= 64 << 20
    assert after[1] <= files + 2
    assert after[2] <= threads + 2


def test_a6_each_row_of_an_epoch_is_read_once_also_over_resumes(config, tmp_path):
    """Stops three times inside an epoch and once over its edge; what is read is noted by the run itself."""
    from jaxlm.core import config as configs
    from jaxlm.data import prepare
    from jaxlm.recipes.config import Run

    run = configs.load(Run, config, [("data.packing", "concat")]).value
    loader = prepare.open_data(run.data, seed=run.seed).train
    rows = loader.plan.rows
    per_epoch = rows // 8
    assert per_epoch > 6
    stops = [2, 5, per_epoch - 1, per_epoch + 3, 2 * per_epoch]
    read, start = [], 0
    for stop in stops:
        stream = loader.batches(start, batch=8)
        for _ in range(stop - start):
            read += [row.tobytes() for row in next(stream).tokens]
        start = stop
    whole = loader.batches(0, batch=8)
    straight = [row.tobytes() for _ in range(stops[-1]) for row in next(whole).tokens]
    assert read == straight
    first = read[:rows]
    assert sorted(first) == sorted(
        loader.at(0, batch=rows, rows=slice(0, rows)).tokens[i].tobytes() for i in range(rows)
    )


def test_a_store_opened_twice_by_its_owner_reads_the_same(tmp_path, unbroken):
    assert Store(unbroken / "checkpoints", CheckpointConfig(), read_only=True).steps() == (
        harness.steps(unbroken)
    )
    assert json.loads((unbroken / "exit.json").read_text())["step"] == 12
    assert os.stat(unbroken / "lock").st_mode & 0o777 == 0o600
