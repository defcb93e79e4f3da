"""Functions of a user and programs of a model run in processes, and end with their limits."""

import os
import re
import time
from pathlib import Path

import pytest

from jaxlm.core import config, user_code
from jaxlm.core.errors import ConfigError
from jaxlm.evals import code
from jaxlm.recipes.config import Run
from jaxlm.rl import programs, workers
from jaxlm.rl.rewards import Rewards, Sample
from jaxlm.rl.verifiers import Unscorable
from jaxlm.rl.workers import Worker

FUNCTIONS = """\
import os, subprocess, sys, threading, time

SLEEP = ["sleep", "987654"]


def shape(completion, answer, info=None):
    return len(completion) / 4 + (answer == "12") + bool(info)


def noise(seed, **sample):
    return seed + len(sample)


def odd(prompt):
    return VALUES[prompt]()


def sleeper():
    subprocess.Popen(SLEEP, start_new_session=True)
    return 1.0


def orphan():
    subprocess.run(["sh", "-c", "setsid sleep 987654 & exit 0"])
    time.sleep(60)


def bomb():
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    return 1.0


def printing():
    while True:
        os.write(1, b"x" * 10_000)


def copy():
    os.fork()
    return 1.0


VALUES = {
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("inf"),
    "below": lambda: float("-inf"),
    "huge": lambda: 10**400,
    "list": lambda: [1.0],
    "zero": lambda: -0.0,
    "complex": lambda: 1j,
    "text": lambda: "1",
    "raise": lambda: [][0],
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "exit": lambda: sys.exit(3),
    "end": lambda: os._exit(3),
    "closed": lambda: os.closerange(0, 2**16),  # those of its pipes too, of any number
    "stdout": lambda: [os.close(1), sys.stdout.close()] and True,
    "memory": lambda: len(bytearray(2**31)),
    "bool": lambda: True,
    "hang": lambda: time.sleep(60),
    "loop": lambda: all(iter(int, 1)) or sum(iter(int, 1)),
    "sleeper": sleeper,
    "orphan": orphan,
    "bomb": bomb,
    "printing": printing,
    "copy": copy,
}
"""
SHAPE = "def shape(completion):\n    return 1\n"
SAMPLE = Sample("7 + 5 =", "12", "12", None, 3, "eos_token", 2)
SUM = "answer so:\n```python\ndef add(a, b):\n    return a + b\n```\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return tmp_path


def settings(*functions, **changed):
    overrides = [("reward.functions", ",".join(functions))]
    overrides += [(f"reward.{name}", str(value)) for name, value in changed.items()]
    return config.load(Run, None, overrides).value.reward


@pytest.fixture
def scorer(folder):
    functions = ("rewards.py:shape", "rewards.py:noise=0.5", "number=2", r"regex:=\s*(\d+)")
    with Rewards(settings(*functions, workers=2)) as scorer:
        yield scorer


def test_functions_receive_the_sample_and_their_values_are_in_order(scorer):
    samples = [SAMPLE._replace(completion=f"= {n}", seed=n, info={"n": n}) for n in range(20)]
    verdicts = scorer.score(samples)
    assert [each.by_name["rewards.py:noise"] for each in verdicts] == [n + 6 for n in range(20)]
    assert verdicts[12].by_name["rewards.py:shape"] == 4 / 4 + 1 + 1
    assert verdicts[12].total == 3 + 0.5 * 18 + 2 + 1
    assert verdicts[11].total == 3 + 0.5 * 17


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(FUNCTIONS)
    files = {"rewards.py": (user_code.Source(path, path.read_bytes()), ["odd"])}
    worker = Worker(files, 1.0, 2**29)
    yield worker
    worker.stop()


def running(text):
    """The processes whose command line has a text."""
    files = Path("/proc").glob("[0-9]*/cmdline")
    alive = []
    for file in files:
        try:
            alive += [file.parent.name] if text in file.read_bytes() else []
        except OSError:
            continue
    return alive


def ended(text):
    """Return whether no process has a text in its command line; one that was killed needs time."""
    until = time.monotonic() + 5
    while running(text) and time.monotonic() < until:
        time.sleep(0.05)
    return running(text) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", "it returned None"),
        ("nan", "it returned nan"),
        ("infinite", "it returned inf"),
        ("below", "it returned -inf"),
        ("huge", "OverflowError: int too large to convert to float"),
        ("list", "it returned list, not a number"),
        ("zero", 0.0),
        ("complex", "it returned complex, not a number"),
        ("text", "it returned str, not a number"),
        ("raise", "IndexError: list index out of range"),
        ("interrupt", "KeyboardInterrupt"),
        ("exit", "SystemExit: 3"),
        ("end", "its process ended with 3"),
        ("closed", "its process ended with -?[0-9]+"),
        ("stdout", 1.0),
        ("memory", "MemoryError"),
        ("bool", 1.0),
        ("hang", "it exceeded reward.seconds=1"),
        ("loop", "it exceeded reward.seconds=1"),
        ("printing", "it exceeded reward.seconds=1"),
        ("sleeper", 1.0),
        ("orphan", "it exceeded reward.seconds=1"),
        ("bomb", 1.0),
        ("copy", 1.0),
    ],
)
def test_a_function_that_misbehaves_ends_with_all_that_it_started(worker, name, expected):
    call = {"function": "rewards.py:odd", "sample": {**SAMPLE._asdict(), "prompt": name}}
    if isinstance(expected, float):
        assert worker.call(call) == expected
    else:
        with pytest.raises(Unscorable) as error:
            worker.call(call)
        assert re.fullmatch(expected, str(error.value))
    assert ended(b"987654")
    assert len(running(bytes(workers.PROGRAM))) <= 1, "copies of the worker have ended"
    healthy = {"function": "rewards.py:odd", "sample": {**SAMPLE._asdict(), "prompt": "bool"}}
    assert worker.call(healthy) == 1


