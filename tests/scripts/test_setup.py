"""scripts/setup.sh, with Pythons that only pretend."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "awk",
    "bash",
    "cat",
    "cksum",
    "cp",
    "df",
    "dirname",
    "env",
    "grep",
    "mkdir",
    "paste",
    "sed",
    "sh",
    "sort",
    "tail",
    "tr",
)

# Answers the probe, makes an environment that holds a copy of itself, notes the requests to pip,
# and prints the calls of pytest.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*import*ensurepip*) echo {version}; exit {probe} ;;
  "-c "*version_info*) echo {version} ;;
  "-c "*metadata*) exit {accelerated} ;;
  "--version ") echo "Python {version}" ;;
  "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip") echo "$@" >> "$PIP_CALLS"; {pip} ;;
  "-m pytest") shift 2; echo "pytest of ${{0%/bin/python}}: $*; XLA_FLAGS=${{XLA_FLAGS:-}}"
    exit {pytest} ;;
  "-m ruff") exit {lint} ;;
esac
"""


class Machine:
    """A fresh clone, a PATH with tools and no Python, and an empty home."""

    def __init__(self, folder):
        self.clone, self.bin, self.home = folder / "a clone", folder / "bin", folder / "home"
        self.calls = folder / "calls"
        for made in (self.clone / "scripts", self.bin, self.home):
            made.mkdir(parents=True)
        for name in ("pyproject.toml", "scripts/setup.sh", "scripts/constraints.txt"):
            shutil.copy(ROOT / name, self.clone / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def python(self, path, version, *, probe=0, pip="exit 0", accelerated=1, pytest=0, lint=0):
        """Put a fake Python somewhere.

        Args:
          path: its place.
          version: its version.
          probe, accelerated: exit codes of the probe, and of the search for a GPU's JAX.
          pip: shell code in the place of pip.
          pytest, lint: exit codes of pytest and of ruff.
        """
        path = self.bin / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            PYTHON.format(
                version=version,
                probe=probe,
                pip=pip,
                accelerated=accelerated,
                pytest=pytest,
                lint=lint,
            )
        )
        path.chmod(0o755)
        return path

    def run(self, command, **variables):
        """Runs a command after sourcing setup.sh."""
        environment = {"PATH": str(self.bin), "HOME": str(self.home), "PIP_CALLS": str(self.calls)}
        return subprocess.run(
            [self.bin / "bash", "-uc", f". scripts/setup.sh; {command}"],
            cwd=self.clone,
            env=environment | {k: str(v) for k, v in variables.items()},
            capture_output=True,
            text=True,
        )

    def found(self, **variables):
        """The Python that is chosen."""
        done = self.run('find_python; echo "$PYTHON"', **variables)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    @property
    def installs(self):
        """Requests to pip."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_newest_supported_python_is_chosen(machine):
    machine.python("python3.11", "3.11")
    newest = machine.python("python3.12", "3.12")
    machine.python("python3", "3.10")
    assert machine.found() == newest


def test_a_shim_that_names_an_inactive_version_is_passed_over(machine):
    shim = machine.bin / "python3.13"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2; exit 127\n")
    shim.chmod(0o755)
    works = machine.python("python3", "3.11")
    assert machine.found() == works


def test_versions_of_pyenv_are_found_though_they_are_not_on_the_path(machine):
    machine.python("python3", "3.11")
    inside = machine.python(machine.home / ".pyenv/versions/3.13.0/bin/python", "3.13")
    assert machine.found() == inside
    root = machine.python(machine.home / "elsewhere/versions/3.12.1/bin/python", "3.12")
    shutil.rmtree(machine.home / ".pyenv")
    assert machine.found(PYENV_ROOT=machine.home / "elsewhere") == root


def test_a_python_that_was_asked_for_is_taken(machine):
    machine.python("python3.13", "3.13")
    asked = machine.python("python3.11", "3.11")
    assert machine.found(JAXLM_PYTHON=asked) == asked


@pytest.mark.parametrize(
    ("version", "probe", "message"),
    [("3.10", 0, "needs 3.11 or newer"), ("3.12", 1, "cannot make an environment")],
)
def test_a_python_that_was_asked_for_and_cannot_be_used_is_refused(
    machine, version, probe, message
):
    asked = machine.python("other", version, probe=probe)
    machine.python("python3.13", "3.13")
    done = machine.run("find_python", JAXLM_PYTHON=asked)
    assert done.returncode == 66
    assert message in done.stderr


def test_a_newer_python_than_the_tests_know_is_better_than_none(machine):
    machine.python("python3.14", "3.14")
    newest = machine.python("python3.15", "3.15")
    machine.python("python3", "3.10")
    done = machine.run('find_python && echo "$PYTHON"')
    output, chosen = done.stdout.splitlines()
    assert "3.15 is newer than those that the tests have run on (3.13, 3.12, 3.11)" in output
    assert Path(chosen) == newest
    assert machine.run("find_python 3.11").returncode == 66, "that one was asked for"
    known = machine.python("python3.12", "3.12")
    assert machine.found() == known


def test_no_python_is_one_clear_line(machine):
    machine.python("python3", "3.9")
    done = machine.run("find_python")
    assert done.returncode == 66
    assert done.stderr.startswith("error: no Python of version 3.13 or 3.12 or 3.11 on PATH")
    assert done.stderr.count("\n") == 1


def test_a_python_without_venv_is_named_with_what_to_install(machine):
    machine.python("python3", "3.12", probe=1)
    done = machine.run("find_python")
    assert done.returncode == 66
    assert (
        "python3 (3.12) lacks the venv module (on Debian: apt install python3-venv)" in done.stderr
    )


def test_a_second_start_installs_nothing(machine):
    machine.python("python3.13", "3.13")
    for _ in range(2):
        done = machine.run("prepare .venv ''")
        assert done.returncode == 0, done.stderr
    assert len(machine.installs) == 1
    assert machine.installs[0].endswith("-e . -c scripts/constraints.txt")
    assert done.stdout == "== .venv is up to date\n\n"


def test_extras_are_added_and_stay(machine):
    machine.python("python3.13", "3.13")
    for extras in ("", "test", ""):
        machine.run(f"prepare .venv '{extras}'")
    assert [call.split()[-3] for call in machine.installs] == [".", ".[test]"]
    with open(machine.clone / "pyproject.toml", "a") as file:
        file.write("\n# changed\n")
    machine.run("prepare .venv ''")
    assert machine.installs[2].split()[-3] == ".[test]"


def test_an_environment_whose_python_is_gone_is_made_again(machine):
    machine.python("python3.13", "3.13")
    machine.run("prepare .venv ''")
    (machine.clone / ".venv/bin/python").unlink()
    assert "making .venv" in machine.run("prepare .venv ''").stdout


def test_an_environment_that_somebody_made_is_kept_and_filled(machine):
    machine.python("python3.13", "3.13")
    machine.python(machine.clone / ".venv/bin/python", "3.12")
    done = machine.run("prepare .venv ''")
    assert "making" not in done.stdout
    assert len(machine.installs) == 1


def test_asking_for_another_python_than_the_environment_has_is_refused(machine):
    asked = machine.python("python3.11", "3.11")
    machine.python(machine.clone / ".venv/bin/python", "3.13")
    done = machine.run("prepare .venv ''", JAXLM_PYTHON=asked)
    assert done.returncode == 66
    assert "remove .venv to change it" in done.stderr
    assert machine.installs == []


@pytest.mark.parametrize(
    ("accelerated", "driver", "message"),
    [(0, "13.0", ""), (1, "13.0", "cuda"), (1, "12.4", "cuda12"), (1, "", "cuda")],
)
def test_a_gpu_that_jax_will_not_use_is_mentioned_with_the_extra(
    machine, accelerated, driver, message
):
    smi = machine.bin / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '| Driver Version: 550.5    CUDA Version: {driver} |'\n")
    smi.chmod(0o755)
    python = machine.python("python3.13", "3.13", accelerated=accelerated)
    done = machine.run(f"mention_accelerator '{python}'")
    assert done.returncode == 0
    assert f"-m pip install -e '.[{message}]'" in done.stdout or not message
    assert bool(done.stdout) == bool(message)


@pytest.mark.parametrize("accelerated", [0, 1])
@pytest.mark.parametrize(
    ("device", "variables"), [("accel0", {}), ("vfio", {"TPU_ACCELERATOR_TYPE": "v5litepod-8"})]
)
def test_a_tpu_that_jax_will_not_use_is_mentioned_with_the_extra(
    machine, accelerated, device, variables
):
    python = machine.python("python3.13", "3.13", accelerated=accelerated)
    devices = machine.home / "dev"
    (devices / device).mkdir(parents=True)
    done = machine.run(f"mention_accelerator '{python}' '{devices}'", **variables)
    assert done.returncode == 0
    assert ("There is a TPU" in done.stdout) == bool(accelerated)
    assert ("-m pip install -e '.[tpu]'" in done.stdout) == bool(accelerated)


def test_a_machine_without_an_accelerator_is_not_told_of_one(machine):
    python = machine.python("python3.13", "3.13", accelerated=1)
    (machine.home / "dev/vfio").mkdir(parents=True)  # other devices are there too
    assert machine.run(f"mention_accelerator '{python}' '{machine.home}/dev'").stdout == ""


@pytest.mark.few(2)
@pytest.mark.parametrize("failing", ["", "train", "eval", "generate"])
def test_the_quickstart_is_its_steps_in_order_and_the_same_again(machine, failing):
    jaxlm = f'echo "jaxlm $*"; [ "$1" != "{failing}" ] || exit 74'
    made = f"printf '#!/bin/sh\\n%s\\n' '{jaxlm}' > .venv/bin/jaxlm; chmod +x .venv/bin/jaxlm"
    machine.python("python3.13", "3.13", pip=made)
    (machine.bin / "chmod").symlink_to(shutil.which("chmod"))
    shutil.copy(ROOT / "scripts/quickstart", machine.clone / "scripts")
    for start in range(2):
        done = machine.run('cd /; exec bash "$OLDPWD/scripts/quickstart"')
        assert done.returncode == (74 if failing else 0), done.stderr
        verbs = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("jaxlm ")]
        steps = ["train", "eval", "generate"]
        assert verbs == (steps[: steps.index(failing) + 1] if failing else steps)
        assert ("== .venv is up to date" in done.stdout) == bool(start)
        assert ("What to try next:" in done.stdout) == (not failing)
        assert done.stdout.count("--prompt=") == (
            0 if failing in steps[:2] else 3 if failing else 4
        )
    assert len(machine.installs) == 1


HURRIED = "--xla_backend_optimization_level=0 "
WORKERS = "-q -n logical --maxprocesses=8 --dist=loadfile"
FAST = [(".venv", WORKERS, HURRIED)]
SLOW = [
    *FAST,
    (
        ".venv",
        f"{WORKERS} -m slow and not alone and not parity and not cluster and not trackers and "
        "not gpu",
        "",
    ),
    (".venv", "-q -m alone", ""),
    (".venv-parity", WORKERS, HURRIED),
    (".venv-parity", "-q -m parity", ""),
    (".venv-ray", "-q -m cluster tests/corpus", ""),
    (".venv-trackers", "-q -m trackers tests/monitor/test_trackers.py", ""),
    (
        ".venv-tpu",
        "-q -m slow -k topology tests/house/test_readme.py tests/recipes/diagnose/test_topology.py",
        "",
    ),
]
GPU = (".venv-gpu", "-q -m gpu tests/faults/test_gpu.py", "")


def started(machine, words):
    """A run of the tests' script, and the environment, words and XLA flags of each pytest."""
    for name in ("scripts/test", "scripts/check", ".ci/run"):
        (machine.clone / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, machine.clone / name)
    done = machine.run(f'cd /; exec bash "$OLDPWD/"{words}')
    return done, re.findall(r"^pytest of (.*?): (.*); XLA_FLAGS=(.*)$", done.stdout, re.MULTILINE)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("words", "calls"),
    [
        ("scripts/test", FAST),
        (".ci/run", FAST),
        ("scripts/test --slow", SLOW),
        (".ci/run --slow", SLOW),
        ("scripts/test tests/ops -x", [(".venv", "-q tests/ops -x", "")]),
    ],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_the_tests_are_their_steps_in_order_and_fail_where_one_does(machine, words, calls, failing):
    machine.python("python3.11", "3.11", pytest=failing)
    machine.python("python3.13", "3.13", pytest=failing)
    done, steps = started(machine, words)
    assert (done.returncode, steps) == (failing, calls), done.stderr
    assert ("lint     ok" in done.stdout) == (calls != [(".venv", "-q tests/ops -x", "")])
    made = dict.fromkeys(environment for environment, *_ in calls)
    assert len(machine.installs) == len(made)
    assert done.stdout.count("/python3.11)") == (".venv-parity" in made), "the oldest jax"


