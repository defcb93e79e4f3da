"""Lines of the bar: many clients at once, and clients that leave or never end."""

import asyncio
import json
import random
import resource
import socket
import time

import pytest

from jaxlm.serve import guard
from tests.serve.test_serve import posted

pytestmark = pytest.mark.slow
BODY = {"prompt": "1+2?", "max_tokens": 8, "seed": 1, "ignore_eos": True}


def body(**more):
    return json.dumps(BODY | more).encode()


async def ask(port, data, *, cut_after=None):
    """Return the status of a call and its seconds; leave after `cut_after` seconds."""
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(cut_after):
            answer = await reader.read()
        return int(answer.split(b" ", 2)[1]), time.monotonic() - begun
    except TimeoutError:
        return None, time.monotonic() - begun
    finally:
        writer.transport.abort()


def together(port, calls):
    async def all_of_them():
        return await asyncio.gather(*(ask(port, data, **more) for data, more in calls))

    return asyncio.run(all_of_them())


def wait_until_idle(running):
    limit = time.monotonic() + 60
    while not running.engine.is_idle and time.monotonic() < limit:
        time.sleep(0.01)
    assert running.engine.is_idle


def resident_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_v21_a_thousand_clients_at_once_are_answered_or_told_when_to_come_back(
    running, monkeypatch, record_property
):
    monkeypatch.setattr(running.engine, "max_waiting", 500 * 13)
    ((status, _),) = together(running.port, [(posted(body()), {})])
    assert status == 200
    before = resident_bytes()
    answers = together(running.port, [(posted(body()), {})] * 1000)
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 500
    assert len(statuses) == 1000
    assert resident_bytes() - before < 200 * 2**20
    wait_until_idle(running)
    assert running.engine.waiting_tokens == 0
    seconds = sorted(seconds for status, seconds in answers if status == 429)
    assert seconds[int(0.99 * len(seconds))] < 5
    record_property("table", f"V21: {statuses.count(200)} answered, {statuses.count(429)} refused")


def test_v22_clients_that_leave_at_any_moment_leave_nothing_behind(running, record_property):
    draw = random.Random(0)
    calls = []
    for number in range(400):
        settings = {"max_tokens": 100, "seed": number, "stream": bool(number % 2)}
        calls.append((posted(body(**settings)), {"cut_after": draw.uniform(0.0, 3.0)}))
    sizes = []
    for _ in range(2):
        cut = sum(status is None for status, _ in together(running.port, calls))
        assert cut >= 200
        wait_until_idle(running)
        assert running.engine.running == running.engine.waiting == 0
        assert running.engine.waiting_tokens == 0
        metrics = running.get("/metrics")[1]
        assert "jaxlm:num_requests_running 0.0" in metrics
        assert "jaxlm:num_requests_waiting 0.0" in metrics
        sizes.append(resident_bytes())
    assert sizes[1] - sizes[0] < 50 * 2**20
    record_property("table", f"V22: {cut} of 400 calls cut, twice; nothing is left")


def test_v6_five_hundred_clients_that_never_end_do_not_hold_up_another(
    running, monkeypatch, record_property
):
    """Half a header, half a body, and one that never reads."""
    monkeypatch.setattr(guard, "HEADER_SECONDS", 5.0)
    monkeypatch.setattr(guard, "BODY_SECONDS", 5.0)

    def least():
        seconds = []
        for _ in range(60):
            ((status, took),) = together(running.port, [(posted(body(max_tokens=30)), {})])
            assert status == 200
            seconds.append(took)
        return min(seconds)

    alone = least()
    forms = [b"POST /v1/completions HTT", posted(b"{", length=100), b""]
    links = []
    for number in range(500):
        links.append(socket.create_connection(("127.0.0.1", running.port), timeout=30))
        links[-1].sendall(forms[number % 3])
    assert len(links) == 500
    crowded = least()
    limit = time.monotonic() + 30
    closed = 0
    for link in links:
        link.settimeout(max(0.1, limit - time.monotonic()))
        try:
            while link.recv(65536):
                pass
            closed += 1
        except ConnectionResetError:
            closed += 1
        link.close()
    assert closed == 500
    assert crowded < 1.1 * alone + 0.005
    record_property("table", f"V6: {alone * 1e3:.0f} ms alone, {crowded * 1e3:.0f} with 500 others")
