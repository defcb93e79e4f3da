"""The server as its clients see it: the `openai` package, and raw sockets."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import socket
import time
import urllib.request
from unittest.mock import Mock

import jax
import openai
import pytest
from starlette.testclient import TestClient

import jaxlm
from jaxlm.cli.main import main
from jaxlm.generate.requests import Delta
from jaxlm.objectives.config import Mixture, Weights
from jaxlm.recipes.config import Run
from jaxlm.recipes.use import load
from jaxlm.serve import guard
from jaxlm.serve import server as servers
from jaxlm.serve.app import Server
from jaxlm.serve.bridge import Bridge, Results
from jaxlm.serve.fields import RefusedRequest
from jaxlm.serve.keys import ApiKeys, add_key, read_keys
from jaxlm.serve.quotas import KeyLimits, Quotas
from tests import machine

PROMPT = "1+2?"


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.base, api_key="none", max_retries=0) as made:
        yield made


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(
        model="run", prompt=prompt, **{"max_tokens": 8, "seed": 1} | more
    )


def test_a_stream_is_the_whole_text_in_whole_characters(client):
    whole = complete(client, temperature=1.5, max_tokens=60)
    parts = [
        *complete(
            client,
            temperature=1.5,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(part.choices[0].text for part in parts[:-2])
    assert whole.usage.prompt_tokens == 1 + len(PROMPT)


@pytest.fixture
def lines_of(monkeypatch):
    """Return what `build_engine` prints for options, with an engine that compiles nothing."""
    from types import SimpleNamespace as Values

    model = Values(blueprint=Values(text_positions=None, config=None))
    opened = Values(model=model, run=Run(), params=None, tokenizer=None)
    monkeypatch.setattr(servers.drafts, "open_draft", lambda *_: None)
    fits = contextlib.nullcontext()
    monkeypatch.setattr(servers.oom, "explain_engine_oom", lambda *_, **__: fits)

    def lines(options, **engine):
        printed = []
        monkeypatch.setattr(servers, "Engine", Mock(return_value=Mock(**engine)))
        servers.build_engine(opened, options, printed.append)
        return printed

    return lines


def test_a_context_beyond_the_positions_is_a_caution(lines_of):
    most = Run().model.max_positions
    assert lines_of(servers.ServeOptions(context=most)) == []
    expected = f"caution: --context={most + 1} exceeds model.max_positions = {most}"
    assert lines_of(servers.ServeOptions(context=most + 1)) == [expected]


def test_a_server_prints_that_few_slots_have_other_bits_on_this_machine(lines_of):
    options = servers.ServeOptions(context=Run().model.max_positions)
    for has_few, draws_few in ((True, True), (False, False)):
        assert lines_of(options, has_few_slots=has_few, draws_few=draws_few) == []
    (line,) = lines_of(options, has_few_slots=True, draws_few=False, rows=8)
    assert "each token computes all 8 slots" in line


def test_a_text_is_that_of_jaxlm_generate(client, trained):
    from jaxlm.generate.config import GenerateConfig
    from jaxlm.recipes.use.generate import continue_prompts

    settings = GenerateConfig(
        prompts=(PROMPT,), max_tokens=12, temperature=0.9, top_k=30, seed=(5,)
    )
    (expected,) = continue_prompts(load.load_run(trained), settings)
    got = complete(client, max_tokens=12, temperature=0.9, seed=5, extra_body={"top_k": 30})
    assert got.choices[0].text == expected.text


def test_echo_has_the_scores_of_the_prompt_and_they_do_not_depend_on_the_cut(client, trained):
    both = complete(client, "3+4?5", echo=True, logprobs=2, max_tokens=0).choices[0]
    assert both.text == "3+4?5"
    scores = both.logprobs
    assert scores.tokens == ["<|bos|>", *"3+4?5"]
    assert scores.token_logprobs[0] is None
    expected = [-nats for nats in jaxlm.load(trained).score("3+4?5").nats]
    assert scores.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert scores.text_offset == [0, 0, 1, 2, 3, 4]
    assert all(len(each) == 2 for each in scores.top_logprobs[1:])
    ids = [1, *(b"3+4?5"[place] + 40 for place in range(5))]
    repeated = complete(client, ids, echo=True, logprobs=2, max_tokens=1).choices[0].logprobs
    assert repeated.token_logprobs[:6] == scores.token_logprobs


def test_choices_have_seeds_of_their_own_and_a_stop_ends_a_text(client):
    many = complete(client, n=3, temperature=2.0)
    assert len({each.text for each in many.choices}) == 3
    assert many.choices[1].text == complete(client, seed=2, temperature=2.0).choices[0].text
    whole = many.choices[0].text
    stop = next(each for each in whole if each.isascii())
    cut = complete(client, temperature=2.0, stop=["not there", stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_usage_has_no_end_token(client, running):
    eos = running.engine.tokenizer.eos
    ended = complete(client, logit_bias={str(eos): 100}, logprobs=1)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert (ended.usage.completion_tokens, ended.choices[0].logprobs.tokens) == (0, [])


def test_a_chat_is_answered_by_the_template_of_the_run(client):
    messages = [{"role": "user", "content": "Sure? \u20ac"}]
    whole = client.chat.completions.create(
        model="run", messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=1
    )
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    entries = choice.logprobs.content
    raw = bytes(value for each in entries for value in each.bytes)
    assert raw.decode("utf-8", "replace") == choice.message.content
    assert all(each.logprob == each.top_logprobs[0].logprob for each in entries)
    parts = client.chat.completions.create(
        model="run", messages=messages, max_tokens=6, temperature=0, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content


def test_a_chat_with_an_adapter_is_read_by_the_template_of_the_adapter(trained, tmp_path):
    """`jaxlm generate --chat --adapter` reads it so too."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    opened = load.load_run(trained)
    engine = Mock(vocab=opened.model.blueprint.config.vocab, context=64)
    options = servers.ServeOptions(adapter=str(tmp_path))
    served = servers.describe(opened, engine, options, "", print)
    with served.grammars:
        assert served.tokenizer.decode(served.chat.encode("ab")) == "ab?"


