"""`jaxlm rate`: a page that hides the runs, and a file that has each choice as it is made."""

import http.client
import json
import signal
import subprocess
import sys
import threading

import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import CommandError, NotWritable
from jaxlm.recipes.rate import server, texts
from jaxlm.recipes.rate.texts import TextPair
from tests.faults import harness

NAMES = ("runs/secret-a@1", "runs/secret-b@2")
PAIRS = [TextPair(f"prompt {n}", f"<b>a{n}</b>", f"b{n}") for n in range(20)]


@pytest.fixture
def rating(tmp_path):
    """A server that runs, a function that sends requests to it, and the file of ratings."""
    file = tmp_path / "new" / "ratings.jsonl"
    with server.RatingServer() as serving:
        serving.session = server.Session(
            NAMES, [*PAIRS, TextPair("same", "x", "x")], texts.open_ratings(file)
        )
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def send(method, path, body=None, key=serving.key, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", serving.server_port, timeout=10)
            connection.request(method, f"{path}key={key}", body, headers)
            with connection.getresponse() as answer:
                result = answer.status, answer.read().decode(), dict(answer.headers)
            connection.close()
            return result

        yield serving, send, file
        serving.shutdown()
        thread.join()
        serving.session._file.close()


def choose(send, rater, choice, **more):
    """Rate the next pair; return it as it was shown."""
    shown = json.loads(send("GET", f"/next?rater={rater}&")[1])
    body = json.dumps({"id": shown["id"], "rater": rater, "choice": choice, "seconds": 2.5} | more)
    status, text, _ = send("POST", "/rate?", body)
    assert (status, text) == (200, "{}")
    return shown


def test_a_choice_is_a_line_of_the_text_that_was_on_that_side(rating):
    _, send, file = rating
    shown = [choose(send, "ann", "left", note="why") for _ in range(10)]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["order"] for line in lines} == {"ab", "ba"}
    assert [line["prompt"] for line in lines] != [pair.prompt for pair in PAIRS[:10]]
    for each, line in zip(shown, lines, strict=True):
        assert line["chosen"] == each["left"] == line[line["choice"]]
        assert line["rejected"] == each["right"]
        assert (line["run_a"], line["run_b"], line["seconds"]) == (*NAMES, 2.5)
    choose(send, "bob", "tie")
    choose(send, "bob", "skip")
    *_, tie, skip = [json.loads(line) for line in file.read_text().splitlines()]
    assert (tie["choice"], skip["choice"], "chosen" in tie) == ("tie", "skip", False)
    assert main(["rate", "--report", str(file), "--quiet"]) == 0


def test_the_rater_sees_each_pair_once_and_never_a_name_of_a_run(rating):
    serving, send, file = rating
    seen = [choose(send, "ann", "right") for _ in PAIRS]
    assert {each["prompt"] for each in seen} == {pair.prompt for pair in PAIRS}
    status, end, _ = send("GET", "/next?rater=ann&")
    assert (status, json.loads(end)) == (200, {"done": 20, "of": 20})
    everything = json.dumps(seen) + send("GET", "/?")[1]
    assert "secret" not in everything
    # The same command continues after the ratings of the file.
    continued = server.Session(NAMES, PAIRS, serving.session._file, texts.read_ratings(file))
    assert continued.next("ann") == {"done": 20, "of": 20}
    assert continued.next("bob")["done"] == 0


def test_the_page_runs_no_script_but_its_own_and_needs_the_key_and_the_host(rating):
    _, send, file = rating
    status, page, headers = send("GET", "/?")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "innerHTML" not in page
    body = json.dumps({"id": PAIRS[0].id, "rater": "eve", "choice": "left"})
    assert send("POST", "/rate?", body, key="wrong")[0] == 403
    assert send("POST", "/rate?", body, Host="evil.example")[0] == 403
    assert send("GET", "/next?", key="")[0] == 403
    assert file.read_text() == ""


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"id": "none"},
        {"id": PAIRS[0].id, "rater": "", "choice": "left"},
        {"id": PAIRS[0].id, "rater": "x" * 65, "choice": "left"},
        {"id": PAIRS[0].id, "rater": "eve", "choice": "a"},
        {"id": PAIRS[0].id, "rater": "eve", "choice": "left", "note": 5},
        {"id": PAIRS[0].id, "rater": "eve", "choice": "left", "note": "x" * 2001},
        "{",
        "[" * 60_000,
        "x" * 70_000,
    ],
)
def test_what_is_no_choice_is_refused_and_not_written(rating, answer):
    _, send, file = rating
    body = answer if isinstance(answer, str) else json.dumps(answer)
    assert send("POST", "/rate?", body)[0] == 400
    assert file.read_text() == ""


def test_a_port_or_a_file_that_is_taken_is_refused_before_texts_are_written(tmp_path):
    with server.RatingServer() as serving:
        with pytest.raises(CommandError) as refused:
            server.RatingServer(serving.server_port)
        assert refused.value.fix.startswith("--port=0 ")
        server.RatingServer(0).server_close()
    (tmp_path / "ratings.jsonl").mkdir()
    with pytest.raises(NotWritable) as refused:
        texts.open_ratings(tmp_path / "ratings.jsonl")
    assert refused.value.fix == "--out=ratings-2.jsonl"
    texts.open_ratings(tmp_path / refused.value.fix.removeprefix("--out=")).close()


@pytest.mark.slow
def test_two_runs_are_rated_through_the_command_line(tmp_path):
    config = harness.write_config(tmp_path, {"train.steps": 1})
    runs = [tmp_path / "first", tmp_path / "second"]
    for seed, run in enumerate(runs):
        assert main(harness.words(config, run, f"--config.seed={seed}")) == 0
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\none\nthree\n")
    out = tmp_path / "ratings.jsonl"
    words = [f"{runs[0]}@1", str(runs[1]), f"--prompts={prompts}", f"--out={out}", "--max_tokens=8"]
    command = [sys.executable, "-m", "jaxlm", "rate", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        address = next(line for line in process.stdout if line.startswith("open "))
        host, _, key = address.split()[1].removeprefix("http://").partition("/?")
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("GET", f"/next?rater=ann&{key}")
        shown = json.loads(connection.getresponse().read())
        answer = json.dumps({"id": shown["id"], "rater": "ann", "choice": "left"})
        connection.request("POST", f"/rate?{key}", answer)
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        report = process.stdout.read()
        timer.cancel()
    assert process.returncode == 0, report
    assert f"{runs[1]}@1 / {runs[0]}@1" in report
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert line["prompt"] in ("one", "two", "three")
    assert line["chosen"] == shown["left"]