def test_the_slow_tests_are_those_of_a_gpu_too_where_there_is_one(machine):
    for version in ("3.11", "3.13"):
        machine.python(f"python{version}", version)
    assert "C12 was left out" in started(machine, "scripts/test --slow")[0].stdout
    smi = machine.bin / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '| Driver Version: 550.5    CUDA Version: 12.4 |'\n")
    smi.chmod(0o755)
    done, steps = started(machine, "scripts/test --slow")
    assert (done.returncode, steps) == (0, [*SLOW, GPU]), done.stderr
    assert ".[cuda12,test]" in machine.installs[-1]


def test_a_failed_check_fails_the_tests_and_they_run_all_the_same(machine):
    machine.python("python3.13", "3.13", lint=1)
    done, steps = started(machine, "scripts/test")
    assert (done.returncode, steps) == (1, FAST)
    assert "lint     FAILED" in done.stdout


def test_a_failed_install_shows_the_last_words_and_is_tried_again(machine):
    machine.python("python3.13", "3.13", pip="echo 'ERROR: No space left on device'; exit 1")
    for attempt in (1, 2):
        done = machine.run("prepare .venv ''")
        assert done.returncode == 74
        assert done.stderr.endswith(
            "could not install jaxlm into .venv: ERROR: No space left on device\n"
        )
        assert len(machine.installs) == attempt


