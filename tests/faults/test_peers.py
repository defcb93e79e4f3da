"""Two processes on this machine, and the end of one when the other is lost, fails or stalls.

The ranks are tests/distributed/worker.py, with the process group of the trainer and none of its
weight; the last tests train.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from jaxlm.training.launch import WorkerFailure, WorkerGroup, free_port
from tests import machine
from tests.distributed.processes import is_mapped, running
from tests.faults import harness

ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "tests.distributed.worker"]


@dataclasses.dataclass
class Outcome:
    """Ends of two ranks."""

    failure: WorkerFailure | None
    codes: list[int]
    lines: list[tuple[float, str]]  # with the time at which each came
    pids: list[int]
    ended: float

    def output(self, rank: int) -> str:
        return "\n".join(line[4:] for _, line in self.lines if line.startswith(f"[{rank}] "))

    def since(self, text: str) -> float:
        """Seconds from the last line that holds this to the end of all."""
        return self.ended - max(at for at, line in self.lines if text in line)

    def has_no_orphans(self) -> bool:
        return not any(running(pid) for pid in self.pids)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Runs two workers until both have ended; `during` is called with the ranks and each line."""
    jax.devices()  # of this process: as many as its flags set, while it still has any
    monkeypatch.setenv("XLA_FLAGS", harness.FLAGS)

    def run(*words, faults="", during=lambda ranks, line: None, **options):
        monkeypatch.setenv("JAXLM_FAULTS", faults)
        lines = []

        def say(line):
            lines.append((time.monotonic(), line))
            during(ranks, line)

        command = [*WORKER, f"--workdir={tmp_path}", *words]
        ranks = WorkerGroup(command, 2, log=say, **options)
        with ranks:
            failure = ranks.wait()
            ended = time.monotonic()
        codes = [process.returncode for process in ranks.processes]
        pids = [process.pid for process in ranks.processes]
        return Outcome(failure, codes, lines, pids, ended)

    return run


def exit_of(folder):
    return json.loads((folder / "exit.json").read_text())


def test_d1_a_lost_rank_takes_the_other_along(pair, record_property):
    done = pair(
        "--steps=500", "--watch=heartbeat=4s", faults="step.before:sigkill@8#1", grace_seconds=30
    )
    assert done.since("[1] step 8") <= 4 + 2
    record_property("D1", f"{done.since('[1] step 8'):.1f} s, heartbeat 4")
    assert (done.failure.rank, done.failure.code) == (1, 69)
    assert done.codes[1] == -signal.SIGKILL
    assert done.codes[0] in (69, -signal.SIGABRT)
    assert done.has_no_orphans()


def test_d2_without_its_coordinator_a_rank_ends(pair, record_property):
    done = pair("--steps=500", faults="step.before:sigkill@8#0", grace_seconds=30)
    assert done.since("[0] step 8") <= 5
    record_property("D2", f"{done.since('[0] step 8'):.1f} s")
    assert (done.failure.rank, done.failure.code) == (0, 69)
    assert done.codes[0] == -signal.SIGKILL
    assert done.codes[1] in (69, -signal.SIGABRT)
    assert done.has_no_orphans()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("point", "rank"),
    [("data.next", 1), ("step.before", 1), ("step.before", 0), ("eval", 1), ("save.begin", 1)],
)
def test_d3_an_error_of_one_rank_ends_both_and_both_tell_it(
    pair, tmp_path, point, rank, record_property
):
    done = pair("--steps=500", faults=f"{point}:raise@8#{rank}", grace_seconds=30)
    assert done.codes == [70, 70]
    assert (done.failure.rank, done.failure.code) == (rank, 70)
    assert done.since(f"[{rank}] step 8") <= 3
    record_property("D3", f"{point} {done.since(f'[{rank}] step 8'):.1f} s")
    for each in (0, 1):
        assert "in _strike" in done.output(each), "the traceback"
        assert f"RuntimeError: injected fault at {point}" in done.output(each)
    assert f"rank {rank} has ended this run with exit code 70" in done.output(1 - rank)
    assert exit_of(tmp_path)["code"] == 70
    assert point in exit_of(tmp_path)["cause"]


