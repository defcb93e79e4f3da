"""Local web page on which people choose between texts of two runs without their names.

The server listens on the loopback interface. The key in its address is needed for each request,
and other names of the host are refused, so that no other page or user of the machine can rate.
"""

import base64
import hashlib
import hmac
import http.server
import json
import re
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxlm.core.errors import CommandError, JaxlmError
from jaxlm.evals.ratings import Rating
from jaxlm.monitor import report, sinks
from jaxlm.monitor.sinks import Jsonl
from jaxlm.recipes.rate import texts
from jaxlm.recipes.rate.texts import TextPair

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
MAX_BYTES = 64 * 1024  # of a choice with its note
MAX_NAME = 64  # characters of a rater's name
MAX_NOTE = 2000
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
SIDES = {"left": 0, "right": 1}


class Session:
    """Pairs of texts to rate, and the file that receives each choice.

    Args:
      names: RUN@STEP of runs A and B.
      pairs: the texts; a pair of equal texts is not shown.
      file: the file of ratings, open for appending.
      earlier: ratings of the file; a rater is not shown the same pair again.
      seed: of the order of pairs and of the sides, which differ by rater.
    """

    def __init__(
        self,
        names: Sequence[str],
        pairs: Sequence[TextPair],
        file: Jsonl,
        earlier: Sequence[Rating] = (),
        seed: int = 0,
    ):
        self.names, self.seed = names, seed
        self.pairs = {each.id: each for each in pairs if each.a != each.b}
        self._rated = {(each.rater, each.id) for each in earlier}
        self._lock = threading.Lock()
        self._file = file

    def next(self, rater: str) -> dict[str, Any]:
        """Return the next pair of a rater as JSON, without the names of the runs."""
        with self._lock:
            left = [each for each in self.pairs if (rater, each) not in self._rated]
        progress = {"done": len(self.pairs) - len(left), "of": len(self.pairs)}
        if not left:
            return progress
        chosen = min(left, key=lambda each: self._draw(rater, each, "place"))
        pair = self.pairs[chosen]
        names = dict(zip(SIDES, self._order(rater, chosen), strict=True))
        shown = {side: getattr(pair, name) for side, name in names.items()}
        return progress | {"id": chosen, "prompt": pair.prompt} | shown

    def rate(self, answer: Any) -> None:
        """Append a choice to the file.

        Raises:
          ValueError: if the answer is not a choice between the texts of a pair.
          SaveFailed: if the disk is full.
          NotWritable: if the file cannot be written.
        """
        if not isinstance(answer, dict):
            raise ValueError("a choice is a JSON object")
        rater, side = answer.get("rater"), answer.get("choice")
        note, seconds = answer.get("note", ""), answer.get("seconds", 0)
        pair = self.pairs.get(str(answer.get("id")))
        if pair is None:
            raise ValueError("there is no such pair of texts")
        if not (isinstance(rater, str) and 0 < len(rater) <= MAX_NAME):
            raise ValueError(f"a rater has a name of 1 to {MAX_NAME} characters")
        if side not in (*SIDES, "tie", "skip"):
            raise ValueError("a choice is left, right, tie or skip")
        if not (isinstance(note, str) and len(note) <= MAX_NOTE):
            raise ValueError(f"a note is a text of up to {MAX_NOTE} characters")
        if not sinks.is_number(seconds):
            raise ValueError("seconds is a number")
        order = self._order(rater, pair.id)
        choice = order[SIDES[side]] if side in SIDES else side
        record = texts.rating(pair, self.names, order, choice, rater)
        record |= {"seconds": round(seconds, 3), "note": note}
        with self._lock:
            self._file.write(record)
            self._rated.add((rater, pair.id))

    def _draw(self, rater: str, pair: str, purpose: str) -> bytes:
        text = json.dumps([self.seed, rater, pair, purpose])
        return hashlib.sha256(text.encode()).digest()

    def _order(self, rater: str, pair: str) -> str:
        return "ab" if self._draw(rater, pair, "side")[0] % 2 else "ba"


class RatingServer(http.server.ThreadingHTTPServer):
    """A server on the loopback interface, whose `session` is set before it serves.

    Port 0 takes a free one. Raises CommandError if the port is not free.
    """

    daemon_threads = True
    session: Session

    def __init__(self, port: int = 0):
        self.key = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise CommandError(
                "the page has no port",
                where=f"--port={port}",
                why=f"{type(error).__name__}: {error}",
                fix="--port=0    # takes a free one",
            ) from error

    @property
    def address(self) -> str:
        """Return the address of the page, with its key."""
        return f"http://{HOST}:{self.server_port}/?key={self.key}"


def page() -> tuple[bytes, str]:
    """Return the page, and the content security policy that allows its own script and style."""
    text = PAGE.replace("/* style */", report.STYLE, 1)
    sources = {
        kind: base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for kind, content in INLINE.findall(text)
    }
    inline = "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in sources.items())
    policy = f"default-src 'none'; connect-src 'self'; {inline}; base-uri 'none'"
    return text.encode(), f"{policy}; form-action 'none'; frame-ancestors 'none'"


class _Handler(http.server.BaseHTTPRequestHandler):
    """Routes / and /next of GET, and /rate of POST."""

    server: RatingServer
    timeout = 30  # seconds of an idle connection

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._is_allowed(url.query):
            return
        if url.path == "/":
            body, policy = page()
            self._send(HTTPStatus.OK, body, "text/html; charset=utf-8", policy)
        elif url.path == "/next":
            rater = parse_qs(url.query).get("rater", [""])[0][:MAX_NAME]
            self._answer(HTTPStatus.OK, self.server.session.next(rater))
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        if not self._is_allowed(url.query):
            return
        size = self.headers.get("Content-Length", "")
        if url.path != "/rate" or not size.isdecimal() or int(size) > MAX_BYTES:
            self.close_connection = True
            self._answer(HTTPStatus.BAD_REQUEST, {"error": "this is not a choice"})
            return
        try:
            self.server.session.rate(json.loads(self.rfile.read(int(size))))
        except (ValueError, RecursionError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except JaxlmError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})
        else:
            self._answer(HTTPStatus.OK, {})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address has the key."""

    def _is_allowed(self, query: str) -> bool:
        """Return if the request has the key and this host's name; else refuse the request."""
        key = parse_qs(query).get("key", [""])[0]
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") in hosts and hmac.compare_digest(
            key.encode(errors="replace"), self.server.key.encode()
        ):
            return True
        self.close_connection = True
        error = "the address needs the key that jaxlm rate printed"
        self._answer(HTTPStatus.FORBIDDEN, {"error": error})
        return False

    def _answer(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        self._send(status, json.dumps(answer).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, policy: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy or "default-src 'none'",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
