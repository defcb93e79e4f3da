"""Lines of the bar: what a client cannot reach, and what does not stop the server."""

import errno
import hmac
import http.client
import json
import os
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import openai
import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import OutOfMemory
from jaxlm.core.quoting import MAX_BYTES
from jaxlm.monitor import host_machine
from jaxlm.recipes.use import load
from jaxlm.serve import app, server
from jaxlm.serve.keys import ApiKeys, add_key
from jaxlm.serve.server import ServeOptions
from tests.faults.test_security import payloads

PROMPT = "1+2?"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.base, api_key="none", max_retries=0) as made:
        yield made


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(
        model="run", prompt=prompt, **{"max_tokens": 8, "seed": 1} | more
    )


def test_v10_each_digest_is_compared_in_constant_time(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    first, *_ = (add_key(file) for _ in range(3))
    keys, compared = ApiKeys(file), []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b)
    )
    assert keys.name_of(f"Bearer {first}") is not None
    assert keys.name_of("Bearer " + "x" * 1000) is keys.name_of("") is None
    assert compared == [(64, 64)] * 9


def test_v10_a_file_of_keys_that_changes_is_read_again_and_a_bad_one_changes_nothing(tmp_path):
    file, lines = tmp_path / "keys", []
    first, second = (add_key(file) for _ in range(2))
    keys = ApiKeys(file, lines.append)

    def accepted():
        return [keys.name_of(f"Bearer {key}") is not None for key in (first, second)]

    both = file.read_text()
    revoked = tmp_path / "next"
    revoked.touch(0o600)
    revoked.write_text(both.splitlines(keepends=True)[1])
    revoked.rename(file)
    assert accepted() == accepted() == [False, True]
    assert lines == ["the file of keys has changed: 1 keys"]
    for bad in ("no digest", "\udcff"):
        file.write_text(bad, errors="surrogateescape")
        assert accepted() == [False, True]
    file.write_text(both)
    file.chmod(0o644)
    assert accepted() == [False, True]
    file.unlink()
    assert accepted() == accepted() == [False, True]
    assert len(lines) == 5
    assert all(line.startswith("the keys are those of before: ") for line in lines[1:])
    revoked.touch(0o600)
    revoked.rename(file)
    assert accepted() == [False, False], "an empty file revokes the last key"
    assert keys, "and does not open the server"
    third = add_key(file)
    assert accepted() == [False, False]
    assert keys.name_of(f"Bearer {third}") is not None


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}],
        [{"type": "file", "file": {"file_id": "/etc/passwd"}}],
        [{"type": "input_audio", "input_audio": {"data": "file:///etc/passwd"}}],
    ],
)
def test_v11_no_content_of_a_message_names_a_file_or_an_address(client, content):
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(
            model="run", messages=[{"role": "user", "content": content}], max_tokens=1
        )
    assert refused.value.status_code == 422
    assert "content of text" in refused.value.message


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/v1/", "/v1/models/", "?v1/models"],
)
def test_v11_no_path_names_a_file_or_an_address(running, path):
    link = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    link.request("GET", path)
    assert link.getresponse().status == 404
    link.close()


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs", "tools", "documents"])
def test_v12_a_request_brings_no_template(client, field):
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(
            model="run", messages=MESSAGES, extra_body={field: "{{ 1 }}"}, max_tokens=1
        )
    assert refused.value.status_code == 400
    assert f"there is no field '{field}'" in refused.value.message


def test_v13_pages_of_other_origins_read_nothing(running):
    link = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "GET"):
        link.request(method, "/v1/models", headers=headers)
        answer = link.getresponse()
        answer.read()
        assert answer.status == {"OPTIONS": 405, "GET": 200}[method]
        names = {name.lower() for name, _ in answer.getheaders()}
        assert not any(name.startswith("access-control") for name in names)
        assert "set-cookie" not in names
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", ""):
        assert running.get("/v1/models", Host=host)[0] == 421
    link.close()


def test_v15_clients_with_different_keys_share_no_beginning_of_a_prompt(
    running, tmp_path, monkeypatch
):
    file = tmp_path / "keys"
    tokens = [add_key(file) for _ in range(2)]
    monkeypatch.setattr(running.server, "_keys", ApiKeys(file))
    prompt = [*range(50, 90)]

    def cached(key):
        with openai.OpenAI(base_url=running.base, api_key=key, max_retries=0) as client:
            return complete(client, prompt).usage.prompt_tokens_details.cached_tokens

    assert [cached(tokens[0]), cached(tokens[0]), cached(tokens[1])] == [0, 32, 0]