SHORT = "--watch=step=3s,compile=3s,start=20s"


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["in Python", "in a callback of the device"])
def test_d4_a_stuck_rank_ends_both_with_the_stacks_of_both(pair, tmp_path, where, record_property):
    faults = "step.before:hang@8#1" if where == "in Python" else ""
    words = [] if faults else ["--callback_hang=1:8"]
    done = pair("--steps=500", SHORT, *words, faults=faults, grace_seconds=30)
    assert done.codes == [76, 76]
    assert done.failure.code == 76
    assert 3 <= done.since("[1] step 8") <= 3 + 3
    record_property("D4", f"{where} {done.since('[1] step 8'):.1f} s, limit 3")
    for rank in (0, 1):
        assert "in work" in (tmp_path / f"stacks.{rank}.txt").read_text()
        assert "nothing has moved in 'step'" in done.output(rank)
    stuck = (tmp_path / "stacks.1.txt").read_text()
    assert ("in _strike" if faults else "in hang") in stuck, "it shows where"
    assert exit_of(tmp_path)["code"] == 76


@pytest.mark.slow
def test_d4_a_stopped_rank_ends_both(pair, tmp_path, record_property):
    sent = []

    def stop(ranks, line):
        if line == "[1] step 80":  # long enough not to be taken for its start
            ranks.processes[1].send_signal(signal.SIGSTOP)
            sent.append(time.monotonic())

    done = pair("--steps=5000", SHORT, during=stop, grace_seconds=30)
    assert done.codes == [76, 76]
    assert (done.failure.rank, done.failure.code) == (0, 76), "the one that noticed"
    assert done.ended - sent[0] <= 3 + 3
    record_property("D4", f"SIGSTOP {done.ended - sent[0]:.1f} s")
    for rank in (0, 1):
        assert "in work" in (tmp_path / f"stacks.{rank}.txt").read_text()


def test_d4_a_rank_whose_python_does_not_run_is_ended_from_outside(pair):
    done = pair("--steps=500", "--gil_hang=1:8", silence_seconds=8)
    assert (done.failure.rank, done.failure.code) == (1, 76)
    assert done.since("[1] step 8") <= 8 + 3 + 5
    assert "worker.py" in done.output(1), "its stacks"
    assert done.has_no_orphans()


@pytest.mark.slow
def test_d5_slow_is_not_stuck(pair, record_property):
    slow = (
        "step.before:sleep=0.6@8#1,eval:sleep=1.6@8#0,save.begin:sleep=1.6@8#1,"
        "data.next:sleep=1.6@9#1"
    )
    limits = "--watch=step=1s,factor=2,compile=20s,eval=3s,save=3s,data=3s"
    done = pair("--steps=12", "--pace=0.2", limits, faults=slow)
    assert done.failure is None, done.lines
    assert done.codes == [0, 0]
    assert done.output(1).count("step ") == 12
    record_property("D5", "0 alarms in 4 phases")


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_d6_a_peer_that_never_comes_is_named(tmp_path, rank, record_property):
    begun = time.monotonic()
    words = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", f"--process_id={rank}"]
    done = subprocess.run(
        [*WORKER, f"--workdir={tmp_path}", "--watch=join=2s", *words],
        capture_output=True,
        text=True,
    )
    took = time.monotonic() - begun
    machine.require_clock(took, 2 + 10)
    record_property("D6", f"rank {1 - rank} absent {took:.1f} s, limit 2")
    assert done.returncode == 69
    assert f"present: {rank}; absent: {1 - rank}" in done.stderr


def test_d7_ranks_that_differ_refuse_before_they_compute(pair, record_property):
    done = pair("--fact=RANK")
    assert done.codes == [2, 2]
    assert done.failure.code == 2
    for rank in (0, 1):
        assert "fact: 0 on rank 0, 1 on rank 1" in done.output(rank)
        assert "step 1" not in done.output(rank)
    took = done.ended - done.lines[0][0]
    machine.require_clock(took, 10)
    record_property("D7", f"{took:.1f} s")


@pytest.mark.slow
def test_d8_a_rank_may_finish_before_the_other(pair, record_property):
    done = pair("--late=1:2")
    assert (done.failure, done.codes) == (None, [0, 0])
    before = done.since("[0] total 40.0")
    assert before >= 2
    record_property("D8", f"{before:.1f} s before the other")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_d8_a_rank_may_finish_ten_seconds_before_the_other(pair, rank):
    done = pair(f"--late={1 - rank}:10")
    assert (done.failure, done.codes) == (None, [0, 0])
    assert done.since(f"[{rank}] total 40.0") >= 10


