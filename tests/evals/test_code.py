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


CHEATS = {
    "an equal of everything": (
        "class Any:\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "def add(a, b): return Any()\n"
    ),
    "a list of equals": (
        "class Any:\n    def __eq__(self, other): return True\n"
        "class Sum(int):\n    def __eq__(self, other): return True\n"
        "def add(a, b): return Sum(0)\n"
    ),
    "a patched assert": "import builtins\nbuiltins.AssertionError = int\ndef add(a, b): pass\n",
    "patched functions": (
        "import builtins\nbuiltins.len = lambda each: 3\nadd = lambda a, b: ''\n"
        "builtins.type = lambda each: int\n"
    ),
    "an exit": "import os\nos._exit(0)\n",
    "an exit in the tests": "import os\nadd = lambda a, b: os._exit(0)\n",
    "a search of the tests": (
        "import os\nadd = lambda a, b: next(\n    open(n) for n in os.listdir('.')\n)\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_cheats_does_not_pass_its_tests(cheat):
    assert code.outcome(CHEATS[cheat], 60, tests=TEST) not in ("passed", "time limit")
    assert code.outcome(CHEATS[cheat], 60, tests="assert len(add(1, 2)) == 3\n") != "passed"


def test_tests_compare_by_value_and_examples_by_what_they_print():
    program = ADD + "print(7)\nclass Own:\n    def __eq__(self, other): return True\n"
    tests = TEST + "assert [add(1, 1.0), {'a': (add('b', 'c'),)}] == [2, {'a': ('bc',)}]\n"
    tests += "assert Own() == Own()\nassert add(1, 1) != 3\nassert not [Own()] == [1]\n"
    error = "TypeError: unsupported operand type(s) for +: 'int' and 'str'\n"
    examples = [("add(1, 2)\n", "3\n", None), ("add(1, '')\n", "", error)]
    assert code.outcome(program, 60, tests=tests, examples=examples) == "passed"
    assert code.outcome(program, 60, examples=[("add(1, 2)\n", "4\n", None)]) == "AssertionError"
    assert code.outcome(program, 60, examples=[("add(1, '')\n", "4\n", None)]) != "passed"


@pytest.mark.parametrize("isolate", [True, False])
def test_a_program_starts_no_process_and_connects_to_nothing(isolate):
    program = (
        "import os, socket, signal\n"
        "for forbidden in (os.fork, socket.socket, lambda: os.kill(os.getppid(), 0),\n"
        "                  lambda: os.execv('/bin/sh', ['sh'])):\n"
        "    try:\n        forbidden()\n"
        "    except (PermissionError, BlockingIOError):\n        continue\n"
        "    raise SystemError\n"
    )
    assert code.outcome(program, 60, isolate=isolate) == "passed"


@pytest.mark.skipif(not code.namespaces(), reason="namespaces are not permitted")
def test_v19_a_program_sees_its_own_files_and_keeps_none(tmp_path):
    (tmp_path / "secret").write_text("key")
    program = (
        "import os, json, hashlib, re, decimal\n"
        f"assert not os.path.exists({str(tmp_path)!r})\n"
        "assert not os.path.exists('/proc') and not os.path.exists('/usr/bin')\n"
        "open('note', 'w').write('kept')\nopen('/note', 'w').write('kept')\n"
        "try:\n    open(os.__file__, 'a')\n"
        "except OSError:\n    pass\nelse:\n    raise SystemError\n"
    )
    assert code.outcome(program, 60) == "passed"
    assert not os.path.exists("/note")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


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
    assert result in ("passed", "PermissionError", "BlockingIOError")
    if result == "passed":
        before = file.read_text()
        time.sleep(0.3)
        assert file.read_text() == before


@pytest.mark.skipif(not code.namespaces(), reason="namespaces are not permitted")
def test_v19_there_is_no_network():
    program = "import socket\nsocket.create_connection(('127.0.0.1', {}), timeout=2)\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert code.outcome(program.format(port), seconds=60) not in ("passed", "time limit")


def test_no_descriptor_is_left_open():
    code.outcome(ADD)
    before = len(os.listdir("/proc/self/fd"))
    code.outcome(ADD + TEST)
    assert len(os.listdir("/proc/self/fd")) == before


def test_v19_a_task_with_tests_runs_its_answers_only_if_that_is_allowed(tmp_path):
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
