"""Lines B of the reliability bar: a checkpoint is what was written, or it is no checkpoint."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from jaxlm.core.errors import DataError, SaveFailed
from jaxlm.recipes.ranks import free_port
from tests.faults import harness


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    """A run of 12 steps, and one that stopped after 8."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(harness.words(config, folder / "whole")) == 0
    assert main(harness.words(config, folder / "half", "--stop_at=8")) == 0
    assert harness.steps(folder / "half") == [4, 6, 8]
    return folder


def files_of(workdir: Path, step: int) -> list[Path]:
    """Every file of a step but Orbax's note of its own commit, which nobody reads."""
    found = [
        path
        for path in sorted((workdir / "checkpoints" / str(step)).rglob("*"))
        if path.is_file() and path.name != "commit_success.txt"
    ]
    assert len(found) >= 6
    return found


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content) * 8)
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def goes_on(config: str, workdir: Path, unbroken: Path) -> None:
    """The run ends as if nothing had happened."""
    assert main(harness.words(config, workdir)) == 0
    assert harness.losses(workdir) == harness.losses(unbroken / "whole")
    assert harness.state_digest(workdir) == harness.state_digest(unbroken / "whole")


def test_b1_one_flipped_bit_in_any_file_is_found_before_any_state_is_used(unbroken, tmp_path):
    draw, broken = random.Random(1), 0
    for path in files_of(unbroken / "half", 8):
        copy = tmp_path / str(broken)
        shutil.copytree(unbroken / "half/checkpoints", copy / "checkpoints")
        flip(copy / path.relative_to(unbroken / "half"), draw)
        said = []
        assert Store(copy / "checkpoints", CheckpointConfig()).newest_sound(said.append) == 6
        assert "checkpoint 8 is damaged" in said[0]
        if path.name != records.NAME:
            assert path.name in said[0]
        broken += 1
    assert broken == len(files_of(unbroken / "half", 8))


def test_b1_b4_the_run_falls_back_and_ends_bit_identical(config, unbroken, tmp_path, capsys):
    shutil.copytree(unbroken / "half", tmp_path / "run")
    arrays = max(files_of(tmp_path / "run", 8), key=lambda path: path.stat().st_size)
    flip(arrays, random.Random(2))
    goes_on(config, tmp_path / "run", unbroken)
    log = (tmp_path / "run/log.txt").read_text()
    assert f"checkpoint 8 is damaged ({arrays.relative_to(tmp_path / 'run/checkpoints/8')}" in log
    # The damaged step is kept, out of the way.
    assert (tmp_path / "run/quarantine/8" / records.NAME).exists()
    assert "other contents" in (tmp_path / "run/quarantine/8.reason.txt").read_text()


DAMAGE = {
    "emptied": lambda path, other: path.write_bytes(b""),
    "halved": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte short": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "removed": lambda path, other: path.unlink(),
    "its neighbour": lambda path, other: path.write_bytes(other.read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_b2_any_file_that_is_cut_removed_or_swapped_is_found(unbroken, tmp_path, damage):
    files = files_of(unbroken / "half", 8)
    for number, path in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(unbroken / "half/checkpoints", copy / "checkpoints")
        here = [copy / p.relative_to(unbroken / "half") for p in files]
        other = next(p for p in here if p.read_bytes() != here[number].read_bytes())
        damage(copy / path.relative_to(unbroken / "half"), other)
        said = []
        assert Store(copy / "checkpoints", CheckpointConfig()).newest_sound(said.append) == 6
        assert len(said) == 1


def test_b3_with_all_steps_damaged_the_run_says_so_and_never_starts_again(
    config, unbroken, tmp_path, capsys
):
    shutil.copytree(unbroken / "half", tmp_path / "run")
    for step in (4, 6, 8):
        flip(files_of(tmp_path / "run", step)[0], random.Random(step))
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    begun = time.monotonic()
    assert main(harness.words(config, tmp_path / "run")) == 65
    assert time.monotonic() - begun < 30
    said = capsys.readouterr().err
    assert all(f"step {step}: " in said for step in (4, 6, 8))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert harness.steps(tmp_path / "run") == [4, 6, 8]


def test_b5_hashing_reaches_a_gigabyte_a_second(tmp_path):
    step = tmp_path / "1"
    step.mkdir()
    for name in range(4):
        (step / str(name)).write_bytes(os.urandom(1 << 20) * 64)
    best = 0.0
    for _ in range(3):
        begun = time.process_time()
        found = records.digests(records.epath.Path(step))
        best = max(best, sum(size for size, _ in found.values()) / (time.process_time() - begun))
    # Without the processor's SHA instructions, hashlib itself is the limit: then we must cost little above it.
    begun = time.process_time()
    records.hashlib.sha256(bytes(1 << 28)).hexdigest()
    bare = (1 << 28) / (time.process_time() - begun)
    assert best >= min(1e9, 0.8 * bare)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, {bytes}))
