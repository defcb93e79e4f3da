"""Deadlines of connections, which uvicorn does not have: headers, bodies and slow readers."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxlm.serve.fields import MAX_BODY, RefusedRequest

HEADER_SECONDS = 10.0
BODY_SECONDS = 30.0
WRITE_SECONDS = 60.0  # in which a client must read something
MAX_HEADER_BYTES = 16 * 2**10
MAX_HEADERS = 64
MAX_PATH_BYTES = 8 * 2**10
MAX_CONNECTIONS = 4096

# In the log and the metrics; no client reads it.
CLIENT_LEFT = RefusedRequest(499, "the client has left")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for the request line and the headers of each request."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the deadline of the first request."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Read bytes; the deadline of a later request starts with its first bytes."""
        if self._is_between_requests():
            self._await_headers()
        super().data_received(data)
        if not self._is_between_requests():
            self._cancel_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._cancel_timer()
        super().connection_lost(exc)

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def with_write_deadline(app: App) -> App:
    """Return the app with a deadline for each write; a client that does not read is cut off."""

    async def guarded(scope: Message, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(WRITE_SECONDS):
                await send(message)

        await app(scope, receive, send_in_time)

    return guarded


async def read_body(headers: Any, receive: Receive) -> bytes:
    """Return the body of a request. Raises RefusedRequest if it is too long or too slow."""
    too_long = RefusedRequest(413, f"the body has more than {MAX_BODY} bytes", connection="close")
    if int(headers.get("content-length") or 0) > MAX_BODY:
        raise too_long
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise CLIENT_LEFT
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY:
                    raise too_long
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        message_408 = f"the body did not arrive in {BODY_SECONDS:g} s"
        raise RefusedRequest(408, message_408, connection="close") from None
