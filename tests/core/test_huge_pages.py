import os
import subprocess
import sys

import pytest

from jaxlm.cli.main import COMPUTING, VERBS

PROGRAM = """
import os, sys
from pathlib import Path
from jaxlm.core import huge_pages

huge_pages.MODE = Path(sys.argv[1])
if "forked" in sys.argv:
    sys.argv = ["jaxlm", "train"]
if "debugger" in sys.argv:
    sys.settrace(lambda *_: None)
print(os.getpid(), "before")
sys.stdout.flush()
huge_pages.use()
print(os.environ.get("GLIBC_TUNABLES"))
"""


def lines(mode, tunables, folder, *words):
    """Return the lines of a process that requests huge pages, on a system of that mode."""
    file = folder / "enabled"
    if mode:
        file.write_text(mode)
    environment = {name: text for name, text in os.environ.items() if name != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("mode", "tunables", "expected"),
    [
        ("always [madvise] never\n", None, "glibc.malloc.hugetlb=1"),
        ("always [madvise] never\n", "glibc.malloc.check=0", "check=0:glibc.malloc.hugetlb=1"),
    ],
)
def test_a_process_restarts_once_where_programs_have_to_request_them(
    mode, tunables, expected, tmp_path
):
    first, second, variable = lines(mode, tunables, tmp_path)
    assert first == second  # the same process
    assert variable.endswith(expected)


@pytest.mark.parametrize(
    ("mode", "tunables"),
    [
        ("[always] madvise never\n", None),
        ("always madvise [never]\n", None),
        ("", None),
        ("always [madvise] never\n", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_process_stays_elsewhere_and_where_a_value_is_set(mode, tunables, tmp_path):
    _, variable = lines(mode, tunables, tmp_path)
    assert variable == str(tunables)


@pytest.mark.parametrize("state", ["debugger", "forked"])
def test_a_process_with_a_debugger_or_of_another_program_stays(tmp_path, state):
    _, variable = lines("always [madvise] never\n", None, tmp_path, state)
    assert variable == "None"


ENTRY = """
import sys
from jaxlm.cli import main
from jaxlm.core import huge_pages

huge_pages.use = lambda: print("restarted", flush=True)
main.entry()
"""


@pytest.mark.parametrize(("verb", "is_restarted"), [("bench", True), ("docs", False)])
def test_a_verb_restarts_if_it_computes(verb, is_restarted):
    assert set(VERBS) > COMPUTING
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, verb, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("restarted\nusage" if is_restarted else "usage")