def test_tested_versions_that_are_nowhere_give_way_to_allowed_ones(machine):
    refuse = (
        'case "$*" in *" -c "*) echo "ERROR: No matching distribution found for jax==9"; '
        "exit 1 ;; esac"
    )
    machine.python("python3.13", "3.13", pip=refuse)
    done = machine.run("prepare .venv ''")
    assert done.returncode == 0, done.stderr
    assert "taking the newest that pyproject.toml allows" in done.stdout
    assert machine.installs[1].endswith("-e .")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("No matching distribution found for libtpu==0.0.17", 0, "libtpu cannot be installed here"),
        ("Could not install packages: [Errno 28] libtpu", 1, ".venv-tpu was not made"),
    ],
)
def test_only_a_libtpu_that_is_nowhere_leaves_compiling_for_tpus_out(machine, error, code, message):
    refuse = f'case "$*" in *tpu*) echo "ERROR: {error}"; exit 1 ;; esac'
    for version in ("3.11", "3.13"):
        machine.python(f"python{version}", version, pip=refuse)
    shutil.copy(ROOT / "scripts/test", machine.clone / "scripts")
    done = machine.run("exec bash scripts/test --slow tests/some")
    assert done.returncode == code, done.stderr
    assert f"== {message}" in done.stdout
    assert f"could not install jaxlm into .venv-tpu: ERROR: {error}" in done.stderr
    assert "== compiling for TPUs" not in done.stdout


def test_a_full_disk_is_said_before_anything_is_made(machine):
    machine.python("python3.13", "3.13")
    (machine.bin / "df").unlink()
    (machine.bin / "df").write_text("#!/bin/sh\nprintf 'Filesystem\\n/dev/a 1 1 102400 1%% /\\n'\n")
    (machine.bin / "df").chmod(0o755)
    done = machine.run("prepare .venv ''")
    assert done.returncode == 74
    assert "100 MB are free" in done.stderr
    assert not (machine.clone / ".venv").exists()


@pytest.mark.parametrize("name", ["setup.sh", "quickstart", "test", "check"])
def test_every_script_can_be_parsed(name):
    subprocess.run(["bash", "-n", ROOT / "scripts" / name], check=True)
    assert name == "setup.sh" or os.access(ROOT / "scripts" / name, os.X_OK)
