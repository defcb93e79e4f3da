"""Replicas of `jaxlm serve` in Ray Serve, which starts them, sends them requests and replaces them.

  pip install 'jaxlm[serve]' 'ray[serve]'
  serve run --app-dir=scripts/launch ray_serve:app workdir=/runs/a replicas=2

`workdir` is a path that every machine of the cluster can read; other arguments are flags of `jaxlm
serve`, such as slots=32. A replica has a server of its own on loopback, in a thread of its process:
it ends with it, and its watchdog ends it. Later requests go to the other replicas. Ray's proxy has
no TLS, and the servers no --keys, which the probes of a replica do not have: put a proxy with both
before it.
"""

import functools
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import StreamingResponse

from jaxlm.cli.main import main
from jaxlm.training.launch import free_port

PASSED = ("content-type", "retry-after", "cache-control")  # headers, both ways


@serve.deployment(max_ongoing_requests=256, health_check_period_s=5)
class Replica:
    """One server, and the way to it. `flags` are those of `jaxlm serve`."""

    def __init__(self, flags: list[str]):
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        words = ["serve", f"--port={port}", *flags]
        self.thread = threading.Thread(target=main, args=[words], daemon=True)
        self.thread.start()
        while not self.answers("/ready"):
            if not self.thread.is_alive():
                raise RuntimeError("jaxlm serve has ended; its error is in the log of this replica")
            time.sleep(0.2)

    def answers(self, path: str) -> bool:
        """Return True if a page of the server answers 200."""
        try:
            with urllib.request.urlopen(self.base + path, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def check_health(self) -> None:
        """Raise an error, for which Ray replaces the replica, if the server cannot work."""
        if not self.answers("/health"):
            raise RuntimeError("jaxlm serve does not work; its error is in the log of this replica")

    @functools.cached_property
    def session(self) -> aiohttp.ClientSession:
        """Connections to the server, of the loop that answers requests."""
        return aiohttp.ClientSession(self.base, timeout=aiohttp.ClientTimeout())

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass on a request and the parts of its answer; a client that leaves cancels both."""
        body, path = await request.body(), request.url.path
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        answer = await self.session.request(request.method, path, data=body, headers=headers)

        async def parts() -> AsyncIterator[bytes]:
            async with answer:
                async for part in answer.content.iter_any():
                    yield part

        back = {name: answer.headers[name] for name in PASSED if name in answer.headers}
        return StreamingResponse(parts(), answer.status, back)


def app(args: dict[str, str]) -> Application:
    """Return the application for the arguments of `serve run`."""
    deployed: Any = Replica
    replicas = int(args.pop("replicas", "2"))
    flags = [f"--{name}={value}" for name, value in args.items()]
    return deployed.options(num_replicas=replicas).bind(flags)
