"""Ranks are scripts of a line or two: the tests check which are restarted or blamed."""

import signal
import sys
import threading
import time

import pytest

from jaxlm.core.errors import JaxlmError
from jaxlm.training.launch import ElasticJob, RestartPolicy, WorkerGroup
from tests import machine
from tests.distributed.processes import running

PRELUDE = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
rank = int(sys.argv[-1].partition("=")[2])
attempt = len(list(run.glob(f"start.{rank}.*")))
(run / f"start.{rank}.{attempt}").touch()

def save(step):
    (run / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)

def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
"""


def command(folder, script):
    return [sys.executable, "-S", "-c", PRELUDE + script, str(folder)]


@pytest.fixture
def job(tmp_path):
    """A job whose ranks run a script, and its output."""

    def make(script, *, count=1, restarts=10, pause=0.01, **options):
        made = ElasticJob(
            command(tmp_path, script),
            count,
            workdir=tmp_path,
            policy=RestartPolicy(restarts, pause_seconds=pause, **options),
            log=output.append,
        )
        return made

    output = []
    make.said = output
    return make


def test_a_job_that_finishes_is_not_started_again(job):
    made = job("", count=2)
    assert made.run() is None
    assert made.started == 1


@pytest.mark.parametrize("code", [1, 2, 65, 66, 70, 71, 73, 77, 79, 130])
def test_what_stays_wrong_is_not_started_again(job, code):
    made = job(f"print('because'); sys.exit({code})")
    failure = made.run()
    assert (failure.code, failure.rank, failure.cause) == (code, 0, "because")
    assert made.started == 1


@pytest.mark.parametrize(
    "end", ["sys.exit(69)", "sys.exit(75)", "sys.exit(76)", "kill(signal.SIGABRT)", "kill()"]
)
def test_what_another_start_may_mend_is_started_again(job, end):
    made = job(f"save(attempt)\nif attempt < 4: {end}")
    assert made.run() is None
    assert made.started == 5


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("kill(signal.SIGABRT)", 69),
        ("sys.exit(134)", 69),
        ("kill()", 69),
        ("kill(signal.SIGSEGV)", 70),
        ("sys.exit(75)", 75),
    ],
)
def test_the_exit_code_says_what_happened(job, end, code):
    assert job(end, restarts=0).run().code == code


@pytest.mark.parametrize("saved", ["", "save(7)"])
def test_a12_a_crash_loop_without_progress_ends_after_three_starts(job, saved, record_property):
    made = job(f"{saved}\nprint('the last words', flush=True)\nkill()")
    with pytest.raises(JaxlmError) as caught:
        made.run()
    assert caught.value.code == 70
    assert made.started == 3, "no fourth try"
    record_property("A12", f"{made.started} starts")
    assert f"without a step past {7 if saved else 0}" in caught.value.what
    assert "ended by SIGKILL" in caught.value.why
    assert "the last words" in caught.value.why


def test_a12_progress_is_no_crash_loop(job):
    made = job("save(attempt // 2)\nif attempt < 9: kill()")
    assert made.run() is None
    assert made.started == 10


def test_the_pause_doubles_while_nothing_moves(job):
    made = job("kill()", pause=0.02)
    with pytest.raises(JaxlmError):
        made.run()
    assert [line for line in job.said if "again" in line] == [
        "starting again in 0.02 s",
        "starting again in 0.04 s",
    ]


def test_restarts_are_counted(job):
    made = job("save(attempt)\nkill()", restarts=2)
    assert made.run().code == 69
    assert made.started == 3


def test_a_failed_save_waits_for_space(job, monkeypatch):
    free = iter([100, 100, 90, 300])
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": next(free)}))
    made = job("if attempt == 0: sys.exit(74)")
    assert made.run() is None
    assert made.started == 2
    assert list(free) == []


def test_the_first_to_fail_is_blamed_and_not_who_lost_it(job):
    made = job("if rank: kill()\ntime.sleep(0.3)\nkill(signal.SIGABRT)", count=2, restarts=0)
    failure = made.run()
    assert (failure.rank, failure.code, failure.cause) == (1, 69, "ended by SIGKILL")


def test_a_rank_that_says_who_ended_it_is_believed(job):
    script = """
word = {"rank": 1, "code": 70, "cause": "a bug"}
if rank == 0:
    (pathlib.Path(os.environ["JAXLM_LAUNCH"]) / "0.end").write_text(json.dumps(word))
else:
    time.sleep(0.3)
sys.exit(70)
"""
    failure = job(script, count=2).run()
    assert (failure.rank, failure.code, failure.cause) == (1, 70, "a bug")


def test_who_does_not_end_after_a_failure_is_ended(tmp_path):
    script = (
        "if rank: kill()\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.fork()\ntime.sleep(60)"
    )
    with WorkerGroup(command(tmp_path, script), 2, log=print, grace_seconds=0.5) as ranks:
        begun = time.monotonic()
        failure = ranks.wait()
    assert (failure.rank, failure.code) == (1, 69)
    machine.require_clock(time.monotonic() - begun, 5)
    assert [running(process.pid) for process in ranks.processes] == [[], []]


def test_a_silent_rank_is_ended_and_a_beating_one_is_not(job):
    script = """
for beat in range(20):
    if rank == 0 or beat < 2:
        (pathlib.Path(os.environ["JAXLM_LAUNCH"]) / f"{rank}.beat").write_text(str(beat))
    time.sleep(0.1)
time.sleep(60 * rank)
"""
    made = job(script, count=2, restarts=0, silence_seconds=1.0)
    begun = time.monotonic()
    failure = made.run()
    assert (failure.rank, failure.code) == (1, 76)
    assert "no heartbeat" in failure.cause
    machine.require_clock(time.monotonic() - begun, 10)


def test_a_job_that_is_told_to_stop_tells_its_ranks_and_is_not_started_again(job, tmp_path):
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(run / f"ready.{rank}").touch()
time.sleep(60)
"""
    made = job(script, count=2)

    def stop():
        while len(list(tmp_path.glob("ready.*"))) < 2:
            time.sleep(0.02)
        made.stop(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    failure = made.run()
    thread.join()
    assert failure.code == 75
    assert made.started == 1
