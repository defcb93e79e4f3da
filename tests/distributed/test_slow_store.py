"""Two processes whose checkpoints are on a slow disk: hashed files, phases and limits."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxlm.checkpoint.store import PARTIAL_SUFFIXES
from jaxlm.training.launch import free_port
from tests.faults import harness

SLOW = "store.read:slow=20000000"  # bytes a second of each thread
SAVE_SECONDS = 1234
FLAGS = (
    *("--config.train.steps=16", "--config.mesh.data=1", "--config.mesh.fsdp=4"),
    *("--config.checkpoint.every=2", "--config.checkpoint.keep_last=9"),
    *("--config.guard.budget=2", "--config.guard.rewind_steps=4", "--config.guard.skip=4"),
    "--config.model.dropout=0",
    "--config.model.kv_heads=4",
)


pytestmark = pytest.mark.slow


class Life(NamedTuple):
    """Ends of the processes of one start, and the events of each, in order."""

    codes: list[int]
    output: str
    events: list[list[dict]]

    def reads(self, rank: int, step: str) -> list[dict]:
        """The files of a step's folder that a process hashed."""
        return [e for e in self.events[rank] if e["event"] == "read" and e["step"] == step]

    def steps(self) -> set[str]:
        """The folders of steps with a file that any process hashed."""
        return {e["step"] for events in self.events for e in events if e["event"] == "read"}


def live(config: str, folder: Path, name: str, *flags: str, faults: str = SLOW) -> Life:
    """Starts the two processes of a run in `folder`, and waits for their end.

    Gloo gives up after 30 s of waiting for a rank that a busy machine keeps compiling: then once
    more, under another name.
    """
    life = _live(config, folder, name, *flags, faults=faults)
    if "Gloo context initialization failed: DEADLINE_EXCEEDED" in life.output:
        if name == "first":
            shutil.rmtree(folder / "run", ignore_errors=True)
        life = _live(config, folder, f"{name}-again", *flags, faults=faults)
    return life


def _live(config: str, folder: Path, name: str, *flags: str, faults: str) -> Life:
    address = f"127.0.0.1:{free_port()}"
    logs = [folder / f"{name}.{rank}.jsonl" for rank in range(2)]
    command = [*harness.words(config, folder / "run"), *FLAGS, *flags, "--cpu_devices=2"]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.distributed.reader",
                *command,
                f"--coordinator={address}",
                "--num_processes=2",
                f"--process_id={rank}",
            ],
            env=os.environ
            | {"XLA_FLAGS": harness.FLAGS, "READER_LOG": str(log), "JAXLM_FAULTS": faults}
            | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, log in enumerate(logs)
    ]
    output = "\n".join(harness.outputs_of(ranks))
    events = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    return Life([rank.returncode for rank in ranks], output, events)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def lives(config, tmp_path_factory):
    """A run that has to go back once and stops; and its second start."""
    folder = tmp_path_factory.mktemp("slow")
    save = f"--config.watch.save={SAVE_SECONDS}s"
    first = live(config, folder, "first", save, "--stop_at=12", faults=f"{SLOW},batch:nan@9-11")
    assert first.codes == [0, 0], first.output
    second = live(config, folder, "second", save, "--stop_at=14")
    assert second.codes == [0, 0], second.output
    return folder / "run", first, second


def files(run: Path, step: int | str) -> dict[str, int]:
    """The files of a step by its record, and their bytes; of one that was given up, too."""
    places = [run / "checkpoints", run / "quarantine"]
    (place,) = [place / str(step) for place in places if (place / str(step)).is_dir()]
    record = json.loads((place / "digests.json").read_text())
    return {path: size for path, (size, _) in record["files"].items()}


def divided(life: Life, step: str) -> list[dict[str, int]]:
    """Files of a step's folder that each process hashed, no file twice."""
    parts = [life.reads(rank, step) for rank in range(2)]
    counts = Counter(read["path"] for part in parts for read in part)
    assert set(counts.values()) == {1}, counts
    return [{read["path"]: read["bytes"] for read in part} for part in parts]


