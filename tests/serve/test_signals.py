"""The server as a process: drained by a signal, killed, started again."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest

pytestmark = pytest.mark.slow


def drain(stream):
    """Read a stream to its end and close it."""
    with stream:
        stream.read()


def started(workdir):
    """Return a server in a process of its own, and a client of it."""
    words = [
        sys.executable,
        "-m",
        "jaxlm",
        "serve",
        f"--workdir={workdir}",
        "--port=0",
        "--slots=2",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ)
    for line in process.stdout:
        if line.startswith("serving"):
            break
    threading.Thread(target=drain, args=[process.stdout]).start()
    client = openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0, timeout=120)
    return process, client


def streamed(client):
    return client.completions.create(
        model="run",
        prompt="1+2?",
        max_tokens=100,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def text_of(parts):
    return "".join(part.choices[0].text for part in parts)


def test_v23_v24_a_signal_ends_the_server_after_what_it_accepted_and_a_kill_loses_no_text(trained):
    process, client = started(trained)
    whole = text_of(streamed(client))
    streams = [iter(streamed(client)) for _ in range(2)]
    begun = [text_of([next(each)]) for each in streams]
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    with contextlib.suppress(openai.APIConnectionError), pytest.raises(openai.APIStatusError):
        streamed(client)
    assert [first + text_of(each) for first, each in zip(begun, streams, strict=True)] == [
        whole
    ] * 2
    assert process.wait(60) == 0

    process, client = started(trained)
    cut = iter(streamed(client))
    next(cut)
    process.send_signal(signal.SIGKILL)
    with contextlib.suppress(Exception):  # the library's own, for a connection that is cut
        for _ in cut:
            pass
    assert process.wait() == -signal.SIGKILL
    process, client = started(trained)
    assert text_of(streamed(client)) == whole
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