@pytest.mark.slow
def test_d11_thirty_starts_in_ten_minutes_leave_nothing_behind(pair, record_property):
    shared = set(os.listdir("/dev/shm"))
    begun, ended = time.monotonic(), collections.Counter()
    for number in range(30):
        fault = ("raise", "sigkill", "sigterm")[number % 3]
        faults = f"step.before:{fault}@2#{number % 2}"
        done = pair("--steps=1000", faults=faults, grace_seconds=2)
        assert done.failure.code == {"raise": 70, "sigkill": 69, "sigterm": 75}[fault], done.lines
        ended[done.failure.code] += 1
        assert done.has_no_orphans()
    assert ended == {70: 10, 69: 10, 75: 10}
    took = time.monotonic() - begun
    machine.require_clock(took, 600)
    record_property("D11", f"30 starts in {took:.0f} s")
    left = set(os.listdir("/dev/shm")) - shared
    assert not [name for name in left if not is_mapped(f"/dev/shm/{name}")]


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a8_a_signal_to_one_rank_stops_both_after_the_same_step_which_they_save(
    pair, tmp_path, rank, record_property
):
    sent = []

    def stop(ranks, line):
        if line == f"[{rank}] step 8":
            ranks.processes[rank].send_signal(signal.SIGTERM)
            sent.append(time.monotonic())

    done = pair("--steps=5000", "--save", during=stop)
    assert done.codes == [75, 75], done.lines
    machine.require_clock(done.ended - sent[0], 10)
    record_property("A8", f"{done.ended - sent[0]:.1f} s")
    stops = [re.search(r"stopped after (\d+), total (\S+)", done.output(each)) for each in (0, 1)]
    assert stops[0].groups() == stops[1].groups()
    step, total = int(stops[0][1]), float(stops[0][2])
    assert step >= 8
    assert harness.steps(tmp_path) == [step]
    assert harness.store(tmp_path).latest_valid() == step
    assert harness.store(tmp_path).record(step).meta == {"step": step}
    assert harness.store(tmp_path).arrays(step)["total"] == total == 4 * step


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("busy", ["in Python", "in the device"])
def test_a9_the_second_signal_ends_at_once(tmp_path, number, code, busy):
    words = ["--callback_hang=0:3"] if busy == "in the device" else ["--pace=3600"]
    with subprocess.Popen(
        [*WORKER, f"--workdir={tmp_path}", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        while process.stdout.readline().strip() != (
            "step 3" if "callback" in words[0] else "step 1"
        ):
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None, "the first is a request"
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == code
        machine.require_clock(time.monotonic() - begun, 2)
    left = exit_of(tmp_path)
    assert (left["code"], left["cause"]) == (code, f"{number.name} came twice")


@pytest.mark.slow
def test_a9_the_second_signal_to_one_rank_ends_both(pair):
    def stop(ranks, line):
        if line == "[1] step 8":
            ranks.processes[1].send_signal(signal.SIGTERM)
            time.sleep(0.5)
            ranks.processes[1].send_signal(signal.SIGTERM)

    done = pair("--steps=500", faults="step.before:hang@8#0", during=stop, grace_seconds=30)
    assert done.codes == [75, 75]
    assert done.since("[1] step 8") <= 0.5 + 2
    assert done.output(0).count("step ") == 8, "it hung"


def listening(pid):
    """The addresses at which a process listens."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1])
    return addresses


def test_s10_the_coordinator_listens_where_it_was_told(pair):
    addresses = []

    def look(ranks, line):
        if line == "[0] step 3":
            addresses.extend(listening(process.pid) for process in ranks.processes)

    done = pair("--steps=30", during=look)
    assert done.codes == [0, 0]
    assert addresses[0], "the coordinator listens"
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:")
    assert all(address.startswith(loopback) for each in addresses for address in each), addresses
    assert "warning" not in done.output(0)


@pytest.mark.slow
def test_s10_another_address_than_loopback_is_warned_of(tmp_path):
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    host = addresses[0] if addresses else "0.0.0.0"
    words = [f"--coordinator={host}:{free_port()}", "--num_processes=1", "--process_id=0"]
    done = subprocess.run(
        [*WORKER, f"--workdir={tmp_path}", "--steps=1", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"warning: the coordinator listens on {host}" in done.stderr


@pytest.fixture(scope="module")
def front_door(tmp_path_factory):
    """A tiny run's config, and `jaxlm launch` of it with two processes of two devices."""
    config = harness.write_config(tmp_path_factory.mktemp("texts"))

    def launch(workdir, *flags, faults="", during=None, restarts=0):
        words = [f"--restarts={restarts}", "--pause=0.1", "--cpu_devices=2", "--json"]
        command = ["launch", "--processes=2", *words, "--", *harness.words(config, workdir, *flags)]
        process = harness.start(command, faults, XLA_FLAGS=harness.FLAGS)
        if during:
            during(process)
        output, _ = process.communicate(timeout=300)
        (answer,) = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
        assert process.returncode == answer.get("code", answer.get("error", {}).get("code"))
        return answer, output

    launch.config = config
    return launch


@pytest.mark.slow
def test_b15_two_processes_train_as_one_does(front_door, tmp_path):
    answer, output = front_door(tmp_path / "two")
    assert answer == {"code": 0, "started": 1}, output
    one = tmp_path / "one"
    command = harness.words(front_door.config, one, "--cpu_devices=4")
    assert harness.run(command, XLA_FLAGS=harness.FLAGS)[0] == 0
    ours, theirs = harness.losses(tmp_path / "two"), harness.losses(one)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 13
    for key, loss in ours.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(theirs[key]), rel=1e-6)
    assert harness.steps(tmp_path / "two") == harness.steps(one)


class Recorded(NamedTuple):
    """Rows that the processes of a life read, and steps that they restored."""

    rows: dict[tuple[int, int], str]  # a row of a step's batch -> its digest
    states: list[dict[str, str]]  # of each process: a leaf of the state -> its digest


def recorded(processes: int, command: list[str], log: Path) -> Recorded:
    """A life of a run on four devices in all, which finishes."""
    place = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    ranks = [
        harness.start(
            [
                *(*command, f"--cpu_devices={4 // processes}"),
                *([*place, f"--process_id={rank}"] if processes > 1 else []),
            ],
            module="tests.distributed.trainer",
            XLA_FLAGS=harness.FLAGS,
            TRAINER_LOG=f"{log}.{rank}.jsonl",
        )
        for rank in range(processes)
    ]
    output = harness.outputs_of(ranks)
    assert [process.returncode for process in ranks] == [0] * processes, output
    rows = {
        (line["step"], row): digest
        for file in log.parent.glob(f"{log.name}.*.jsonl")
        for line in map(json.loads, file.read_text().splitlines())
        for row, digest in enumerate(line["rows"], line["first"])
    }
    states = [json.loads(file.read_text()) for file in log.parent.glob(f"{log.name}.*.state")]
    return Recorded(rows, states)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_b15_a_checkpoint_moves_between_one_process_and_two(
    front_door, tmp_path, before, after, record_property
):
    """With fsdp, so that each process has a part.

    The following steps are compared with those of the same run with the processes that saved it.
    """
    flags = ("--config.train.steps=28", "--config.mesh.data=2", "--config.mesh.fsdp=2")
    stayed, moved = tmp_path / "stayed", tmp_path / "moved"
    recorded(
        before,
        [*harness.words(front_door.config, stayed, *flags), "--stop_at=8"],
        tmp_path / "first",
    )
    shutil.copytree(stayed, moved)
    saved = {
        path: hashlib.sha256(leaf.tobytes()).hexdigest()
        for path, leaf in harness.store(stayed).arrays(8).items()
    }
    lives = [
        recorded(count, harness.words(front_door.config, run, *flags), tmp_path / name)
        for count, run, name in ((before, stayed, "stay"), (after, moved, "move"))
    ]
    assert lives[1].states == [saved] * after
    expected = {(step, row) for step in range(8, 28) for row in range(8)}
    ours, theirs = ({key: life.rows[key] for key in expected} for life in lives)
    assert ours == theirs, "the same data in the same order"
    losses, known = harness.losses(moved), harness.losses(stayed)
    assert losses.keys() == known.keys()
    assert len(losses) == 29
    pairs = [(float.fromhex(loss), float.fromhex(known[key])) for key, loss in losses.items()]
    far = max(abs(a / b - 1) for a, b in pairs)
    record_property("B15", f"{before} to {after} {far:.1e}")
    assert far <= 1e-6


@pytest.mark.slow
def test_a8_a_preempted_pair_saves_one_step_and_goes_on(front_door, tmp_path):
    answer, output = front_door(tmp_path, faults="step.before:sigterm@5#1")
    assert (answer["code"], answer["started"]) == (75, 1), output
    left = harness.exit_of(tmp_path)
    assert left["code"] == 75
    assert left["step"] == harness.steps(tmp_path)[-1] >= 5
    assert left["step"] < 12
    assert output.count(f"stopped by SIGTERM after step {left['step']}, which is saved") >= 2
    assert front_door(tmp_path)[0]["code"] == 0
    assert harness.steps(tmp_path)[-1] == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("data.next:raise@5#1", 70),
        ("eval:raise@12#1", 70),
        ("save.begin:raise@6#1", 70),
        ("save.digest:raise@6#0", 74),
    ],
)
def test_d3_d9_an_error_of_one_rank_commits_nothing_more(front_door, tmp_path, fault, code):
    answer, output = front_door(tmp_path, faults=fault)
    assert answer["code"] == code, output
    assert answer["rank"] == int(fault[-1])
    assert harness.exit_of(tmp_path)["code"] == code
    point, _, step = fault.partition(":raise@")
    assert all(each < int(step[:-2]) for each in harness.steps(tmp_path))
    assert output.count(f"injected fault at {point}") >= 2, "on both ranks"