def test_weights_of_an_adapter_or_an_average_have_a_digest_of_their_own(trained):
    opened = load.load_run(trained)
    changed = dataclasses.replace(opened, params=jax.tree.map(lambda x: x + 1, opened.params))
    digests = [servers.digest_of(each, is_of_step=False) for each in (opened, opened, changed)]
    assert digests[0] == digests[1] != digests[2]
    assert servers.digest_of(opened, is_of_step=True) == servers.digest_of(changed, is_of_step=True)


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_a_mixture_with_rows_that_fill_in_the_middle_does_so(trained, weight):
    opened = load.load_run(trained)
    mixture = Mixture(weights=Weights(fim=weight))
    run = dataclasses.replace(opened.run, objective=mixture)
    opened = dataclasses.replace(opened, run=run)
    engine = Mock(vocab=opened.model.blueprint.config.vocab, context=64)
    served = servers.describe(opened, engine, servers.ServeOptions(), "", print)
    with served.grammars:
        assert served.is_infilling == bool(weight)


def test_a_canceled_stream_frees_its_slot(client, running):
    stream = complete(
        client, max_tokens=120, stream=True, extra_body={"ignore_eos": True}, temperature=1
    )
    next(iter(stream))
    stream.close()
    limit = time.monotonic() + 60
    while not running.engine.is_idle and time.monotonic() < limit:
        time.sleep(0.01)
    assert running.engine.is_idle


