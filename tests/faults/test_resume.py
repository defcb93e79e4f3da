"""Lines A of the reliability bar: killed anywhere, a run comes back as if it had not been."""

import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path

import jax
import pytest
import tensorstore

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import PARTIAL_SUFFIXES, Store
from jaxlm.cli.main import main
from jaxlm.core import faults
from jaxlm.data.loader import Loader
from jaxlm.optim.config import Optimizer
from jaxlm.recipes.train.checkpointing import CheckpointSaver
from tests import machine
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

SLOW = pytest.mark.slow
SHARDED = ("--config.mesh.data=2", "--config.mesh.fsdp=2")  # the rig of the bar


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "unbroken")


def is_same(workdir: Path, unbroken: Path) -> bool:
    return harness.losses(workdir) == harness.losses(unbroken) and harness.state_digest(
        workdir
    ) == harness.state_digest(unbroken)


@dataclasses.dataclass
class Kills:
    """Counts of the situations that a series of kills has met."""

    landed: int = 0
    in_a_save: int = 0
    losses: int = 0
    conflicts: int = 0

    def __str__(self) -> str:
        return (
            f"{self.landed} kills, {self.in_a_save} in a save, {self.losses} losses compared, "
            f"{self.conflicts} conflicts"
        )


def is_saving(workdir: Path) -> bool:
    return any((workdir / "checkpoints").glob(f"*{PARTIAL_SUFFIXES[0]}*"))


def kill_again_and_again(
    command: list[str], workdir: Path, unbroken: Path, count: int, longest: float
) -> Kills:
    """SIGKILL the run at random instants after the first step of each life, then let it finish.

    Every second kill waits for a save to be under way first: chance alone may leave none there.

    Args:
      command: the words of the run.
      workdir: its directory.
      unbroken: the directory of the same run without kills.
      count: number of kills.
      longest: most seconds from the first step of a life to its kill.
    """
    draw, kills = random.Random(0), Kills()
    known = harness.losses(unbroken)

    def compare() -> None:
        seen = harness.losses(workdir)
        kills.losses += len(seen)
        kills.conflicts += sum(value != known[key] for key, value in seen.items())

    while kills.landed < count:
        metrics = workdir / "metrics.jsonl"
        process = harness.start(command)
        before = metrics.stat().st_size if metrics.exists() else 0
        cut = False
        while process.poll() is None:
            size = metrics.stat().st_size if metrics.exists() else 0
            cut = cut or size < before  # lines of steps that come again are cut at a start
            before = min(before, size)
            if size > before:
                break
            time.sleep(0.002)
        time.sleep(draw.uniform(0, longest))
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
    code, output = harness.run(command)
    assert code == 0, output
    compare()
    return kills