@pytest.mark.slow
def test_d1_a_killed_rank_is_started_again_and_no_bit_changes(front_door, tmp_path):
    assert front_door(tmp_path / "unbroken")[0]["code"] == 0
    killed = tmp_path / "killed"
    answer, output = front_door(killed, faults="step.before:sigkill@7-7#1", restarts=1)
    assert answer["code"] == 69, output
    assert (answer["started"], answer["rank"]) == (2, 1), "killed in each of its two lives"
    assert harness.exit_of(killed)["code"] == 69
    answer, output = front_door(killed, restarts=1)
    assert answer["code"] == 0, output
    assert harness.losses(killed) == harness.losses(tmp_path / "unbroken")
    assert harness.state_digest(killed) == harness.state_digest(tmp_path / "unbroken")


@pytest.mark.slow
def test_a12_a_run_that_dies_at_one_step_again_and_again_is_given_up(front_door, tmp_path):
    """From a checkpoint that exists before: one made on the way would be progress."""
    assert front_door(tmp_path, "--stop_at=2")[0]["code"] == 0
    seldom = "--config.checkpoint.every=100%"
    answer, output = front_door(tmp_path, seldom, faults="step.before:sigkill@4#0", restarts=9)
    assert answer["error"]["code"] == 70
    assert answer["error"]["what"] == "the run ended 3 times in a row without a step past 2"
    assert "SIGKILL" in answer["error"]["why"]
    assert output.count("starting again in") == 2, "no fourth try"
    assert harness.steps(tmp_path) == [2]
    left = harness.exit_of(tmp_path)
    assert (left["code"], left["step"]) == (70, 2), "not how the first start ended"
    assert "3 times in a row" in left["cause"]