from jaxlm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_b6_a_full_disk_is_an_error_at_the_next_step_with_the_good_step_left(
    config, unbroken, tmp_path
):
    shutil.copytree(unbroken / "half", tmp_path / "run")
    largest = max(p.stat().st_size for p in files_of(tmp_path / "run", 8))
    small = 20_000  # metrics and logs fit, the arrays do not
    assert largest > small > 2 * (tmp_path / "run/metrics.jsonl").stat().st_size
    command = [sys.executable, "-c", LIMITED.format(bytes=small)]
    done = subprocess.run(
        [*command, *harness.words(config, tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 74, done.stderr
    assert "save failed" in done.stderr
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("trying once more") == 1
    # Saves were due after steps 10 and, as the second chance, in the next step.
    assert max(r["step"] for r in harness.records(tmp_path / "run")) <= 12
    assert harness.steps(tmp_path / "run")[-1] == 8
    assert not list((tmp_path / "run/checkpoints").glob("*tmp*"))
    assert harness.exit_of(tmp_path / "run")["code"] == 74


def test_b6_the_second_try_succeeds_where_space_came_back(config, unbroken, tmp_path):
    shutil.copytree(unbroken / "half", tmp_path / "run")
    code, said = harness.run(harness.words(config, tmp_path / "run"), "save.digest:enospc@10")
    assert code == 0, said
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("trying once more") == 1
    assert harness.steps(tmp_path / "run")[-1] == 12
    assert harness.state_digest(tmp_path / "run") == harness.state_digest(unbroken / "whole")


@pytest.mark.slow
def test_d9_a_rank_that_cannot_write_its_part_keeps_the_step_from_being_committed(config, tmp_path):
    """Two processes with half of the state each; files of the second one must not grow."""
    place = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--cpu_devices=2"]
    words = harness.words(config, tmp_path / "run", "--config.mesh.data=1", "--config.mesh.fsdp=4")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", start, *words, *place, f"--process_id={rank}"],
            env=os.environ | {"XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, start in enumerate((LIMITED.format(bytes=1 << 30), LIMITED.format(bytes=10_000)))
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [74, 74], said
    assert all("save failed: a checkpoint could not be written" in text for text in said)
    assert "rank 1 has ended this run with exit code 74" in said[0]
    assert harness.steps(tmp_path / "run") == []
    assert max(r["step"] for r in harness.records(tmp_path / "run")) <= 4, "the save was of step 2"
    assert harness.exit_of(tmp_path / "run")["code"] == 74
    assert main(harness.words(config, tmp_path / "run")) == 0, (
        "from the beginning, over what is left"
    )
    assert harness.steps(tmp_path / "run")[-1] == 12


@pytest.mark.slow
def test_a_kill_after_the_last_commit_loses_nothing(config, unbroken, tmp_path, capsys):
    words = harness.words(config, tmp_path / "run")
    code, said = harness.run(words, "exit:sigkill")
    assert code == -signal.SIGKILL, said
    assert harness.losses(tmp_path / "run") == harness.losses(unbroken / "whole")
    assert harness.state_digest(tmp_path / "run") == harness.state_digest(unbroken / "whole")
    assert main(words) == 0
    assert "complete at step 12" in capsys.readouterr().out


def test_b7_a_run_that_will_not_fit_the_disk_is_refused_before_it_starts(
    config, tmp_path, capsys, monkeypatch
):
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=400_000))
    assert main(harness.words(config, tmp_path / "run")) == 73
    said = capsys.readouterr().err
    assert "391 KiB are free" in said
    assert "checkpoint.space" in said
    assert not (tmp_path / "run/metrics.jsonl").exists()
    words = harness.words(config, tmp_path / "run", "--config.checkpoint.space=ignore")
    assert main([*words, "--stop_at=2"]) == 0


def test_b8_a_place_that_cannot_be_written_is_said_at_once(config, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file/below", Path("/proc/jaxlm")):
        begun = time.monotonic()
        assert main(harness.words(config, place)) == 73
        assert time.monotonic() - begun < 5
        assert str(place) in capsys.readouterr().err


def test_b9_a_second_run_on_the_same_directory_is_turned_away(config, tmp_path, capsys):
    first = harness.start(
        harness.words(config, tmp_path / "run"), "step.before:sleep=30@3", JAXLM_TEST="b9"
    )
    try:
        while not harness.records(tmp_path / "run"):
            time.sleep(0.05)
            assert first.poll() is None
        begun = time.process_time()  # the first run computes beside it
        assert main(harness.words(config, tmp_path / "run")) == 77
        assert time.process_time() - begun < 3
        said = capsys.readouterr().err
        assert f"pid {first.pid} on {os.uname().nodename} since 20" in said
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    # B10: its death frees the lock at once.
    assert main(harness.words(config, tmp_path / "run", "--stop_at=2")) == 0


def state(value=1.0):
    return {"params": {"w": jnp.full((64, 8), value)}, "step": jnp.int32(1)}


def test_b11_a_healthy_step_and_the_ladder_outlive_saves_that_are_not_healthy(tmp_path):
    kept = CheckpointConfig(keep_last=2, keep_best=0, keep_every=4)
    store = Store(tmp_path, kept, reach=100)
    for step in range(1, 11):
        store.save(step, state(), {}, healthy=step <= 5)
    store.close()
    assert Store(tmp_path, kept, read_only=True).steps() == [4, 5, 8, 9, 10]


def test_b11_a_state_that_is_not_finite_is_never_committed(config, tmp_path, capsys):
    """An update can overflow though loss and gradient are finite: the guard cannot see that, the save can."""
    flags = (
        "--config.optim.lr=3e38",
        "--config.optim.weight_decay=1000",
        "--config.schedule.warmup=0",
    )
    words = harness.words(config, tmp_path / "run", *flags, "--config.guard.rewinds=0")
    assert main([*words, "--config.checkpoint.every=1"]) == 79
    assert "not finite" in capsys.readouterr().err
    for step in harness.steps(tmp_path / "run"):
        arrays = harness.store(tmp_path / "run").arrays(step)
        assert all(jnp.isfinite(leaf).all() for leaf in arrays.values())


def test_b12_each_due_save_is_committed_or_an_error(tmp_path):
    store = Store(tmp_path, CheckpointConfig(keep_last=9))
    for step in (5, 7, 3):
        store.save(step, state(step), {})
    store.wait()
    assert store.steps() == [3, 5, 7], "also a step before the newest, as after a rewind"
    with pytest.raises(SaveFailed):
        store.save(7, state(), {})
    store.release()


def test_b13_a_step_without_its_record_is_no_checkpoint(config, unbroken, tmp_path):
    shutil.copytree(unbroken / "half", tmp_path / "run")
    (tmp_path / "run/checkpoints/8" / records.NAME).unlink()
    goes_on(config, tmp_path / "run", unbroken)
    assert (tmp_path / "run/quarantine/8").is_dir()


@pytest.mark.parametrize("version", [2, 99])
def test_b17_a_newer_format_is_refused_with_both_versions(
    config, unbroken, tmp_path, capsys, version
):
    shutil.copytree(unbroken / "half", tmp_path / "run")
    path = tmp_path / "run/checkpoints/8" / records.NAME
    path.write_text(path.read_text().replace('"format_version": 1', f'"format_version": {version}'))
    assert main(harness.words(config, tmp_path / "run")) == 65
    said = capsys.readouterr().err
    assert f"format {version}" in said
    assert "format 1" in said
    assert harness.steps(tmp_path / "run") == [4, 6, 8]


def test_a_record_says_what_the_step_holds(unbroken):
    record = records.read(records.epath.Path(unbroken / "half/checkpoints/8"))
    assert record.step == record.meta["step"] == 8
    assert record.healthy
    assert record.meta["data"] == harness.store(unbroken / "whole").record(12).meta["data"]
    assert len(record.owner) == 32
    body = json.loads((unbroken / "half/checkpoints/8" / records.NAME).read_text())
    assert list(body)[-1] == "self"
    assert set(record.files) == {
        str(p.relative_to(unbroken / "half/checkpoints/8"))
        for p in files_of(unbroken / "half", 8)
        if p.name != records.NAME
    }


def test_a_process_that_lost_its_lock_commits_nothing(tmp_path):
    store = Store(tmp_path, CheckpointConfig(), is_owner=lambda: False)
    store.save(1, state(), {})
    with pytest.raises(SaveFailed, match="could not be written") as caught:
        store.wait()
    assert "taken this run over" in caught.value.why
    assert store.steps() == []
    store.release()


def test_a_reader_of_a_damaged_step_is_told(unbroken, tmp_path, capsys):
    shutil.copytree(unbroken / "half", tmp_path / "run")
    flip(files_of(tmp_path / "run", 8)[0], random.Random(0))
    words = ["eval", f"--workdir={tmp_path / 'run'}", "--json"]
    assert main([*words, "--step=8"]) == 65
    assert "checkpoint 8 is damaged" in capsys.readouterr().err
    assert main(words) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["step"] == 6
    assert "checkpoint 8 is damaged" in told.err
    assert harness.steps(tmp_path / "run") == [4, 6, 8], "a reader moves nothing"


MESHES = {
    "one device": {"data": 1},
    "fsdp and tensor": {"data": 1, "fsdp": 2, "tensor": 2},
    "eight by fsdp": {"data": 1, "fsdp": 8},
    "two devices": {"data": 2},
    "tensor": {"data": 2, "tensor": 2},
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [*list(MESHES)[:2], *(pytest.param(name, marks=SLOW) for name in list(MESHES)[2:])]
)
def test_b14_a_checkpoint_moves_between_meshes_bit_for_bit(config, unbroken, tmp_path, name):
    """Saved on eight data-parallel devices."""
    shutil.copytree(unbroken / "half", tmp_path / "run")
    mesh = MESHES[name]
    flags = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={math.prod(mesh.values())}"}
    words = harness.words(config, tmp_path / "run", *flags, "--config.checkpoint.keep_last=9")
    code, said = harness.run(words, **env)
    assert code == 0, said
    reference = harness.state_digest(unbroken / "half", 8)
    assert harness.state_digest(tmp_path / "run", 8) == reference
    ours, theirs = harness.losses(tmp_path / "run"), harness.losses(unbroken / "whole")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 13
    for key, value in ours.items():
        want = float.fromhex(theirs[key])
        assert abs(float.fromhex(value) - want) <= 1e-6 * want, key


def test_a_step_of_the_wrong_layout_is_refused(tmp_path):
    store = Store(tmp_path, CheckpointConfig())
    store.save(1, state(), {})
    store.wait()
    with pytest.raises(DataError, match="does not match"):
        store.restore(1, {"params": jax.ShapeDtypeStruct((3,), jnp.float32)})
    store.close()


@pytest.mark.slow
@pytest.mark.alone
def test_b5_digests_are_a_small_part_of_a_save_and_off_the_steps_thread(tmp_path, monkeypatch):
    seen = []
    digests = records.digests

    def timed(directory):
        begun = time.monotonic()
        found = digests(directory)
        seen.append((time.monotonic() - begun, threading.current_thread() is main_thread))
        return found

    main_thread = threading.current_thread()
    monkeypatch.setattr(records, "digests", timed)
    draw = jax.random.normal(jax.random.key(0), (64, 1 << 20))  # 256 MiB that does not compress
    store = Store(tmp_path, CheckpointConfig())
    shares = []
    for step in (1, 2, 3):
        begun = time.monotonic()
        store.save(step, {"params": {"w": draw}}, {})
        store.wait()
        shares.append(seen[-1][0] / (time.monotonic() - begun))
    store.close()
    assert not any(on_main for _, on_main in seen)
    assert min(shares) <= 0.10, shares  # the faster the disk, the larger the share
