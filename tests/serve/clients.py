"""Clients of a server: they ask, leave, and send what is refused.

An answer that is none of those that a call may get raises Surprise.
"""

import contextlib
import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxlm.serve.fields import MAX_BODY

TIMEOUT = 120  # seconds that an answer may take on a machine with other work
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"max_tokens": 24, "seed": 7, "logprobs": 3, "ignore_eos": True}
LONG = "".join(f"{a}+{b}? " for a in range(5) for b in range(4))
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer"}},
    "required": ["size"],
    "additionalProperties": False,
}
# What has one answer, bit for bit.
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, ASKED | {"prompt": "1+2?", "temperature": 0}),
    "drawn": (TEXT, ASKED | {"prompt": "3+4?", "temperature": 1.3, "top_p": 0.9, "n": 2}),
    "long": (TEXT, ASKED | {"prompt": LONG, "max_tokens": 12}),
    "scored": (TEXT, ASKED | {"prompt": LONG, "echo": True, "max_tokens": 0}),
    "stopped": (TEXT, ASKED | {"prompt": "0+1?", "stop": ["1", "e"], "presence_penalty": 0.5}),
    "chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "1+2?"}],
            "max_tokens": 16,
            "seed": 3,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    "schema": (
        TEXT,
        {
            "prompt": "1+2?",
            "max_tokens": 60,
            "seed": 5,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ),
}
ENDLESS = {"prompt": "1+2?", "max_tokens": 100, "seed": 9, "ignore_eos": True}
NESTED = {
    "$ref": "#/$defs/a0",
    "$defs": {
        f"a{n}": {"type": "object", "properties": {"b": {"$ref": f"#/$defs/a{(n + 1) % 400}"}}}
        for n in range(400)
    },
}
GRAMMARS: tuple[tuple[dict[str, Any], set[int]], ...] = (
    ({"structured_outputs": {"regex": "[0-9]{1,3} cm"}}, {200}),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, {200}),
    ({"response_format": {"type": "json_object"}}, {200}),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, {200, 400}),
    ({"structured_outputs": {"json": NESTED}}, {200, 400}),
    ({"structured_outputs": {"grammar": "start: missing"}}, {400}),
)
WRONG: tuple[tuple[bytes | dict[str, Any], int], ...] = (
    (b"{", 400),
    (b"\xff", 400),
    (b'{"prompt": ' + b"[" * 100_000, 400),
    (b'{"temperature": NaN}', 400),
    ({"prompt": "a", "maxtokens": 3}, 400),
    ({"prompt": "a", "max_tokens": 10**6}, 422),
    ({"prompt": "a" * 2000}, 422),
    ({"prompt": "a", "temperature": -1}, 422),
    ({"prompt": "a", "n": 1000}, 422),
    ({"prompt": [10**6]}, 422),
    ({"prompt": "a", "stop": ["x"] * 17}, 422),
)
PAGES = ("/", "/health", "/ready", "/metrics", "/v1/models", "/tokenizer_info")


class Surprise(AssertionError):
    """A server did what it must not do."""