def test_v17_no_word_of_a_client_is_in_the_log(running):
    running.lines.clear()
    forged = "%0d%0aINFO%3a%20forged%1b%5b31m"
    link = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    body = json.dumps({"prompt": "\nforged", "model": "\nforged" + "x" * 5000})
    headers = {"Content-Type": "application/json", "User-Agent": "forged", "Referer": "forged"}
    for path in (f"/{forged}", f"/v1/completions?{forged}", "/v1/completions"):
        link.request("POST", path, body, headers)
        link.getresponse().read()
    link.close()
    assert len(running.lines) == 2  # an unknown path has none
    for line in running.lines:
        assert "forged" not in line
        assert line.isprintable()
        assert json.loads(line)["path"] == "/v1/completions"
        assert len(line) <= MAX_BYTES


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), ValueError("I/O operation on closed file")]
)
def test_v25_a_log_that_cannot_be_written_stops_no_request(client, running, monkeypatch, error):
    lines = []

    def log(line):
        lines.append(line)
        raise error

    monkeypatch.setattr(running, "log", log)
    before = running.engine.counters.drawn_tokens
    assert complete(client).usage.completion_tokens == 8
    assert len(lines) == 1
    assert running.engine.counters.drawn_tokens >= before + 8


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_v28_a_step_of_the_clock_ends_no_request(client, running, monkeypatch, jump):
    real, calls = time.time, []

    def stepped():
        calls.append(1)
        return real() + (jump if len(calls) % 2 else 0)

    monkeypatch.setattr(time, "time", stepped)
    choice = complete(client, max_tokens=40, extra_body={"timeout": 60, "ignore_eos": True})
    assert calls
    assert choice.usage.completion_tokens == 40
    assert choice.choices[0].finish_reason == "length"
    assert running.get("/health")[0] == 200


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_v29_a_checkpoint_that_is_deleted_or_replaced_changes_no_answer(
    client, running, trained, change
):
    def answer():
        (model,) = client.models.list()
        return complete(client, logprobs=2, temperature=1).choices, model.digest, model.step

    before = answer()
    os.rename(trained / "checkpoints", trained / "moved")
    if change == "replaced":
        shutil.copytree(trained / "moved", trained / "checkpoints")
        for file in filter(Path.is_file, (trained / "checkpoints").rglob("*")):
            file.write_bytes(file.read_bytes()[::-1])
    try:
        assert answer() == before
        assert running.get("/ready")[0] == 200
    finally:
        shutil.rmtree(trained / "checkpoints", ignore_errors=True)
        os.rename(trained / "moved", trained / "checkpoints")


def test_v18_a_draft_of_a_pickle_is_refused_and_not_run(trained, tmp_path, capsys):
    for name, bomb in payloads(tmp_path / "marker").items():
        draft = tmp_path / name.replace(" ", "_")
        draft.mkdir()
        shutil.copy(trained / "config.json", draft)
        for file in ("pytorch_model.bin", "model.safetensors", "draft.py"):
            (draft / file).write_bytes(bomb)
        assert main(["serve", f"--workdir={trained}", "--port=0", f"--draft={draft}"]) == 2
        assert "is a model of another library" in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()


def test_v30_a_server_beyond_the_memory_names_slots_and_a_context_that_fit(
    trained, monkeypatch, capsys
):
    monkeypatch.setattr(
        host_machine, "physical_bytes", lambda: 64 * 2**20 * jax.local_device_count()
    )
    flags = [f"--workdir={trained}", "--port=0", "--slots=4000", "--prefix_mib=8"]
    assert main(["serve", *flags]) == 71
    error = capsys.readouterr().err
    assert "4000 slots of 128 tokens do not fit the memory" in error
    fixes = [line.split()[-1] for line in error.splitlines() if "--slots=" in line]
    assert "Traceback" not in error
    most = int(fixes[-1].partition("--slots=")[2])
    assert 2 <= most < 4000
    opened, made = load.load_run(trained), []
    monkeypatch.setattr(server, "Engine", lambda *args, **more: made.append(args[3].rows) or Mock())
    server.build_engine(opened, ServeOptions(slots=most, prefix_mib=8))
    assert made == [most]
    with pytest.raises(OutOfMemory):
        server.build_engine(opened, ServeOptions(slots=most + 1, prefix_mib=8))
    # With a draft each slot is larger, and fewer fit.
    drafting = {"prefix_mib": 8, "draft": str(trained)}
    with pytest.raises(OutOfMemory) as refused:
        server.build_engine(opened, ServeOptions(slots=most, **drafting))
    assert " · draft " in str(refused.value)
    fewer = int(refused.value.fix.splitlines()[0].removeprefix("--slots="))
    assert 2 <= fewer < most
    server.build_engine(opened, ServeOptions(slots=fewer, **drafting))
    with pytest.raises(OutOfMemory) as refused:
        server.build_engine(opened, ServeOptions(slots=fewer + 1, **drafting))
    assert "--draft=lookup    # needs no run" in refused.value.fix.splitlines()
    monkeypatch.setattr(host_machine, "physical_bytes", lambda: 2**40)

    def fails(*args, **more):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(server, "Engine", fails)
    with pytest.raises(OutOfMemory) as refused:
        server.build_engine(opened, ServeOptions(slots=8))
    assert refused.value.fix.startswith("--slots=")
    assert "reported by the device" in str(refused.value)


def test_v3_a_body_of_unknown_fields_is_no_call(running):
    """Names of JavaScript's prototypes are plain names."""
    link = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    for name in ("__proto__", "constructor", "prototype"):
        body = json.dumps({"prompt": "a", name: {"max_tokens": 3}})
        link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = link.getresponse()
        assert answer.status == 400
        assert name in json.loads(answer.read())["error"]["message"]
    link.close()
    assert app.SECURITY["x-content-type-options"] == "nosniff"