def test_a_client_that_leaves_before_its_answer_is_no_failure_of_the_server(running):
    running.lines.clear()
    body = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "n": 16}
    link = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    link.sendall(posted(json.dumps(body).encode()))
    limit = time.monotonic() + 60
    while running.engine.is_idle and time.monotonic() < limit:
        time.sleep(0.001)
    link.close()
    while not running.lines and time.monotonic() < limit:
        time.sleep(0.01)
    (line,) = map(json.loads, running.lines)
    assert line["status"] == 499
    assert 'jaxlm:rejected_total{status="499"} 1.0' in running.get("/metrics")[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_line_of_a_call_is_written_at_its_end_with_its_tokens(running, is_streamed):
    running.lines.clear()
    body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "stream": is_streamed}
    exchange(running, posted(json.dumps(body).encode()))
    limit = time.monotonic() + 60
    while not running.lines and time.monotonic() < limit:
        time.sleep(0.001)
    (line,) = map(json.loads, running.lines)
    assert line["prompt_tokens"] == 5
    assert line["completion_tokens"] == 20


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_tokens_of_a_client_that_leaves_are_counted(running, monkeypatch, is_streamed):
    """They were drawn: of a stream, of an answer as a whole, and if the sending fails."""
    before, drawn = running.get("/metrics")[1], running.engine.counters.drawn_tokens
    body = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "n": 2}
    link = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    tick = running.engine.tick  # the choices must not end before the client leaves
    monkeypatch.setattr(running.engine, "tick", lambda: (time.sleep(0.02), tick()))
    link.sendall(posted(json.dumps(body | {"stream": is_streamed}).encode()))
    limit = time.monotonic() + 60
    while running.engine.counters.drawn_tokens < drawn + 20 and time.monotonic() < limit:
        time.sleep(0.001)
    link.close()
    count = f"{CANCELLED} {cancelled(before) + 2:.1f}"
    while count not in running.get("/metrics")[1] and time.monotonic() < limit:
        time.sleep(0.01)
    after = running.get("/metrics")[1]
    assert count in after
    drawn = running.engine.counters.drawn_tokens - drawn
    assert 10 <= counted_tokens(after) - counted_tokens(before) <= drawn < 240


CANCELLED = 'jaxlm:request_success_total{finished_reason="cancelled"}'


def cancelled(metrics):
    counted = re.search(f"^{re.escape(CANCELLED)} (.+)$", metrics, re.M)
    return float(counted[1]) if counted else 0.0


def events_of(deltas, sent=None):
    """The events of a stream of two choices with these deltas, and the metrics after it."""
    server = Server(Mock(engine=None), ApiKeys(None), print)
    results = Results(Mock())
    results.tickets = [Mock(), Mock()]
    for part in deltas:
        results.put(part)
    response = Mock(usage={"prompt_tokens": 3, "completion_tokens": 5})
    response.chunk = lambda number, delta: f"{number}: {delta.text}"
    response.last = lambda: "end"

    async def collect():
        events = server._events(results, response, time.monotonic())
        async with contextlib.aclosing(events):
            return [await anext(events) for _ in range(sent)] if sent else [x async for x in events]

    return asyncio.run(collect()), server.metrics.text()


def test_a_stream_without_a_token_has_no_time_to_the_first_one():
    failed = Delta("", (), (), "cancelled", ())
    _, metrics = events_of([(0, failed), (1, failed)])
    assert "jaxlm:time_to_first_token_seconds_count 0.0" in metrics
    assert "jaxlm:inter_token_latency_seconds_count 0.0" in metrics
    assert f"{CANCELLED} 2.0" in metrics


def test_a_choice_that_fails_ends_the_stream_with_one_error():
    """The other choice is canceled then, which is no error of the server."""
    deltas = Delta("a", (5,), (), None, ()), Delta("", (), (), "grammar", ())
    events, metrics = events_of([*enumerate(deltas), (0, Delta("", (), (), "cancelled", ()))])
    assert [events[0], events[2:]] == ["0: a", ["end"]]
    assert b"grammar became too complex" in events[1]
    assert "jaxlm:time_to_first_token_seconds_count 1.0" in metrics
    assert f"{CANCELLED} 1.0" in metrics