def test_a_worker_is_replaced_after_its_calls_and_leaves_no_descriptor(worker, monkeypatch):
    call = {"function": "rewards.py:odd", "sample": {**SAMPLE._asdict(), "prompt": "bool"}}
    worker.stop()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(workers, "CALLS", 2)
    numbers = []
    for _ in range(4):
        worker.start()
        numbers.append(worker._process.pid)
        worker.call(call)
    assert len(set(numbers)) == 2
    worker.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pattern_that_does_not_end_is_unscorable(folder):
    sample = SAMPLE._replace(completion="a" * 40 + "b")
    with Rewards(settings("regex:(a+)+$", seconds=0.5, workers=1)) as scorer:
        (verdict,) = scorer.score([sample])
    assert verdict.problem == "regex:(a+)+$: it exceeded reward.seconds=0.5"


def test_programs_earn_by_their_tests_alone(folder):
    tests = SAMPLE._replace(answer="assert add(7, 5) == 12", completion=SUM)
    examples = tests._replace(info={"doctest": ">>> add(7, 5)\n12\n"}, answer=None)
    limits = {"seconds": 60, "sandbox": "auto" if code.namespaces() else "process"}
    with Rewards(settings("python", **limits)) as scorer:
        right, wrong, none, broken = scorer.score(
            [
                tests,
                tests._replace(completion=SUM.replace("+", "-")),
                tests._replace(answer=None),
                tests._replace(answer="assert add("),
            ]
        )
    assert (right.total, wrong.total, none.total) == (1, 0, None)
    assert none.problem == "python: the prompt has no tests"
    assert broken.problem.startswith("python: the tests are no Python: '(' was never closed")
    with Rewards(settings("doctest", **limits)) as scorer:
        assert [each.total for each in scorer.score([examples])] == [1]


def test_programs_need_namespaces_or_a_word_of_the_user(folder, monkeypatch):
    monkeypatch.setattr(programs.code, "namespaces", lambda: ())
    with pytest.raises(ConfigError) as error, Rewards(settings("python")):
        pass
    assert error.value.fix.startswith("--config.reward.sandbox=process ")
    with Rewards(settings("python", sandbox="process")):
        pass


@pytest.mark.parametrize(
    ("content", "function", "where", "fix"),
    [
        (SHAPE + "1/0\n", "shape", "rewards.py:3", "correct that line"),
        ("def shape(:\n", "shape", "rewards.py:1", "correct that line"),
        ("import sys\nsys.exit(1)\n", "shape", "rewards.py:2", "correct that line"),
        (SHAPE, "shap", "reward.functions", "rewards.py:shape=1"),
        ("def shape(text):\n    return 1\n", "shape", "reward.functions", "def shape(completion"),
    ],
)  # fmt: skip
def test_a_file_that_fails_is_an_error_before_the_first_sample(
    folder, content, function, where, fix
):
    (folder / "rewards.py").write_text(content)
    with pytest.raises(ConfigError) as error:
        with Rewards(settings(f"rewards.py:{function}")):
            pass
    assert where in error.value.where
    assert fix in error.value.fix


def test_a_config_runs_the_file_that_it_records_and_only_if_it_ran_here_before(folder):
    run = config.load(Run, None, [("reward.functions", "rewards.py:shape")]).value
    saved = config.to_json(run)
    assert re.fullmatch(r"rewards\.py=[0-9a-f]{16}", saved["reward"]["sources"][0])
    user_code.keep(run, folder)
    (copy,) = (folder / "own").iterdir()
    assert copy.read_text() == FUNCTIONS
    (folder / "rewards.py").write_text("def shape(completion):\n    return 100\n")
    with Rewards(config.from_json(Run, saved).reward) as scorer:
        assert scorer.score([SAMPLE])[0].total == 1.5
    changed = config.load(Run, None, [("reward.functions", "rewards.py:shape")]).value
    assert changed.reward.sources != run.reward.sources
    for file in (folder / "cache/own").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match="has not run here before") as error:
        with Rewards(config.from_json(Run, saved).reward):
            pass
    assert str(folder / "cache/own") in error.value.fix
    del saved["reward"]["sources"]
    with pytest.raises(ConfigError, match="names code without its digest"):
        config.from_json(Run, saved)


def test_a_file_that_is_not_there_is_an_error_of_the_config(folder):
    with pytest.raises(ConfigError) as error:
        settings("rewrds.py:shape")
    assert "there is no file rewrds.py" in error.value.why
