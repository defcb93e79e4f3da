"""Lines H of the reliability bar that are about the suite, and about what starting costs."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from tests import machine
from tests.faults import harness, repeat

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

LEFT = """
import socket, subprocess, sys, tempfile
from multiprocessing import shared_memory
from pathlib import Path

kept = []


def test_that_leaves_a_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])


def test_that_leaves_a_grandchild(seconds="30"):
    sleep = f"[sys.executable, '-c', 'import time; time.sleep({seconds})']"
    child = f"import subprocess, sys; subprocess.Popen({sleep})"
    subprocess.run([sys.executable, "-c", child], check=True)


def test_that_leaves_a_memory():
    block = shared_memory.SharedMemory(create=True, size=64, track=False)
    block.close()


def test_that_leaves_a_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))


def test_that_leaves_a_temporary_file():
    tempfile.mkdtemp()


def test_that_leaves_a_file_at_home():
    Path.home().joinpath("left").touch()


def test_that_leaves_a_file_in_the_repository():
    Path(__file__).with_name("left").touch()


def test_that_leaves_nothing():
    test_that_leaves_a_grandchild("0.5")
"""
PROCESS = r"process \d+ of 0/tests/test_left.py::test_that_leaves_a_(child|grandchild) .*time.sleep"
LEAVES = (
    *("process \\d+, a socket that listens at 0100007F:", f"left behind: {PROCESS}.*{PROCESS}"),
    *("/dev/shm/psm_", "/tests-[^,]*/tmp", "home/left", "tests/left"),
)


def test_h4_what_a_test_leaves_behind_fails_the_run(tmp_path):
    """A session that leaves something of each kind, and one that leaves nothing."""
    text = LEFT
    if sys.version_info < (3, 13):
        text = LEFT.replace(", track=False", "").replace(
            "    block.close()\n",
            "    block.close()\n    from multiprocessing import resource_tracker\n"
            "    resource_tracker.unregister(block._name, 'shared_memory')\n",
        )
    before = set(os.listdir("/dev/shm"))
    ended = {}
    for name in ("leaves_a", "leaves_nothing"):
        place = tmp_path / str(len(ended))
        tests, home = place / "tests", place / "home"
        for folder in (tests, home):
            folder.mkdir(parents=True)
        ours = (Path(__file__).parents[1] / "conftest.py").read_text()
        assert "ENDING_SECONDS = 10\n" in ours
        hurried = ours.replace("ENDING_SECONDS = 10\n", "ENDING_SECONDS = 2\n")
        (tests / "conftest.py").write_text(hurried)
        (tests / "test_left.py").write_text(text)
        ended[name] = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-k", name, str(tests)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "ignore", "HOME": str(home)},
        )
        # Before another run: were ours gone, it would take everybody's folder of temporary files
        # for its own.
        assert Path(os.environ["TMPDIR"]).is_dir(), "the run removed a folder that is not its own"
    output = ended["leaves_a"].stdout
    left = re.findall(r"process (\d+)", output.rpartition("left behind: ")[2])
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    for block in set(os.listdir("/dev/shm")) - before:
        if block.startswith("psm_"):
            Path("/dev/shm", block).unlink()
    assert ended["leaves_a"].returncode == 1, output
    assert "7 passed" in output
    assert len(left) == 2, "a child and a grandchild"
    for each in LEAVES:
        assert re.search(each, output), output
    assert ended["leaves_nothing"].returncode == 0, ended["leaves_nothing"].stdout


FLAKY = """
from pathlib import Path

MARK = Path(__file__).with_name("mark")


def test_c4_that_fails_the_second_time():
    assert not MARK.exists()
    MARK.touch()


def test_e11_that_never_fails():
    pass


def test_of_no_line():
    assert False
"""


def test_h3_a_test_that_fails_now_and_then_is_found_and_named(tmp_path, monkeypatch, capsys):
    """Repeat the tests of all lines that are part of every run, as `scripts/soak --repeat=20`."""
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repeat, "WORKERS", [])
    assert repeat.repeat(2, ["test_flaky.py"]) == 1
    output = capsys.readouterr().out
    assert "2 tests of lines, 2 times" in output
    assert "1 of 2: " in output
    assert "test_c4_that_fails_the_second_time" in output
    assert "1 of 2 tests failed now and then" in output


@pytest.mark.usefixtures("one_device")
def test_h6_starting_takes_seconds_and_resuming_hardly_more(tmp_path, record_property):
    """With a warm compile cache."""
    config = harness.write_config(tmp_path)

    def taken(*flags: str) -> harness.Took:
        with harness.timing() as took:
            command = harness.words(config, tmp_path / "run", *flags)
            code, output = harness.run(command, is_new=True)
        assert code == 0, output
        return took

    assert main(harness.words(config, tmp_path / "warm", "--stop_at=1")) == 0
    start, resume = taken("--stop_at=1"), taken("--stop_at=2")
    record_property("H6", f"start {start}; resume {resume}")
    start.require(20)
    assert resume.processor <= start.processor + 5, (start, resume)
    machine.require_clock(resume.clock - start.clock, 5)