class Client:
    """Calls of one client, drawn at random.

    Args:
      port: the port of the server on this machine.
      token: a key that is accepted.
      answers: the facts of each question's answer, see `facts`.
      tolerance: difference of log-probabilities that is allowed.
      draw: random numbers.
    """

    def __init__(
        self,
        port: int,
        token: str,
        answers: dict[str, Any],
        tolerance: float,
        draw: random.Random,
    ):
        self._port, self._token, self._answers = port, token, answers
        self._tolerance, self.draw = tolerance, draw
        # Calls, and how often each is drawn.
        self.calls: dict[str, tuple[Callable[[], int], int]] = {
            "question": (lambda: self.ask(draw.choice([*QUESTIONS])), 8),
            "stream": (lambda: self.ask_as_stream(draw.choice([*QUESTIONS])), 4),
            "other question": (self.ask_anything, 4),
            "left stream": (self.leave_stream, 3),
            "left question": (self.leave_question, 2),
            "half of a head": (self.send_half_of_head, 1),
            "half of a body": (self.send_half_of_body, 1),
            "slow reader": (self.read_slowly, 1),
            "wrong key": (self.use_wrong_key, 2),
            "wrong request": (self.send_wrong, 4),
            "large body": (self.send_large_body, 1),
            "grammar": (self.send_grammar, 2),
            "page": (self.get_page, 2),
        }

    def call(self) -> tuple[str, int]:
        """Make one of the calls; return its name and the status, 0 if the client has left."""
        weights = [weight for _, weight in self.calls.values()]
        (name,) = self.draw.choices([*self.calls], weights)
        return name, self.calls[name][0]()

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        """Return the status and the text of a page."""
        with self._sent("GET", path, None, token) as response:
            return response.status, response.read().decode()

    def ask(self, name: str) -> int:
        """Ask a question; the answer is that of before, or the first one."""
        path, body = QUESTIONS[name]
        answer = facts(json.loads(self._post(path, body, {200})[1]))
        expected = self._answers.setdefault(name, answer)
        if not is_same(answer, expected, self._tolerance):
            raise Surprise(f"another answer to {name!r}:\n{answer}\nnot\n{expected}")
        return 200

    def ask_as_stream(self, name: str) -> int:
        """Ask a question whose answer comes in parts."""
        path, body = QUESTIONS[name]
        with self._sent("POST", path, body | {"stream": True}) as response:
            if response.status != 200:
                raise Surprise(f"{response.status} to {name!r}: {response.read()}")
            texts = texts_of(response)
        expected = {number: text for number, (text, *_) in enumerate(self._answers[name][0])}
        if texts != {number: text for number, text in expected.items() if text}:
            raise Surprise(f"another stream of {name!r}: {texts}, not {expected}")
        return 200

    @contextlib.contextmanager
    def stream(self, **more: Any) -> Iterator[http.client.HTTPResponse]:
        """Yield the response of a long text whose first part has come."""
        with self._sent("POST", TEXT, ENDLESS | {"stream": True} | more) as response:
            if response.status != 200 or not response.peek():
                raise Surprise(f"{response.status} to a stream: {response.read()}")
            yield response

    def ask_anything(self) -> int:
        """Ask what was not asked before."""
        draw = self.draw
        body = {
            "prompt": "".join(draw.choices("0123456789+? ", k=draw.randint(1, 90))),
            "max_tokens": draw.randint(1, 30),
            "temperature": draw.choice([0, 0.7, 2]),
            "top_k": draw.choice([1, 5, 50]),
            "n": draw.randint(1, 3),
        }
        return self._post(TEXT, body, {200})[0]

    def leave_stream(self) -> int:
        """Close a stream, sometimes with a reset, after some of its parts."""
        link = self._connected(self._request("POST", TEXT, ENDLESS | {"stream": True}))
        with link:
            for _ in range(self.draw.randrange(8)):
                link.recv(200)
            if self.draw.random() < 0.5:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return 0

    def leave_question(self) -> int:
        """Close the connection before the answer comes."""
        with self._connected(self._request("POST", TEXT, ENDLESS | {"n": 2})):
            time.sleep(self.draw.uniform(0, 0.3))
        return 0

    def send_half_of_head(self) -> int:
        """Send a part of a request's head, and leave."""
        request = self._request("POST", TEXT, ENDLESS)
        with self._connected(request[: self.draw.randrange(1, request.index(b"\r\n\r\n"))]):
            time.sleep(self.draw.uniform(0, 2))
        return 0

    def send_half_of_body(self) -> int:
        """Send a part of a request's body, and leave."""
        request = self._request("POST", TEXT, ENDLESS)
        with self._connected(request[: self.draw.randrange(-30, -1)]):
            time.sleep(self.draw.uniform(0, 2))
        return 0

    def read_slowly(self) -> int:
        """Let a stream wait before it is read."""
        with self.stream() as response:
            time.sleep(self.draw.uniform(0, 2))
            texts_of(response)
        return 200

    def use_wrong_key(self) -> int:
        """Ask with a key that is not accepted."""
        path = self.draw.choice([*PAGES[2:], TEXT])
        return self._expected(self.get(path, "jaxlm-wrong"), {401}, path)[0]

    def send_wrong(self) -> int:
        """Send what is no request, or one that is not allowed."""
        body, status = self.draw.choice(WRONG)
        path = self.draw.choice([TEXT, CHAT]) if isinstance(body, bytes) else TEXT
        return self._post(path, body, {status})[0]

    def send_large_body(self) -> int:
        """Announce a body beyond the limit, and send a part of it."""
        request = self._request("POST", TEXT, b"{" * 10_000, length=2 * MAX_BODY)
        with self._connected(request) as link:
            answer = link.recv(100)
        if not answer.startswith(b"HTTP/1.1 413"):
            raise Surprise(f"a large body: {answer!r}")
        return 413

    def send_grammar(self) -> int:
        """Ask for a text with a grammar, which may be wrong or grow without end."""
        fields, statuses = self.draw.choice(GRAMMARS)
        body = fields | {"prompt": "1+2?", "max_tokens": 20, "seed": self.draw.randrange(1000)}
        return self._post(TEXT, body, statuses)[0]

    def get_page(self) -> int:
        """Get a page."""
        path = self.draw.choice(PAGES)
        return self._expected(self.get(path), {200}, path)[0]

    def _post(self, path: str, body: bytes | dict[str, Any], statuses: set[int]) -> tuple[int, str]:
        with self._sent("POST", path, body) as response:
            answer = response.status, response.read().decode()
        return self._expected(answer, statuses, str(body)[:500])

    def _expected(self, answer: tuple[int, str], statuses: set[int], asked: str) -> tuple[int, str]:
        if answer[0] not in statuses:
            raise Surprise(f"{answer[0]}, not one of {statuses}, to {asked}: {answer[1][:500]}")
        return answer

    @contextlib.contextmanager
    def _sent(
        self, method: str, path: str, body: bytes | dict[str, Any] | None, token: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        with self._connected(self._request(method, path, body, token=token)) as link:
            response = http.client.HTTPResponse(link, method=method)
            with response:
                response.begin()
                yield response

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None,
        *,
        length: int | None = None,
        token: str | None = None,
    ) -> bytes:
        content = json.dumps(body).encode() if isinstance(body, dict) else body or b""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"Authorization: Bearer {token or self._token}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(content) if length is None else length}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + content

    def _connected(self, data: bytes) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT)
        try:
            link.sendall(data)
        except OSError:
            link.close()
            raise
        return link


def facts(answer: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """Return what of an answer depends on the question alone.

    For each choice the text, the reason of its end and log-probabilities; and the counts of tokens.
    """
    choices = [
        (
            each["text"] if "text" in each else each["message"]["content"],
            each["finish_reason"],
            each["logprobs"],
        )
        for each in answer["choices"]
    ]
    return choices, [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion")]


def is_same(one: Any, other: Any, tolerance: float) -> bool:
    """Return True if two answers are equal, numbers within a tolerance."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or abs(one - other) <= tolerance
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            is_same(one[key], other[key], tolerance) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(
            is_same(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    return one == other


def texts_of(response: http.client.HTTPResponse) -> dict[int, str]:
    """Return the text of each choice of a stream that ends as it should.

    Raises Surprise for an error or a missing end.
    """
    texts: dict[int, str] = {}
    for line in response:
        if line.strip() == b"data: [DONE]":
            return texts
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise Surprise(f"a stream has the error {event['error']}")
            for choice in event["choices"]:
                part = choice["text"] if "text" in choice else choice["delta"].get("content")
                if part:
                    texts[choice["index"]] = texts.get(choice["index"], "") + part
    raise Surprise(f"a stream has no end: {texts}")
