"""Replicas of `jaxlm serve` in Ray Serve, which starts them, sends them requests and replaces them.

  pip install 'jaxlm[serve]' 'ray[serve]'
  serve run --app-dir=scripts/launch ray_serve:app workdir=/runs/a replicas=2

`workdir` is a path that every machine of the cluster can read; other arguments are flags of `jaxlm
serve`, such as slots=32. A replica has a server of its own on loopback, in a thread of its process:
it ends with it, and its watchdog ends it. A request whose replica ends gets an error, later ones go
to the others. Ray's proxy has no keys and no TLS: put one with both before it.
"""

import asyncio
import threading

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
    """One server, and the way to it."""

    async def __init__(self, flags: list[str]):
        port = free_port()
        words = ["serve", f"--port={port}", *flags]
        self.thread = threading.Thread(target=main, args=[words], daemon=True)
        self.thread.start()
        self.http = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout()
        )
        while not await self.answers("/ready"):
            if not self.thread.is_alive():
                raise RuntimeError("jaxlm serve has ended; its error is in the log of this replica")
            await asyncio.sleep(0.2)

    async def answers(self, path: str) -> bool:
        """Return True if a page of the server answers 200."""
        try:
            async with self.http.get(path) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def check_health(self) -> None:
        """Raise an error, for which Ray replaces the replica, if the server cannot work."""
        if not await self.answers("/health"):
            raise RuntimeError("jaxlm serve does not work; its error is in the log of this replica")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass on a request and the parts of its answer; a client that leaves cancels both."""
        body, path = await request.body(), request.url.path
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        answer = await self.http.request(request.method, path, data=body, headers=headers)

        async def parts():
            async with answer:
                async for part in answer.content.iter_any():
                    yield part

        back = {name: answer.headers[name] for name in PASSED if name in answer.headers}
        return StreamingResponse(parts(), answer.status, back)


def app(args: dict[str, str]) -> Application:
    """Return the application for arguments of `serve run`."""
    replicas = int(args.pop("replicas", "2"))
    flags = [f"--{name}={value}" for name, value in args.items()]
    return Replica.options(num_replicas=replicas).bind(flags)
