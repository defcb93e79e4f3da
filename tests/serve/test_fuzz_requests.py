"""Requests that are damaged, as JSON and as bytes: `bash scripts/soak --fuzz` is longer."""

import http.client
import json
import os
import random
import socket
import time
from collections import Counter

import pytest

from jaxlm.serve import guard
from tests.faults.fuzz.test_fuzz import changed, damaged, mutated
from tests.serve.clients import ENDLESS, GRAMMARS, QUESTIONS, TEXT, WRONG
from tests.serve.test_serve import posted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
CALLS = 300  # of each kind, however little time there is
SECONDS = 30  # in which an answer must come
ALLOWED = {200, 400, 404, 405, 408, 413, 414, 415, 421, 422, 429, 431}
CLOSED = 0  # without an answer, as for a request that has no end
BODIES = (
    *QUESTIONS.values(),
    (TEXT, ENDLESS | {"stream": True, "stream_options": {"include_usage": True}}),
    (TEXT, ENDLESS | {"logit_bias": {"70": 3.0}, "stop": ["a"], "suffix": None, "n": 2}),
    *((TEXT, {"prompt": "1+2?", "max_tokens": 9} | fields) for fields, _ in GRAMMARS),
    *((TEXT, body) for body, _ in WRONG if isinstance(body, dict)),
    ("/tokenize", {"prompt": "1+2?", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [70, 71, 72]}),
)


def send_json(port, draw):
    """Send a body with one to three changed values; return the status and what was sent."""
    path, body = draw.choice(BODIES)
    content = (
        mutated(body, draw) if draw.random() < 0.5 else json.dumps(changed(body, draw)).encode()
    )
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    link.request("POST", path, content, {"Content-Type": "application/json"})
    answer = link.getresponse()
    text = answer.read()
    link.close()
    assert answer.status == 200 or json.loads(text)["error"]["code"] == answer.status
    return answer.status, path, content


def send_bytes(port, draw):
    """Send a request with damaged bytes in its head or body; return the status and the bytes."""
    _, body = draw.choice(BODIES)
    content = posted(json.dumps(body).encode(), "Authorization: Bearer a", "X-Long: " + "x" * 50)
    content = (
        draw.randbytes(draw.randint(1, 300)) if draw.random() < 0.1 else damaged(content, draw)
    )
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as link:
        try:
            link.sendall(content)
            answer = link.recv(12)
            while answer and draw.random() < 0.9 and link.recv(2**16):
                pass
        except ConnectionError:
            answer = b""
    return int(answer[9:12] or CLOSED), content


@pytest.mark.parametrize("send", [send_json, send_bytes])
def test_v33_a_damaged_request_is_answered_in_time_and_leaves_nothing(
    running, monkeypatch, record_property, send
):
    minutes, seed = (float(os.environ.get(f"JAXLM_FUZZ_{name}", 0)) for name in ("MINUTES", "SEED"))
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    draw, statuses, longest = random.Random(f"{send.__name__} {seed}"), Counter(), 0.0
    deadline = time.monotonic() + 60 * minutes
    while statuses.total() < CALLS or time.monotonic() < deadline:
        begun = time.monotonic()
        status, *sent = send(running.port, draw)
        longest = max(longest, time.monotonic() - begun)
        statuses[status] += 1
        assert status in ALLOWED or (status == CLOSED and send is send_bytes), sent
        assert running.get("/health")[0] == 200, sent
    limit = time.monotonic() + SECONDS
    while not running.engine.is_idle and time.monotonic() < limit:
        time.sleep(0.01)
    assert running.engine.is_idle
    assert running.engine.waiting_tokens == running.engine.counters.compiles == 0
    assert running.engine.failure is None
    shown = dict(sorted(statuses.items()))
    name = send.__name__.removeprefix("send_")
    record_property("table", f"V33: {statuses.total()} of {name}, {shown}, {longest:.1f} s at most")
