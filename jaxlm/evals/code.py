"""Programs that a model wrote, run with their tests in a process of their own.

The process has an empty environment and home folder, limits of time, memory, files and processes,
and no network if the kernel gives an ordinary user namespaces. It stops accidents. It is no
protection from an attacker: a program can read, and change, the files of the user who runs it.
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
import tempfile
import time
from pathlib import Path

PROGRAM = Path(__file__).with_name("code_program.py")
NAMESPACES = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
PASSED = "passed"  # as in code_program.py
SECONDS = 5.0
MEMORY_BYTES = 2**29
FILE_BYTES = 2**20
MOST_BYTES = 2**16  # of a report


@functools.cache
def namespaces() -> tuple[str, ...]:
    """Return the command that runs another one without network; empty if it is not permitted."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, *NAMESPACES)
    tried = subprocess.run([*command, "/bin/sh", "-c", ":"], capture_output=True, check=False)
    return command if tried.returncode == 0 else ()


def outcome(program: str, seconds: float = SECONDS) -> str:
    """Return "passed", the name of the exception that ended a program, "time limit" or "ended".

    Only a report with a nonce counts, which the program is not given: a program that exits, or
    prints, has not passed.

    Args:
      program: source of the program, with its tests at the end.
      seconds: limit of time.
    """
    nonce = secrets.token_hex(16)
    request = {
        "program": program,
        "nonce": nonce,
        "seconds": math.ceil(seconds),
        "memory": MEMORY_BYTES,
        "file": FILE_BYTES,
    }
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            process = subprocess.Popen(
                [*namespaces(), sys.executable, "-I", "-S", str(PROGRAM), str(writer)],
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
