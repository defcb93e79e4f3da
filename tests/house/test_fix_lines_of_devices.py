"""Fix lines of situations that need devices or processes of their own: each runs in processes."""

import json
import re
import shlex

import pytest

from jaxlm.cli.main import main
from jaxlm.parallel.peers import RERUN_FIX
from tests.faults import harness

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


def answer(command):
    """Return the exit code of a command in a process of its own, and the JSON that it ends with."""
    code, output = harness.run([*command, "--json"], XLA_FLAGS=harness.FLAGS)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines, output
    return code, json.loads(lines[-1])


def pasted(command, line):
    """Return a command with the flags of a fix in place of its own flags of the same name."""
    flags = shlex.split(line, comments=True)
    names = {flag.partition("=")[0] for flag in flags}
    return [*(word for word in command if word.partition("=")[0] not in names), *flags]


def refused(command, what):
    """Return the lines of the fix of a command that must be refused."""
    code, output = answer(command)
    assert code in (2, 65), output
    assert what in output["error"]["what"]
    return output["error"]["fix"].splitlines()


def test_a_length_that_does_not_divide_over_devices_is_mended_by_its_neighbors(config, tmp_path):
    flags = ("--cpu_devices=2", "--config.mesh.context=2", "--stop_at=1")
    assert (
        harness.run(harness.words(config, tmp_path / "run", *flags), XLA_FLAGS=harness.FLAGS)[0]
        == 0
    )
    command = ["eval", f"--workdir={tmp_path / 'run'}", "--cpu_devices=2", "--sequence=33"]
    lines = refused(command, "rows of 33 tokens do not divide over 2 devices")
    assert lines == ["--sequence=32", "--sequence=34"]
    for line in lines:
        code, output = answer(pasted(command, line))
        assert code == 0, output


def test_a_replay_on_too_many_devices_is_mended_by_fewer_and_not_by_another_batch(config, tmp_path):
    words = harness.words(config, tmp_path / "run", "--cpu_devices=1", "--stop_at=2")
    assert harness.run(words, XLA_FLAGS=harness.FLAGS)[0] == 0
    command = ["replay", f"--workdir={tmp_path / 'run'}", "--step=1", "--cpu_devices=16"]
    (line,) = refused(command, "a batch of 8 rows does not divide over 16 devices")
    assert line == "--cpu_devices=8"
    code, output = answer(pasted(command, line))
    assert code == 0, output


def test_qk_clip_in_a_pipeline_is_mended_by_leaving_either_out(config, tmp_path):
    flags = (
        "--config.regularization.qk_clip=50",
        "--config.mesh.pipe=2",
        "--config.model.dropout=0",
    )
    words = harness.words(config, tmp_path / "run", *flags, "--cpu_devices=2", "--stop_at=1")
    for number, line in enumerate(refused(words, "QK-clip does not support a pipeline")):
        command = [*pasted(words, line), f"--workdir={tmp_path / str(number)}"]
        code, output = answer([word for word in command if word != f"--workdir={tmp_path / 'run'}"])
        assert code == 0, output


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:", "127.0.0.1:port"])
def test_an_address_without_a_port_gets_one_for_the_same_host(config, tmp_path, address):
    place = (f"--coordinator={address}", "--num_processes=1", "--process_id=0", "--stop_at=1")
    command = harness.words(config, tmp_path / "run", *place, "--cpu_devices=1")
    (line,) = refused(command, "is not an address")
    assert line.startswith(f"--coordinator={address.partition(':')[0]}:")
    code, output = answer(pasted(command, line))
    assert code == 0, output


def test_a_run_that_hangs_shows_its_limits_and_goes_on_by_the_same_command(config, tmp_path):
    words = harness.words(config, tmp_path / "run", "--config.watch.step=3s")
    code, output = harness.run(words, "step.before:hang@7-7", XLA_FLAGS=harness.FLAGS)
    assert code == 76, output
    assert RERUN_FIX in output
    limits = re.search(r"jaxlm (config explain watch)", output)
    assert limits, output
    assert main(limits[1].split()) == 0
    assert harness.run(words, XLA_FLAGS=harness.FLAGS)[0] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_lost_a_process_goes_on_by_the_same_command(config, tmp_path, rank):
    """The other process loses it in a computation, or, without rank 0, the coordination service."""
    words = harness.words(config, tmp_path / "run")
    command = ["launch", "--processes=2", "--restarts=0", "--cpu_devices=1", "--", *words]
    code, output = harness.run(command, f"step.before:sigkill@7#{rank}", XLA_FLAGS=harness.FLAGS)
    assert code == 69, output
    if rank == 1:  # without rank 0, JAX ends the other process before it can report anything
        assert RERUN_FIX in output
        assert "Traceback" not in output
    assert harness.run(command, XLA_FLAGS=harness.FLAGS)[0] == 0