@pytest.mark.slow
def test_d4_a_stuck_rank_of_a_run_ends_both_with_the_stacks_of_both(front_door, tmp_path):
    answer, output = front_door(tmp_path, "--config.watch.step=3s", faults="step.before:hang@7#1")
    assert answer["code"] == 76, output
    left = harness.exit_of(tmp_path)
    assert left["code"] == 76
    last = max(record["time_unix"] for record in harness.records(tmp_path))
    machine.require_clock(left["time_unix"] - last, 3 + 3)
    for rank in (0, 1):
        assert "training.py" in (tmp_path / f"stacks.{rank}.txt").read_text()


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_d6_a_run_whose_peer_never_comes_ends_with_69_and_says_who_is_there(
    front_door, tmp_path, rank
):
    words = harness.words(front_door.config, tmp_path / "run", "--config.watch.join=2s")
    place = (f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", f"--process_id={rank}")
    with harness.timing() as took:
        code, output = harness.run([*words, *place, "--cpu_devices=1"])
    assert code == 69, output
    assert f"present: {rank}; absent: {1 - rank}" in output
    took.require(2 + 10)


@pytest.mark.slow
def test_d2_a_killed_coordinator_of_a_run_ends_the_other_rank_with_69(front_door, tmp_path):
    faults = "step.before:sigkill@7#0"
    answer, output = front_door(tmp_path, faults=faults, restarts=0)
    assert (answer["code"], answer["rank"]) == (69, 0), output
    assert "SIGKILL" in answer["cause"]
    left = harness.exit_of(tmp_path)
    assert (left["code"], left["step"]) == (69, harness.steps(tmp_path)[-1])


@pytest.mark.few(1)
@pytest.mark.parametrize("difference", ["config and code", "data"])
def test_d7_ranks_that_differ_refuse_and_show_the_difference(front_door, tmp_path, difference):
    """Ten seconds count from their start; an overloaded machine may take longer."""
    places = [tmp_path / "0", tmp_path / "1"]
    for place in places:
        shutil.copytree(Path(front_door.config).parent, place / "texts")
    code, rates = [ROOT, ROOT], ["0.001", "0.001"]
    if difference == "data":
        (places[1] / "texts/000.txt").write_text("something else")
    else:
        rates[1], code[1] = "0.002", places[1]
        shutil.copytree(ROOT / "jaxlm", places[1] / "jaxlm")
        with open(places[1] / "jaxlm/core/tree.py", "a") as file:
            file.write("# another\n")
    run = tmp_path / "run"
    words = harness.words(front_door.config, run, "--config.data.train=texts/*.txt")
    words += [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--cpu_devices=1"]
    begun = time.monotonic()
    pair = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxlm", *words, f"--process_id={rank}"),
                f"--config.optim.lr={rates[rank]}",
            ],
            cwd=places[rank],
            env=os.environ | {"XLA_FLAGS": harness.FLAGS, "PYTHONPATH": str(code[rank])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    shown = {
        "config and code": ("optim.lr: 0.001 on rank 0, 0.002 on rank 1", "code of jaxlm/core: "),
        "data": ("train: ",),
    }[difference]
    output = harness.outputs_of(pair, 120)
    assert [process.returncode for process in pair] == [2, 2], "\n".join(output)
    for each in output:
        for line in shown:
            assert line in each
            assert " on rank 0, " in each.partition(line)[2].partition("\n")[0] + line
    machine.require_clock(time.monotonic() - begun, 10)
    assert harness.steps(run) == []
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("refused", [0, 1])
def test_d7_a_rank_whose_own_command_is_wrong_is_told_to_the_other(front_door, tmp_path, refused):
    """It is refused before they meet: the other would wait for it for minutes."""
    words = harness.words(front_door.config, tmp_path / "run")
    words += [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--cpu_devices=1"]
    wrong = "--config.optim.lrr=1"
    with harness.timing() as took:
        pair = [
            harness.start([*words, f"--process_id={rank}", *([wrong] if rank == refused else [])])
            for rank in (0, 1)
        ]
        output = harness.outputs_of(pair, 120)
    assert [process.returncode for process in pair] == [2, 2], "\n".join(output)
    assert "fix    --config.optim.lr=" in output[refused]
    assert f"rank {refused} was refused: " in output[1 - refused]
    assert "optim.lrr" in output[1 - refused].partition("was refused")[2]
    took.require(10)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_whose_launcher_is_gone_stop_and_save(front_door, tmp_path):
    ranks = []

    def kill(process):
        while not (tmp_path / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        ranks.extend(map(int, children.split()))
        process.kill()
        process.communicate()

    command = ["launch", "--processes=2", "--cpu_devices=2", "--"]
    command += harness.words(front_door.config, tmp_path, "--config.train.steps=100000")
    command += ["--config.log.every=1", "--config.checkpoint.every=50%", "--config.eval.every=100%"]
    temporary = tmp_path / "temporary"  # what a killed launcher leaves there
    temporary.mkdir()
    kill(harness.start(command, XLA_FLAGS=harness.FLAGS, TMPDIR=str(temporary)))
    assert len(ranks) == 2
    until = time.monotonic() + 40
    while any(running(pid) for pid in ranks):
        assert time.monotonic() < until
        time.sleep(0.1)
    left = harness.exit_of(tmp_path)
    assert left["code"] == 75
    assert harness.steps(tmp_path) == [left["step"]]


@pytest.mark.slow
def test_what_is_due_by_the_clock_is_due_on_all_ranks(front_door, tmp_path):
    """An evaluation is a collective: ranks that disagreed about one would wait for each other."""
    answer, output = front_door(
        tmp_path, "--config.train.steps=40", "--config.eval.every=1s", "--config.log.every=1"
    )
    assert answer["code"] == 0, output
    assert len([step for split, step in harness.losses(tmp_path) if split != "train"]) > 1
