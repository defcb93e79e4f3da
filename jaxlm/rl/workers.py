"""Worker processes that call reward functions under limits of time and memory.

A worker that exceeds the time of a call, ends, or leaves processes behind is stopped with all that
it started; the next call has a new one.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import nearest_word
from jaxlm.core.user_code import Source
from jaxlm.rl.verifiers import Unscorable

PROGRAM = Path(__file__).with_name("worker.py")
START_SECONDS = 120.0  # to import what the files of the user import
CALLS = 1000  # of a worker
MOST_BYTES = 2**16  # of an answer
ROUNDS = 100  # to find processes that start others while they are stopped
# Rewards are computed during training, whose devices they must not take.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
Files = Mapping[str, tuple[Source, Sequence[str]]]


class Worker:
    """A process that calls the functions of files.

    Args:
      files: content and called functions of each file, by the name that the config has.
      seconds: limit of time of a call.
      memory: limit of memory in bytes.
    """

    def __init__(self, files: Files, seconds: float, memory: int) -> None:
        self._files, self._seconds, self._memory = files, seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._requests, self._results, self._calls = -1, -1, 0

    def start(self) -> None:
        """Start the process. Raises ConfigError if a file fails or has no such function."""
        if self._process is not None:
            return
        (theirs, self._requests), (self._results, answers) = os.pipe(), os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                pass_fds=(theirs, answers),
                start_new_session=True,
            )
        finally:
            os.close(theirs)
            os.close(answers)
        self._calls = 0
        files = [
            {
                "name": name,
                "path": str(source.path),
                "content": source.content.decode("utf-8", "replace"),
                "functions": functions,
            }
            for name, (source, functions) in self._files.items()
        ]
        line = self._exchange({"bytes": self._memory, "files": files}, START_SECONDS)
        if problem := json.loads(line) if line else {"path": "", "error": self._end(line)}:
            self.stop()
            raise _refused(problem)

    def call(self, request: Mapping[str, Any]) -> float:
        """Return the value of a call. Raises Unscorable with the reason if it has none."""
        return float(self._value(request))

    def text(self, request: Mapping[str, Any]) -> str | None:
        """Return the text of a call with `is_text`, None if it has none. Raises Unscorable."""
        value = self._value(request)
        return value if value is None else str(value)

    def _value(self, request: Mapping[str, Any]) -> Any:
        self.start()
        line = self._exchange(request, self._seconds)
        self._calls += 1
        if not line:
            raise Unscorable(self._end(line))
        try:
            answer = json.loads(line)
            is_last = answer["children"] or self._calls >= CALLS
        except (ValueError, KeyError, TypeError):
            self.stop()
            raise Unscorable("its process sent no answer") from None
        if is_last:
            self.stop()
        if "error" in answer:
            raise Unscorable(str(answer["error"]))
        return answer["value"]

    def _end(self, line: bytes | None) -> str:
        """Stop the process that gave no answer, and return the reason."""
        code = self.stop()
        if line is None:
            return f"it exceeded reward.seconds={self._seconds:g}"
        return f"its process ended with {code}"

    def _exchange(self, request: Any, seconds: float) -> bytes | None:
        """Return the answer of the process; empty if it ended, None if it exceeded the time."""
        deadline = time.monotonic() + seconds
        content = json.dumps(request).encode() + b"\n"
        os.set_blocking(self._requests, False)
        answer = b""
        while not answer.endswith(b"\n") and len(answer) < MOST_BYTES:
            left = deadline - time.monotonic()
            waits_for = [self._requests] if content else []
            readable, writable, _ = select.select([self._results], waits_for, [], max(left, 0))
            if not readable and not writable:
                return None
            try:
                if writable:
                    content = content[os.write(self._requests, content) :]
            except BrokenPipeError:
                return b""
            if readable:
                part = os.read(self._results, MOST_BYTES)
                if not part:
                    return b""
                answer += part
        return answer

    def stop(self) -> int:
        """Kill the process and all that it started; return its exit code, negative for a signal."""
        process, self._process = self._process, None
        if process is None:
            return 0
        code = _ended(process)
        with contextlib.suppress(ProcessLookupError):
            # Stopped, it adopts the children of those that are killed, and starts no other.
            process.send_signal(signal.SIGSTOP)
        for _ in range(ROUNDS):
            alive = _descendants(process.pid)
            for each in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            if not alive:
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(self._requests)
        os.close(self._results)
        return process.returncode if code is None else code


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process that has closed its pipes; None if it is alive."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.05)
    return None


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they did, on Linux."""
    alive: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                alive += _descendants(child)
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                alive += [child] if state != "Z" else []
    return alive


def _refused(problem: Mapping[str, Any]) -> ConfigError:
    """Return the error of a file that failed, or that lacks a function."""
    path, name = problem["path"], problem.get("name")
    if name is None:
        where = f"{path}:{problem.get('line', 1)}" if path else "reward.functions"
        return ConfigError(
            f"a file of reward functions failed: {problem['error']}",
            where=where,
            why="a worker process runs the file before the first step",
            fix="correct that line; --config.reward.bytes=4294967296 if it needs more memory",
        )
    meant = nearest_word(name, problem["functions"]) or next(iter(problem["functions"]), None)
    fix = "def shape(completion, answer): ...    # returns a number"
    if meant:
        fix = shlex.quote(f"--config.reward.functions={path}:{meant}=1")
    known = ", ".join(problem["functions"])
    return ConfigError(
        f"{Path(path).name}:{name} is no reward function",
        where=f"reward.functions = {path}:{name}",
        why=problem["error"] + (f"; the file has {known}" if known else ""),
        fix=fix,
    )