def test_a_stream_that_cannot_be_sent_is_counted():
    _, metrics = events_of([(0, Delta("a", (5,), (), None, ()))], sent=1)
    assert "jaxlm:generation_tokens_total 5.0" in metrics
    assert f"{CANCELLED} 2.0" in metrics


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"max_tokens": 200}, 422, "5 prompt tokens and 200 new ones exceed the context of 128"),
        ({"prompt": "x" * 5000}, 422, "cannot fit"),
        ({"prompt": [999999]}, 422, "not from 0 to"),
        ({"prompt": []}, 422, "prompt"),
        ({"n": 1000}, 422, "n must be from 1 to 128"),
        ({"temperature": -1}, 422, "temperature must be at least 0"),
        ({"logprobs": 21}, 422, "logprobs must be from 0 to 20"),
        ({"logit_bias": {"9999999": 1}}, 422, "an id is not from 0"),
        ({"logit_bias": {"a": 1}}, 422, "is no id"),
        ({"stop": ["x"] * 17}, 422, "at most 16 stops"),
        ({"suffix": "x"}, 400, "fill in the middle"),
        ({"model": "gpt-4"}, 404, "this one is 'run'"),
        ({"extra_body": {"max_token": 3}}, 400, "the nearest one is max_tokens"),
        ({"extra_body": {"seed": True}}, 422, "seed is true or false, not an integer"),
    ],
)  # fmt: skip
def test_v2_v3_a_wrong_request_is_refused_with_its_field(client, more, status, words):
    body = {"model": "run", "prompt": PROMPT, "max_tokens": 4} | more
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(**body)
    assert refused.value.status_code == status
    assert words in refused.value.message


