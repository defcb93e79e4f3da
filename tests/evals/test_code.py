"""Programs of a model pass only by their tests, and end at their limits with all they started."""

import json
import os
import socket
import time

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.evals import code
from jaxlm.evals.tasks import answers, config, items
from jaxlm.generate.sampler import Continuation
from jaxlm.recipes.use import tasks
from jaxlm.recipes.use.tasks import TaskSettings

ADD = "def add(a, b):\n    return a + b\n"
EVERY_PIPE = """\
import os
for n in range(64):
    try:
        os.write(n, b"passed")
    except OSError:
        pass
os._exit(0)
"""
TEST = "assert add(1, 2) == 3\n"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (ADD + TEST, "passed"),
        (ADD.replace("+", "-") + TEST, "AssertionError"),
        ("def add(:\n" + TEST, "SyntaxError"),
        ("import sys\nsys.exit(0)\n" + TEST, "SystemExit"),
        ("import os\nos._exit(0)\n" + TEST, "ended"),
        ("print('passed')\nimport os\nos.write(1, b'passed')\n" + TEST, "NameError"),
        ("import atexit, os\natexit.register(os._exit, 0)\n" + TEST, "NameError"),
        ("raise KeyboardInterrupt\n" + TEST, "KeyboardInterrupt"),
        ("import builtins\nbuiltins.AssertionError = int\nassert False\n", "AssertionError"),
        (EVERY_PIPE, "ended"),
        ("x = bytearray(2 ** 30)\n", "MemoryError"),
        ("open('big', 'wb').write(bytes(2 ** 21))\n", "OSError"),
        ("import os\nassert os.listdir('.') == []\nassert 'PATH' not in os.environ\n", "passed"),
        ("import jaxlm\n", "ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_only_the_tests_make_a_program_pass(program, expected, monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    assert code.outcome(program, seconds=60) == expected


@pytest.mark.parametrize("program", ["while True: pass\n", "import time\ntime.sleep(60)\n"])
def test_a_program_ends_at_its_limit(program):
    assert code.outcome(program, seconds=0.5) in ("time limit", "ended")


def test_processes_that_a_program_started_end_with_it(tmp_path):
    file = tmp_path / "alive"
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while True:\n"
        f"        open({str(file)!r}, 'w').write(str(time.time()))\n"
        "        time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
    )
    result = code.outcome(program, seconds=60)
    assert result in ("passed", "BlockingIOError")  # an ordinary user may start no process
    if result == "passed":
        before = file.read_text()
        time.sleep(0.3)
        assert file.read_text() == before


@pytest.mark.skipif(not code.namespaces(), reason="namespaces are not permitted")
def test_there_is_no_network():
    program = "import socket\nsocket.create_connection(('127.0.0.1', {}), timeout=2)\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert code.outcome(program.format(port), seconds=60) not in ("passed", "time limit")


def test_no_descriptor_is_left_open():
    code.outcome(ADD)
    before = len(os.listdir("/proc/self/fd"))
    code.outcome(ADD + TEST)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_task_with_tests_runs_its_answers_only_if_that_is_allowed(tmp_path):
    file = tmp_path / "add.toml"
    file.write_text(
        'kind = "answer"\nitems = "add.jsonl"\ncontext = "{{ prompt }}"\nanswer = "{{ body }}"\n'
        'program_start = "{{ prompt }}"\nprogram_end = "{{ test }}"\n'
    )
    item = {"prompt": "def add(a, b):\n", "body": "    return a + b", "test": TEST}
    (tmp_path / "add.jsonl").write_text(json.dumps(item))
    task = config.read(file)
    with pytest.raises(ConfigError) as refused:
        tasks.check_code(task, TaskSettings())
    assert refused.value.fix.startswith("--allow_code ")
    tasks.check_code(task, TaskSettings(allow_code=True))
    (read,) = items.read(task, task.file)
    for text, passed in (("    return b + a", 1.0), ("    return a", 0.0)):
        answer = Continuation("", [7], text, None, "length")
        fields = answers.judged(task.kind, answer, read.gold, read.program)
        assert fields["metrics"] == {"passed": passed, "exact_match": 0.0}
        assert fields["outcome"] == ("passed" if passed else "AssertionError")