@pytest.fixture
def on_four(monkeypatch):
    """Four devices, in this process and in those that the test starts."""
    four = jax.local_devices()[:4]
    flags = re.sub(r"(device_count)=\d+", r"\1=4", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(jax, "devices", lambda *_: four)
    monkeypatch.setattr(jax, "device_count", lambda *_: len(four))
    monkeypatch.setenv("XLA_FLAGS", flags)


def processor_seconds() -> float:
    """Processor time of the processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a2_six_kills_change_no_bit(config, tmp_path, record_property):
    """The bar allows 45 s, or their processor time on two cores: the clock counts other work.

    On one device, whose step the tests of this module share; the fifty kills of A1 meet four.
    """
    flags = ("--config.train.steps=100", "--config.eval.every=100%")
    seldom = "--config.checkpoint.every=100%"
    assert main(harness.words(config, tmp_path / "whole", *flags, seldom)) == 0
    begun, used = time.monotonic(), processor_seconds()
    command = harness.words(config, tmp_path / "run", *flags)
    kills = kill_again_and_again(command, tmp_path / "run", tmp_path / "whole", 6, 0.2)
    wall, used = time.monotonic() - begun, processor_seconds() - used
    record_property("A2", f"{kills}, {wall:.0f} s, {used:.0f} s of the processor")
    assert (kills.landed, kills.conflicts) == (6, 0)
    assert kills.in_a_save >= 2
    assert kills.losses >= 101 + 6
    assert is_same(tmp_path / "run", tmp_path / "whole")
    machine.require_processor(used, 2 * 45)
    machine.require_clock(wall, 45)


@SLOW
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_a1_h5_fifty_kills_change_no_bit(config, tmp_path, on_four, record_property):
    """Within six minutes of the bar, and their processor time on two cores.

    The clock counts other work too. The goodput is recorded: each life trains for a moment and
    starts for seconds, so it is small, and has no target.
    """
    steps = ("--config.train.steps=600", "--config.eval.every=100%", *SHARDED)
    assert main(harness.words(config, tmp_path / "unbroken", *steps)) == 0
    begun, used = time.monotonic(), processor_seconds()
    command = harness.words(config, tmp_path / "run", *steps)
    kills = kill_again_and_again(command, tmp_path / "run", tmp_path / "unbroken", 50, 0.4)
    wall, used = time.monotonic() - begun, processor_seconds() - used
    useful = sum(
        r["step_seconds"] or 0 for r in harness.records(tmp_path / "run") if r["split"] == "train"
    )
    record_property("A1", f"{kills}, {wall:.0f} s, {used:.0f} s of the processor")
    record_property("H5", f"goodput {useful / wall:.2f}")
    assert useful > 0
    assert (kills.landed, kills.conflicts) == (50, 0)
    assert kills.in_a_save >= 20
    assert kills.losses >= 601 + 50, "all of the whole run, and some of each life"
    assert is_same(tmp_path / "run", tmp_path / "unbroken")
    machine.require_processor(used, 2 * 360)
    machine.require_clock(wall, 360)


# Point -> its step, the step that was committed last by then, and the intervals that may be lost. A
# removal is named by the removed step: 2 goes while 8 is saved. Each life resumes after the kill of
# the one before.
SAVE_POINTS = {
    "save.retire": (2, 6, 2),
    "save.begin": (8, 6, 1),
    "save.files": (10, 8, 1),
    "save.digest": (10, 8, 2),
    "save.commit": (12, 10, 2),
    "step.after": (12, 10, 1),
}


def test_a3_a_kill_at_a_point_of_saving_costs_at_most_one_interval(
    config, unbroken, tmp_path, record_property
):
    """Plus one interval in addition to the bar if the save continues in the background.

    These are the steps done since the save was due.
    """
    words = harness.words(config, tmp_path / "run", "--config.checkpoint.keep_last=1")
    lost = []
    for point, (at, newest, intervals) in SAVE_POINTS.items():
        code, output = harness.run(words, f"{point}:sigkill@{at}")
        assert code == -signal.SIGKILL, output
        store = harness.store(tmp_path / "run")
        committed = [step for step in store.steps() if not store.problems(step)]
        assert committed[-1] == newest, point
        reached = max(r["step"] for r in harness.records(tmp_path / "run"))
        assert 0 <= reached - newest <= 2 * intervals, point
        lost.append(reached - newest)
    record_property("A3", f"killed at {len(lost)} points, {max(lost)} steps lost at most")
    assert main(words) == 0
    assert is_same(tmp_path / "run", unbroken)
    assert not [p for p in (tmp_path / "run/checkpoints").iterdir() if not p.name.isdigit()]


def checkpoint_digest(workdir: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((workdir / "checkpoints").rglob("*")):
        digest.update(str(path.relative_to(workdir)).encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


# End the process once it has restored the given number of arrays.
HALF_RESTORED = """
import os, signal, sys
import jax
from jaxlm.cli.main import main
from jaxlm.core import faults

point, make, made = faults.point, jax.make_array_from_single_device_arrays, []


def ends(*args, **kw):
    made.append(make(*args, **kw))
    if len(made) == int(sys.argv[1]):
        print("restored", len(made), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return made[-1]


def noted(name, number=None, size=None):
    point(name, number, size)
    if name == "restore.read":
        jax.make_array_from_single_device_arrays = ends


faults.point = noted
sys.exit(main(sys.argv[2:]))
"""


@SLOW
def test_a4_a_kill_during_a_restore_twice_harms_nothing(config, unbroken, tmp_path):
    """Before the first byte is read, and when five arrays are there."""
    words = harness.words(config, tmp_path / "run")
    assert main([*words, "--stop_at=6"]) == 0
    before = checkpoint_digest(tmp_path / "run")
    assert harness.run(words, "restore.read:sigkill@6")[0] == -signal.SIGKILL
    assert checkpoint_digest(tmp_path / "run") == before
    command = [sys.executable, "-c", HALF_RESTORED, "5", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "restored 5" in done.stdout
    assert checkpoint_digest(tmp_path / "run") == before
    assert main(words) == 0
    assert is_same(tmp_path / "run", unbroken)


# End the process once it has removed the given number of files of the step. A thread of its own
# removes them: the commit is held up meanwhile, so that the next life has something left to do.
HALFWAY = """
import os, signal, sys, time
from pathlib import Path
from jaxlm.cli.main import main
from jaxlm.core import faults

count, step = int(sys.argv[1]), int(sys.argv[2])
point, unlink, removed = faults.point, os.unlink, []


def ends(*args, **kw):
    unlink(*args, **kw)
    removed.append(args[0])
    if len(removed) == count:
        os.kill(os.getpid(), signal.SIGKILL)


def noted(name, number=None, size=None):
    if (name, number) == ("save.retire", step):
        (retired,) = Path(sys.argv[3]).glob(f"{step}.*")
        print(sum(path.is_file() for path in retired.rglob("*")), flush=True)
        if not count:
            os.kill(os.getpid(), signal.SIGKILL)
        os.unlink = ends
    if name == "save.commit" and os.unlink is ends:
        time.sleep(60)
    point(name, number, size)


faults.point = noted
sys.exit(main(sys.argv[4:]))
"""


@SLOW
def test_a5_a_kill_while_old_steps_are_removed_leaves_a_good_one(
    config, unbroken, tmp_path, record_property
):
    """Kill before the first file is gone, after it, after some, in a later save, and at the end."""
    run = tmp_path / "run"
    words = harness.words(config, run, "--config.checkpoint.keep_last=1")
    removed = []
    for count, step in ((0, 2), (1, 4), (5, 6), (3, 8)):
        done = subprocess.run(
            [sys.executable, "-c", HALFWAY, str(count), str(step), run / "checkpoints", *words],
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        torn = run / f"checkpoints/{step}{PARTIAL_SUFFIXES[1]}"
        left = sum(path.is_file() for path in torn.rglob("*"))
        removed.append(int(done.stdout.split()[-1]) - left)
        sound = harness.store(run).latest_valid()
        assert sound is not None
        assert sound > step
    assert removed == [0, 1, 5, 3], "killed while it removed"
    record_property("A5", f"killed after {removed} files were removed")
    assert main(words) == 0
    assert not any(PARTIAL_SUFFIXES[1] in p.name for p in (run / "checkpoints").iterdir())
    assert is_same(run, unbroken)


PHASES = {
    "a step": "step.after:sigterm@7",
    "compiling": "compile:sigterm",
    "an evaluation": "eval:sigterm@6",
    "a save": "save.files:sigterm@6",
    "the wait for data": "data.next:sigterm@6,data.next:hang@6",
    "the verification of a checkpoint": "restore.verify:sigterm@6,restore.verify:hang@6",
    "a restore": "restore.read:sigterm@6",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", PHASES)
def test_a7_a_sigterm_in_any_phase_saves_and_says_75(
    config, unbroken, tmp_path, monkeypatch, phase, record_property
):
    words = harness.words(config, tmp_path / "run", "--config.eval.every=6")
    if "restore" in PHASES[phase]:
        assert main([*words, "--stop_at=6"]) == 0
    sent, strike = [], faults._strike

    def noted(fault, size):
        sent.append(time.monotonic())
        strike(fault, size)

    def nobody(number, _):
        raise AssertionError("no process took the signal")

    monkeypatch.setattr(faults, "_faults", faults.parse(PHASES[phase]))
    monkeypatch.setattr(faults, "_strike", noted)
    before = signal.signal(signal.SIGTERM, nobody)
    try:
        assert main(words) == 75
    finally:
        signal.signal(signal.SIGTERM, before)
    took = time.monotonic() - sent[0]
    machine.require_clock(took, 10)
    record_property("A7", f"in {phase} {took:.1f} s")
    exited = harness.exit_of(tmp_path / "run")
    assert exited["code"] == 75
    assert exited["step"] == harness.steps(tmp_path / "run")[-1] >= 1
    if "verify" not in PHASES[phase]:
        assert "ended with code 75" in (tmp_path / "run/report.html").read_text()
    monkeypatch.setattr(faults, "_faults", ())
    assert main(words) == 0
    ours, theirs = harness.losses(tmp_path / "run"), harness.losses(unbroken)
    assert all(ours[key] == value for key, value in theirs.items())


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=SLOW)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a9_a_second_signal_ends_the_process_within_two_seconds(
    config, unbroken, tmp_path, number, code, record_property
):
    """While step 6 is saved, complete but for its name: the newest checkpoint is the one before."""
    run = tmp_path / "run"
    words = harness.words(config, run)
    process = harness.start(words, "save.commit:hang@6")
    torn = run / f"checkpoints/6{PARTIAL_SUFFIXES[0]}"
    try:
        while not (torn / records.NAME).exists():
            time.sleep(0.02)
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None, "the first requests an orderly end"
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == code
        took = time.monotonic() - begun
        machine.require_clock(took, 2)
        record_property("A9", f"{number.name} {took:.1f} s")
    finally:
        process.kill()
        process.communicate()
    assert harness.exit_of(run)["code"] == code
    assert (torn / records.NAME).exists()
    assert harness.store(run).latest_valid() == 4
    assert main(words) == 0
    assert is_same(run, unbroken)
    assert not torn.exists()


@SLOW
def test_a10_a_grace_shorter_than_the_save_costs_one_interval(config, unbroken, tmp_path):
    words = harness.words(config, tmp_path / "run")
    process = harness.start(words, "step.after:sigterm@7,save.digest:hang@7")
    try:
        while not list((tmp_path / "run/checkpoints").glob(f"7{PARTIAL_SUFFIXES[0]}")):
            time.sleep(0.02)
            assert process.poll() is None
        time.sleep(1)
    finally:
        process.kill()
        process.communicate()
    assert harness.steps(tmp_path / "run")[-1] == 6
    assert main(words) == 0
    assert is_same(tmp_path / "run", unbroken)


def test_a11_a_finished_run_started_again_says_so_and_writes_nothing(
    config, unbroken, capsys, record_property
):
    def everything() -> dict[str, bytes]:
        paths = sorted(p for p in unbroken.rglob("*") if p.is_file() and p.name != "lock")
        return {str(p.relative_to(unbroken)): p.read_bytes() for p in paths}

    before = everything()
    begun = time.monotonic()
    assert main(harness.words(config, unbroken)) == 0
    took = time.monotonic() - begun
    machine.require_clock(took, 10)
    record_property("A11", f"{took:.1f} s")
    assert "already complete at step 12" in capsys.readouterr().out
    assert everything() == before


def late_saves(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Delay the arrays of each save; return the list of saves during which a step was done.

    A step is over, its loss fetched, when the save after it is requested; that save finds the
    arrays of the one before still being written, or not.
    """
    begun, held, written, overlapped = list[int](), set[int](), set[int](), set[int]()
    point, save, open_array = faults.point, CheckpointSaver.save, tensorstore.open

    def noted(name, step=None, size=None):
        if name == "save.begin":
            begun.append(step)
        if name == "save.digest":  # comes once the arrays are on the disk
            written.add(step)
        point(name, step, size)

    def open_late(*words, **more):
        if begun[-1] not in held and threading.current_thread() is not threading.main_thread():
            held.add(begun[-1])
            time.sleep(0.05)
        return open_array(*words, **more)

    def look_and_save(saves, moment):
        if begun and begun[-1] in held - written:
            overlapped.add(begun[-1])
        save(saves, moment)

    monkeypatch.setattr(faults, "point", noted)
    monkeypatch.setattr(tensorstore, "open", open_late)
    monkeypatch.setattr(CheckpointSaver, "save", look_and_save)
    return overlapped


@SLOW
def test_a13_what_an_async_save_stores_is_what_a_sync_one_does(
    config, tmp_path, monkeypatch, record_property
):
    """The state is donated to the next step while its copy is written.

    The second run does nothing else meanwhile.
    """
    flags = ("--config.train.steps=100", "--config.checkpoint.every=1")
    keep = ("--config.checkpoint.keep_last=100", "--config.eval.every=100%")
    with monkeypatch.context() as patch:
        overlapped = late_saves(patch)
        assert main(harness.words(config, tmp_path / "async", *flags, *keep)) == 0
    figures = f"A13: a step was done while {len(overlapped)} of 100 saves were written"
    record_property("table", figures)
    assert len(overlapped) >= 50
    save = Store.save

    def save_and_wait(store, *words, **more):
        save(store, *words, **more)
        store.wait()

    monkeypatch.setattr(Store, "save", save_and_wait)
    assert main(harness.words(config, tmp_path / "sync", *flags, *keep)) == 0
    assert harness.steps(tmp_path / "async") == list(range(1, 101))
    digests = [harness.state_digest(tmp_path / "async", step) for step in range(1, 101)]
    assert digests == [harness.state_digest(tmp_path / "sync", step) for step in range(1, 101)]
    assert len(set(digests)) == 100
    record_property("A13", "100 of 100 saves the same")


LEAKS = """
import os, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
def seen():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    size = os.sysconf("SC_PAGE_SIZE")
    return pages * size, len(os.listdir("/proc/self/fd")), threading.active_count()
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
def test_a14_two_hundred_saves_leak_nothing(tmp_path, record_property):
    done = subprocess.run(
        [sys.executable, "-c", LEAKS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    memory, files, threads, *after = map(int, done.stdout.split())
    grown = [now - then for now, then in zip(after, (memory, files, threads), strict=True)]
    record_property("A14", f"{grown[0] >> 20} MiB, files {grown[1]:+}, threads {grown[2]:+}")
    assert grown[0] <= 64 << 20
    assert grown[1] <= 0
    assert grown[2] <= 0


def test_a6_each_row_of_an_epoch_is_read_once_also_over_resumes(
    config, tmp_path, monkeypatch, record_property
):
    """A run stops three times inside an epoch and resumes over its edge, noting its batches."""
    words = harness.words(config, tmp_path / "run", "--config.data.packing=concat")
    words += ["--config.eval.every=100%", "--config.checkpoint.every=100%"]
    batches, loaders, read = Loader.batches, [], {}

    def noted(self, start, **how):
        loaders.append(self)
        for step, each in enumerate(batches(self, start, **how)):
            read[start + step] = [row.tobytes() for row in each.tokens]  # the loader reads ahead
            yield each

    monkeypatch.setattr(Loader, "batches", noted)
    stops = [8, 16, 24, 48, 80]
    consumed = []
    for before, stop in zip([0, *stops], stops, strict=False):
        read.clear()
        assert main([*words, "--config.train.steps=80", f"--stop_at={stop}"]) == 0
        consumed += [row for step in range(before, stop) for row in read[step]]
    loader = loaders[0]
    rows = loader.plan.rows
    assert stops[2] < rows / 8 < stops[3], "three stops inside the first epoch, the fourth beyond"
    assert 2 * rows <= len(consumed)
    every = loader.at(0, batch=rows, rows=slice(0, rows)).tokens
    for epoch in (consumed[:rows], consumed[rows : 2 * rows]):
        assert sorted(epoch) == sorted(row.tobytes() for row in every)
    assert consumed[:rows] != consumed[rows : 2 * rows]
    straight = batches(loader, 0, batch=8)
    assert consumed == [row.tobytes() for _ in range(stops[-1]) for row in next(straight).tokens]
    record_property("A6", f"{len(stops)} lives, {rows} rows an epoch, each once")


@pytest.mark.slow
def test_a_store_opened_twice_by_its_owner_reads_the_same(tmp_path, unbroken):
    assert Store(unbroken / "checkpoints", CheckpointConfig(), read_only=True).steps() == (
        harness.steps(unbroken)
    )
    assert json.loads((unbroken / "exit.json").read_text())["step"] == 12
    assert os.stat(unbroken / "lock").st_mode & 0o777 == 0o600


@SLOW
@pytest.mark.parametrize("arm", typing.get_args(Optimizer), ids=lambda arm: arm().name)
def test_a_run_of_any_optimizer_goes_on_as_if_it_had_not_stopped(arm, config, tmp_path):
    flags = (f"--config.optim.name={arm().name}", f"--config.optim.lr={arm().lr}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(harness.words(config, whole, *flags)) == 0
    assert main(harness.words(config, cut, *flags, "--stop_at=5")) == 0
    assert main(harness.words(config, cut, *flags)) == 0
    assert is_same(cut, whole)
