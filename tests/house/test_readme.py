"""Every command of README.md runs, in order, in a folder that looks like a fresh checkout.

`jaxlm` is the one under test. The commands are the reader's; only what makes them long is cut: where a command names
`configs/quickstart.py`, the settings of TINY that it does not give itself are added to it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
SCRIPTS = [
    line for line in COMMANDS if line.startswith("bash scripts/")
]  # tests/scripts tests them
TINY = {
    "--config.train.steps": "4",
    "--config.train.batch": "8",
    "--config.data.train": "texts/*.txt",
    "--config.data.validation": "tail:10%",
    "--config.data.tokenizer": "bytes",
    "--config.data.sequence": "32",
    "--config.model.depth": "2",
    "--config.model.width": "32",
    "--config.model.heads": "2",
    "--config.model.kv_heads": "2",
    "--config.sample.prompts": "()",
}


def shortened(command: str) -> str:
    """The command with what TINY adds to it."""
    words = shlex.split(command)
    if "--config=configs/quickstart.py" not in words:
        return command
    given = {word.partition("=")[0] for word in words}
    added = [f"{name}={value}" for name, value in TINY.items() if name not in given]
    added += ["--stop_at=2"] if "--stop_at" in given else []
    return f"{command} {shlex.join(added)}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with the configs, some texts, an environment to activate, and `jaxlm` on the path."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "texts").mkdir()
    for number, path in enumerate(sorted((ROOT / "jaxlm/core").glob("*.py"))):
        (folder / "texts" / f"{number}.txt").write_text(path.read_text())
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text("")
    jaxlm = folder / ".venv/bin/jaxlm"
    jaxlm.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jaxlm "$@"\n')
    jaxlm.chmod(0o755)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    flags = os.environ.get("XLA_FLAGS", "")
    own = {
        "PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags),
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=300,
    )


def marked(command: str):
    """The command as a test; those that compile for several devices are slow."""
    many = "--cpu_devices" in command or command.startswith("jaxlm check ")
    slow = (pytest.mark.slow,) if many else ()
    return pytest.param(command, marks=slow, id=command)


@pytest.mark.parametrize("command", [marked(line) for line in COMMANDS if line not in SCRIPTS])
def test_a_command_of_the_readme_runs(checkout, command):
    done = run(shortened(command), checkout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_quickstart_trains_evaluates_samples_and_is_done_the_second_time(checkout, tmp_path):
    """The script and the real jaxlm, in an environment that is there already, at the size of TINY."""
    clone = tmp_path / "clone"
    shutil.copytree(checkout, clone)
    (clone / "scripts").mkdir()
    made_of = ["pyproject.toml", "scripts/constraints.txt", "scripts/setup.sh"]
    for name in (*made_of, "scripts/quickstart"):
        shutil.copy(ROOT / name, clone / name)
    (clone / ".venv/bin/python").symlink_to(sys.executable)
    stamp = run(f"cat {' '.join(made_of)} | cksum", clone).stdout
    (clone / ".venv/jaxlm-stamp").write_text(f"{stamp}\n")
    jaxlm = clone / ".venv/bin/jaxlm"
    tiny = shlex.join(f"{name}={value}" for name, value in TINY.items())
    shorter = f'[ "$1" != train ] || set -- "$@" {tiny}\nexec'
    jaxlm.write_text(jaxlm.read_text().replace("exec", shorter))
    for start in range(2):
        done = run("bash scripts/quickstart", clone)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("== .venv is up to date\n")
        assert "complete at step 4" in done.stdout
        assert ("compiling the step" in done.stderr) == (not start)
        samples = done.stdout.partition("== three samples\n")[2].partition("\n== ")[0]
        assert all(prompt in samples for prompt in ("def ", "class Test", "import os"))
        following = done.stdout.partition("What to try next:\n")[2]
        assert "  jaxlm generate --workdir=runs/quickstart" in following
        assert (clone / "runs/quickstart/report.html").is_file()


def test_the_scripts_of_the_readme_are_there():
    assert [line.split()[1] for line in SCRIPTS] == ["scripts/quickstart", "scripts/test"]
    assert all((ROOT / line.split()[1]).is_file() for line in SCRIPTS)


def test_the_tour_takes_at_most_sixty_lines():
    tour = README.partition("## A tour\n")[2].partition("\n## ")[0]
    assert 0 < len(tour.strip().splitlines()) <= 60


def test_every_verb_is_in_the_tour():
    from jaxlm.cli.main import VERBS

    named = {line.split()[1] for line in COMMANDS if line.startswith("jaxlm ")}
    assert named == set(VERBS)


def test_every_path_that_the_readme_names_is_there():
    rooms = re.findall(
        r"`(\w+)/`", README.partition("## The map of the code")[2].partition("##")[0]
    )
    assert set(rooms) - {"families", "tests", "jaxlm"} == {
        path.name for path in (ROOT / "jaxlm").iterdir() if (path / "__init__.py").is_file()
    }
    named = re.findall(r"`((?:configs|scripts|colab|jaxlm|tests)/[\w/.]+)`", README)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_exit_codes_of_the_readme_are_those_of_the_errors():
    from jaxlm.core import errors

    table = README.partition("## Exit codes")[2].partition("\n## ")[0]
    shown = {int(code) for code in re.findall(r"\| (\d+) \|", table)}
    raised = {
        value.code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.JaxlmError)
    }
    assert raised <= shown