def exchange(running, data, *, seconds=30.0):
    """Send bytes and return all that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=seconds) as link:
        link.sendall(data)
        parts = []
        while more := link.recv(65536):
            parts.append(more)
    return b"".join(parts)


def posted(body, *headers, length=None):
    length = len(body) if length is None else length
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"Content-Length: {length}", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"prompt": "a", "prompt": "b"}', 400),
        (b'{"temperature": NaN}', 400),
        (b'{"temperature": 1e999}', 400),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", 400),
        (b'{"prompt": ' + b"[" * 100_000, 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "\xff"}', 400),
        (b"\xef\xbb\xbf{}", 400),
        (b"[]", 400),
    ],
)
def test_v7_a_body_that_is_no_plain_json_object_is_refused(running, body, status):
    answer = exchange(running, posted(body))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_v1_v5_v8_limits_of_the_transport(running):
    assert b" 413 " in exchange(running, posted(b"", length=3 * 2**20))[:20]
    many = [f"X-{number}: a" for number in range(70)]
    assert b" 431 " in exchange(running, posted(b"{}", *many))[:20]
    long = posted(b"{}", "X-Long: " + "a" * 20_000)
    assert b" 431 " in exchange(running, long)[:20]
    # A folded header stands for one with a space, so that it hides no second length.
    for chunked in ("Transfer-Encoding: chunked", "Transfer-Encoding:\r\n chunked"):
        assert b" 400 " in exchange(running, posted(b"{}", chunked))[:20]
    folded = posted(b"{}").replace(b"Content-Length: 2", b"Content-Length: 2\r\n 0")
    assert b" 400 " in exchange(running, folded)[:20]
    twice = posted(b"{}", "Content-Length: 3")
    assert b" 400 " in exchange(running, twice)[:20]
    other = posted(b"{}").replace(b"Host: localhost", b"Host: evil.example")
    assert b" 421 " in exchange(running, other)[:20]
    form = posted(b"{}").replace(b"application/json", b"text/plain")
    assert b" 415 " in exchange(running, form)[:20]


def test_v6_half_a_header_and_half_a_body_are_closed_by_a_deadline(running, monkeypatch):
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    with pytest.raises((ConnectionResetError, AssertionError)):
        assert exchange(running, b"POST /v1/completions HTT")
    assert b" 408 " in exchange(running, posted(b"{", length=100))[:20]


@pytest.mark.parametrize("sent", [b"", posted(b"", length=1000)], ids=["headers", "a body"])
def test_v6_bytes_that_come_slowly_do_not_prolong_a_deadline(running, monkeypatch, sent):
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.4)
    with socket.create_connection(("127.0.0.1", running.port), timeout=0.05) as link:
        link.sendall(sent)
        answer, begun = b"", time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < 20:
                link.sendall(b"a")
                with contextlib.suppress(TimeoutError):
                    if not (more := link.recv(65536)):
                        break
                    answer += more
        machine.require_clock(time.monotonic() - begun, 4)
    assert answer == b"" if not sent else b" 408 " in answer[:20]


def test_v6_a_client_that_does_not_read_is_cut_off(running, monkeypatch):
    monkeypatch.setattr(guard, "WRITE_SECONDS", 0.2)
    connected = guard.GuardedProtocol.connection_made

    def with_small_buffer(self, transport):  # else the kernel takes the whole answer
        end = transport.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connected(self, transport)

    monkeypatch.setattr(guard.GuardedProtocol, "connection_made", with_small_buffer)
    more = {"max_tokens": 100, "n": 2, "logprobs": 20, "ignore_eos": True, "stream": True}
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(20)
        link.connect(("127.0.0.1", running.port))
        link.sendall(posted(json.dumps({"prompt": PROMPT} | more).encode()))
        assert link.recv(12).endswith(b" 200")
        limit = time.monotonic() + 20
        while not running.engine.is_idle and time.monotonic() < limit:
            time.sleep(0.02)
        time.sleep(0.5)
        received = []
        with contextlib.suppress(ConnectionError):
            while part := link.recv(65536):
                received.append(part)
    assert b"data: " in b"".join(received)
    assert b"[DONE]" not in b"".join(received)


def test_v4_a_full_queue_answers_429_and_when_to_come_back(client, running, monkeypatch):
    monkeypatch.setattr(running.engine, "max_waiting", 1)
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client, n=60, max_tokens=100, extra_body={"ignore_eos": True})
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_a_key_beyond_its_limits_answers_429_and_other_keys_are_answered(
    running, tmp_path, monkeypatch
):
    keys = tmp_path / "keys"
    clients = [
        openai.OpenAI(base_url=running.base, api_key=add_key(keys), max_retries=0) for _ in range(2)
    ]
    clock = [0.0]

    def limited(**limits):
        monkeypatch.setattr(running.server, "_keys", ApiKeys(keys))
        monkeypatch.setattr(running.server, "quotas", Quotas(KeyLimits(**limits), lambda: clock[0]))

    def refused(client, **more):
        with pytest.raises(openai.APIStatusError) as error:
            complete(client, **more)
        headers = error.value.response.headers
        return error.value.status_code, headers.get("retry-after")

    limited(calls=2)
    for _ in range(2):
        complete(clients[0])
    assert refused(clients[0]) == (429, "30")
    complete(clients[1])
    names = [json.loads(line)["key"] for line in running.lines[-4:]]
    first, second = read_keys(keys).values()
    assert names == [first] * 3 + [second]
    clock[0] += 30
    complete(clients[0])
    limited(tokens=100)
    assert refused(clients[0], max_tokens=100) == (422, None)
    complete(clients[0], max_tokens=60)
    assert refused(clients[0], max_tokens=60)[0] == 429
    limited(calls=1, tokens=100)
    with monkeypatch.context() as patch:
        patch.setattr(running.bridge, "submit", Mock(side_effect=RefusedRequest(429, "full")))
        assert refused(clients[0], max_tokens=60)[0] == 429
    complete(clients[0], max_tokens=60)  # the refused call took nothing from its key
    limited(running=1)
    tick = running.engine.tick  # the stream must not end before the other call arrives
    monkeypatch.setattr(running.engine, "tick", lambda: (time.sleep(0.1), tick()))
    stream = complete(clients[0], max_tokens=100, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert refused(clients[0]) == (429, "1")
    stream.close()
    while running.server.quotas._running.total():
        time.sleep(0.05)
    complete(clients[0])
    for each in clients:
        each.close()


def counted_tokens(metrics):
    counted = re.search(r"^jaxlm:generation_tokens_total (\S+)$", metrics, re.M)
    return float(counted[1])


def test_tokens_text_models_and_metrics(running, client):
    def post(path, body):
        data = json.dumps(body).encode()
        raw = posted(data).replace(b"/v1/completions", path)
        return json.loads(exchange(running, raw).partition(b"\r\n\r\n")[2])

    tokens = post(b"/tokenize", {"prompt": "\u20ac!", "add_special_tokens": True})
    assert tokens["count"] == 5
    assert tokens["max_model_len"] == 128
    assert post(b"/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "\u20ac!"}
    assert [each.id for each in client.models.list()] == ["run"]
    assert running.get("/health")[0] == running.get("/ready")[0] == 200
    assert json.loads(running.get("/tokenizer_info")[1])["eos_token"] == "<|eos|>"
    compiles = running.engine.counters.compiles
    drawn = running.engine.counters.drawn_tokens
    counted = counted_tokens(running.get("/metrics")[1])
    assert complete(client, logprobs=1, temperature=0.7).usage.completion_tokens == 8
    metrics = running.get("/metrics")[1]
    assert counted_tokens(metrics) == counted + 8
    assert f"jaxlm:compiles_total {compiles:.1f}" in metrics
    assert "jaxlm:num_requests_running 0.0" in metrics
    counters = running.engine.counters
    tokens = counters.prompt_tokens + counters.cached_tokens + counters.drawn_tokens
    cost = float(re.search(r"^jaxlm:cost_per_million_tokens (\S+)$", metrics, re.M)[1])
    assert cost == pytest.approx(2.0 * counters.seconds / 3600 / tokens * 1e6, rel=0.05)
    assert 8 <= running.engine.counters.drawn_tokens - drawn <= 9
    assert running.get("/nothing")[0] == 404
    assert "the routes are /, /health" in running.get("/nothing")[1]
    assert "the nearest is /v1/models" in running.get("/v1/model")[1]
    assert "/v1/completions takes POST, not GET" in running.get("/v1/completions")[1]


def test_v11_v14_the_page_runs_its_own_script_alone_and_inserts_text_as_text(running):
    with urllib.request.urlopen(running.root + "/") as answer:
        policy, text = answer.headers["content-security-policy"], answer.read().decode()
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    refused = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "http:", "https:")
    assert [each for each in refused if each in text] == []


def test_v9_v10_every_route_but_health_needs_a_key_and_the_file_is_private(
    running, trained, tmp_path, capsys
):
    file = tmp_path / "keys"
    assert main(["serve", f"--keys={file}", "--add_key", "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert key not in file.read_text()
    app = Server(Bridge(None), ApiKeys(file), print).app()
    routes = (
        "/",
        "/ready",
        "/metrics",
        "/v1/models",
        "/v1/completions",
        "/tokenizer_info",
        "/none",
    )
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/health").status_code == 200
        for route in routes:
            absent = client.get(route)
            wrong = client.get(route, headers={"Authorization": "Bearer jaxlm-wrong"})
            assert absent.status_code == wrong.status_code == 401
            assert absent.content == wrong.content
        good = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert good.status_code == 503
    file.chmod(0o644)
    assert main(["serve", f"--workdir={trained}", f"--keys={file}"]) == 2
    assert "others can read the file of keys" in capsys.readouterr().err
    assert main(["serve", f"--workdir={trained}", "--host=0.0.0.0"]) == 2
    assert "needs keys" in capsys.readouterr().err
    assert main(["serve", f"--workdir={trained}", f"--port={running.port}"]) == 2
    taken = capsys.readouterr().err
    assert "cannot be listened on" in taken
    assert "--port=0" in taken
