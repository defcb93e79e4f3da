"""A process that renders untrusted Jinja templates under limits, and its requests.

The worker, `chat_worker`, reads JSON lines: a head with the templates and limits, then requests.
It answers each request with one JSON line.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS = 10  # of CPU time for one request
MEMORY = 2**30  # bytes of the rendering process
WORKER = Path(__file__).with_name("chat_worker.py")


class SandboxProcess:
    """A rendering process, with `SECONDS` of CPU time a request and `MEMORY`.

    Args:
      head: templates and options of the worker, as JSON values.
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._head = json.dumps({**head, "seconds": SECONDS, "bytes": MEMORY}).encode() + b"\n"

    def __enter__(self) -> "SandboxProcess":
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def request(self, items: Any) -> Any:
        """Return the worker's answer, or {"error": why} if it exceeded a limit or failed."""
        process, head = self._process, b""
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if self._head:
            head, self._head = self._head, b""
        # A busy machine gives less than a whole processor.
        limit = threading.Timer(6 * SECONDS, process.kill)
        limit.start()
        try:
            process.stdin.write(head + json.dumps(items).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it ended before it read all
            line = b""
        finally:
            limit.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = process.wait()
        if code < 0:
            return {"error": f"it needs more than {SECONDS} seconds or {MEMORY / 2**30:g} GiB"}
        assert process.stderr is not None
        last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return {"error": f"its process ended with {code}: {''.join(last)}"}