def test_each_process_hashes_the_files_that_it_wrote_and_no_file_is_left_out(lives):
    run, *both = lives
    twice = {path.name for path in (run / "quarantine").iterdir() if path.is_dir()}
    saved = [
        (life, step)
        for life in both
        for step in life.steps()
        if step.endswith(PARTIAL_SUFFIXES[0])
        and step.removesuffix(PARTIAL_SUFFIXES[0]) not in twice
    ]
    assert len(saved) >= 4
    for life, step in saved:
        zero, one = divided(life, step)
        assert zero | one == files(run, step.removesuffix(PARTIAL_SUFFIXES[0])), step
        assert {path.partition("/")[0] for path in one} == {"ocdbt.process_1", "array_metadatas"}
        assert not any("process_1" in path for path in zero)
        assert sum(one.values()) > sum(zero.values()) / 4, "fsdp splits the arrays between the two"


def test_the_limit_of_a_save_is_the_one_that_orbax_gets(lives):
    _, *both = lives
    for life in both:
        for events in life.events:
            assert [e["seconds"] for e in events if e["event"] == "store"] == [SAVE_SECONDS]


def test_a_resume_verifies_the_newest_step_by_halves_in_a_phase_of_its_own(lives):
    run, _, second = lives
    (step,) = [step for step in second.steps() if step.isdigit()]
    assert step == "12"
    parts = divided(second, step)
    assert parts[0] | parts[1] == files(run, step)
    total = sum(files(run, step).values())
    assert all(sum(part.values()) > total / 4 for part in parts)
    written = [{path for path in part if path.startswith("ocdbt.process_")} for part in parts]
    assert all(path.startswith("ocdbt.process_1/") for path in written[1])
    for rank in range(2):
        assert {read["phase"] for read in second.reads(rank, step)} == {"verify"}


def test_a_rewind_verifies_the_step_that_it_goes_back_to_and_no_other(lives):
    run, first, _ = lives
    (made,) = json.loads((run / "rewinds.json").read_text())
    assert made["to"] > 0
    healthy = list(range(2, made["first_bad"], 2))
    assert len(healthy) > 2, "there were others to choose from"
    verified = [step for step in first.steps() if step.isdigit()]
    assert verified == [str(made["to"])]
    parts = divided(first, verified[0])
    assert parts[0] | parts[1] == files(run, verified[0])
    for rank in range(2):
        assert {read["phase"] for read in first.reads(rank, verified[0])} == {"verify"}


def test_a_disk_that_stands_still_ends_a_verification_on_both_and_not_one_that_is_slow(
    lives, config, tmp_path
):
    """Its limit counts from the last byte that any process has read."""
    run, *_ = lives
    (tmp_path / "run").symlink_to(run)
    limit = "--config.watch.verify=3s"
    hangs = live(config, tmp_path, "hangs", limit, faults="store.read:hang#1")
    assert hangs.codes == [76, 76], hangs.output
    assert "nothing has moved in 'verify' for" in hangs.output
    assert "its limit is 3 s" in hangs.output
    largest = max(size for path, size in files(run, 14).items() if "process_1" in path)
    slow = live(config, tmp_path, "slow", limit, faults=f"store.read:slow={largest // 8}#1")
    assert slow.codes == [0, 0], slow.output
    assert harness.steps(run)[-1] == 16


@pytest.mark.parametrize(("fault", "codes"), [("raise", {74}), ("sigkill", {-9, 69, -6})])
def test_a_step_that_a_process_did_not_hash_is_not_committed(config, tmp_path, fault, codes):
    failed = live(config, tmp_path, "first", faults=f"store.read:{fault}#1")
    assert set(failed.codes) <= codes, failed.output
    assert harness.steps(tmp_path / "run") == []
    second = live(config, tmp_path, "again", "--stop_at=2", faults="")
    assert second.codes == [0, 0], second.output
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["2"]
