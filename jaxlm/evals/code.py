"""Programs that a model wrote, run with their tests in a process of their own.

The process has an empty environment and a home folder in memory, limits of time, memory and files,
and system calls that start processes, signal and connect fail. If the kernel gives an ordinary user
namespaces, it sees no files but Python's own, and no other process. Otherwise it reads, and may
change, the files of the user who runs it.

The tests run in the process of the program, so a program that looks for the report can forge it.
"""

import contextlib
import functools
import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("code_program.py")
NAMESPACES = ("--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts")
KILLED = ("--fork", "--kill-child")  # all processes of the namespace end with unshare
PASSED = "passed"  # as in code_program.py
SECONDS = 5.0
MEMORY_BYTES = 2**29
FILE_BYTES = 2**20
MOST_BYTES = 2**16  # of a report
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/urandom")

Example = tuple[str, str, str | None]  # source, output and last line of the exception


@functools.cache
def namespaces() -> tuple[str, ...]:
    """Return the command that runs another one in namespaces; empty if they are not permitted."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, *NAMESPACES, *KILLED)
    return command if _outcome("", SECONDS, command, {}) == PASSED else ()


def outcome(
    program: str,
    seconds: float = SECONDS,
    *,
    tests: str = "",
    examples: Sequence[Example] = (),
    memory: int = MEMORY_BYTES,
    isolate: bool | None = None,
) -> str:
    """Return "passed", the name of the exception that ended a program, "time limit" or "ended".

    Only a report with a nonce counts, which the program is not given: a program that exits, or
    prints, has not passed.

    Args:
      program: source of the program, perhaps with its tests at the end.
      seconds: limit of time.
      tests: source that runs after the program, with Python's own functions in place of those that
        the program replaced; values of its comparisons have types of Python.
      examples: examples that run after the tests.
      memory: limit of memory in bytes.
      isolate: use namespaces; None uses them if they are permitted.
    """
    command = namespaces() if isolate or isolate is None else ()
    request = {"tests": tests, "examples": examples, "memory": memory}
    return _outcome(program, seconds, command, request)


def _outcome(program: str, seconds: float, command: tuple[str, ...], request: Any) -> str:
    nonce = secrets.token_hex(16)
    request = {
        "tests": "",
        "examples": (),
        "memory": MEMORY_BYTES,
        **request,
        "program": program,
        "nonce": nonce,
        "seconds": math.ceil(seconds),
        "file": FILE_BYTES,
        "visible": _visible() if command else None,
    }
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            process = subprocess.Popen(
                [*command, sys.executable, "-I", "-S", str(PROGRAM), str(writer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"HOME": home},
                cwd=home,
                pass_fds=(writer,),
                start_new_session=True,
            )
            try:
                os.close(writer)
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin as stream:
                    stream.write(json.dumps(request).encode())
                report, is_late = _read(reader, time.monotonic() + seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    finally:
        os.close(reader)
    sent, _, result = report.decode(errors="replace").partition(" ")
    if secrets.compare_digest(sent.encode(), nonce.encode()):
        return result
    return "time limit" if is_late else "ended"


def _visible() -> list[str]:
    """Return the paths of Python and its libraries, none inside another, and of devices."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    python.append(sysconfig.get_config_var("LIBDIR") or "")
    present = {os.path.abspath(path) for path in (*python, *LIBRARIES) if os.path.exists(path)}
    return [p for p in sorted(present) if not any(p.startswith(f"{o}/") for o in present)] + [
        *DEVICES
    ]


def _read(pipe: int, deadline: float) -> tuple[bytes, bool]:
    """Return what is written to a pipe until it closes, and if the deadline passed before."""
    content = b""
    while len(content) < MOST_BYTES:
        ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return content, True
        part = os.read(pipe, MOST_BYTES)
        if not part:
            break
        content += part
    return content, False
