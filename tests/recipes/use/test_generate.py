"""`jaxlm generate` on an imported model: what it answers, and what it refuses."""

import io
import json
import re
import sys
from pathlib import Path

import jax
import jsonschema
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.cli.output import Output
from jaxlm.core.errors import ConfigError
from jaxlm.generate import batch
from jaxlm.generate.balance import DraftBalance, DrawCall
from jaxlm.monitor import host_machine
from jaxlm.recipes.use import drafts, generate
from tests.cli.test_exchange import write
from tests.faults import harness
from tests.generate.test_grammar import BOMBS

PROMPTS = ("--prompt=def ", "--prompt=import os\nimport ")


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_device):
    folder = tmp_path_factory.mktemp("generate")
    source = write(folder / "source")
    assert main(["import", f"--from={source}", f"--workdir={folder / 'run'}", "--quiet"]) == 0
    return folder / "run"


def call(capsys, run, *words):
    capsys.readouterr()
    code = main(["generate", f"--workdir={run}", "--max_tokens=12", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_each_request_has_its_own_seed_and_reason(capsys, run):
    code, answer = call(capsys, run, *PROMPTS, "--seed=3", "--seed=4", "--min_p=0.001")
    assert code == 0
    for sample in answer["samples"]:
        assert sample.keys() == {"prompt", "ids", "text", "log_probabilities", "finish_reason"}
        assert len(sample["ids"]) == len(sample["log_probabilities"]) <= 12
        assert max(sample["log_probabilities"]) <= 0
        assert (sample["finish_reason"] == "length") == (len(sample["ids"]) == 12)
    # The padding of the prompt is another one, and it is alone.
    code, alone = call(capsys, run, PROMPTS[0], "--seed=3", "--min_p=0.001")
    assert alone["samples"][0]["ids"] == answer["samples"][0]["ids"]
    values, expected = (each["samples"][0]["log_probabilities"] for each in (alone, answer))
    np.testing.assert_allclose(values, expected, atol=1e-4)


def test_a_prompt_is_read_from_standard_input(capsys, run, monkeypatch):
    def typed(content: bytes, *words):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return call(capsys, run, *words, "--temperature=0")

    code, answer = typed("def naïve\n".encode(), "--prompt=-", PROMPTS[0])
    assert code == 0
    assert [each["prompt"] for each in answer["samples"]] == ["def naïve", "def "]
    code, answer = typed(b"fine \xff", "--prompt=-")
    assert (code, answer["error"]["where"]) == (65, "--prompt=-, byte 5")


@pytest.mark.slow
def test_a_text_is_cut_before_its_stop(capsys, run):
    words = (PROMPTS[0], "--temperature=0", "--repetition_penalty=1.5")
    _, answer = call(capsys, run, *words)
    (whole,) = answer["samples"]
    stop = next(c for c in whole["text"][1:] if c.isascii() and c.isprintable())
    code, answer = call(capsys, run, *words, f"--stop={stop}", "--stop=never there")
    (sample,) = answer["samples"]
    assert (code, sample["finish_reason"]) == (0, "stop_sequence")
    assert sample["text"] == whole["text"][: whole["text"].index(stop)]
    assert sample["ids"] == whole["ids"][: len(sample["ids"])]
    assert len(sample["ids"]) == len(sample["log_probabilities"]) < 12


@pytest.mark.slow
def test_a_beam_search_is_the_same_whatever_the_seed(capsys, run):
    words = (PROMPTS[0], "--temperature=0", "--beams=3")
    (code, first), (_, second) = (call(capsys, run, *words, f"--seed={i}") for i in (1, 2))
    assert (code, first) == (0, second)
    (sample,) = first["samples"]
    assert len(sample["ids"]) == len(sample["log_probabilities"]) > 0
    assert max(sample["log_probabilities"]) < 0


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("words", "named", "fix"),
    [
        (("--seed=1", "--seed=2", "--seed=3"), "seed", "--seed=0"),
        (("--stop=",), "stop", "jaxlm generate --help"),
        (("--stop=" + "x" * 300,), "stop", "jaxlm generate --help"),
        (("--beams=2",), "temperature", "--temperature=0"),
        (("--beams=2", "--temperature=0", "--stop=a"), "stop", "--beams=1"),
        (("--beams=2", "--temperature=0", "--draft=lookup"), "draft", "--beams=1"),
        (("--prompt_lookup=3",), "--prompt_lookup", "--draft=lookup"),
        (("--min_p=1.5",), "min_p", "jaxlm generate --help"),
        (("--repetition_penalty=0",), "repetition_penalty", "jaxlm generate --help"),
        (("--regex=a", "--choice=b"), "choice", "jaxlm generate --help"),
        (("--choice=",), "choice", "jaxlm generate --help"),
        (("--beams=2", "--temperature=0", "--regex=a"), "regex", "--beams=1"),
        (("--regex=a", "--draft=lookup"), "draft", "without --draft"),
        (("--regex=[",), "the grammar is refused", "jaxlm docs serving"),
        (("--kv_cache_dtype=int4",), "kv_cache_dtype", "jaxlm generate --help"),
        (("--kv_cache_dtype=imt8",), "kv_cache_dtype", "--kv_cache_dtype=int8"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(capsys, words, named, fix):
    code, answer = call(capsys, "/nowhere", *PROMPTS, *words)
    assert code == 2
    assert named in answer["error"]["what"]
    assert fix in answer["error"]["fix"]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA["additionalProperties"] = False
LARK = 'start: "n=" NUMBER\nNUMBER: /[0-9]{1,3}/'


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--regex=[xyz]{2}-[0-9]", "[xyz]{2}-[0-9]"),
        ("--json_schema=schema.json", None),
        (f"--json_schema={json.dumps(SCHEMA)}", None),
        ("--grammar=numbers.lark", "n=[0-9]{1,3}"),
    ],
)
def test_a_text_is_one_of_its_grammar(capsys, run, tmp_path, monkeypatch, flag, expected):
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(json.dumps(SCHEMA))
    Path("numbers.lark").write_text(LARK)
    words = (*PROMPTS, flag, "--max_tokens=40", "--seed=1")
    code, answer = call(capsys, run, *words)
    assert code == 0
    for sample, prompt in zip(answer["samples"], PROMPTS, strict=True):
        assert sample["prompt"] == prompt.removeprefix("--prompt=")
        assert len(sample["ids"]) == len(sample["log_probabilities"]) > 0
        if expected is None and sample["finish_reason"] == "length":
            continue  # of a schema, whose numbers may be long
        assert sample["finish_reason"] == "eos_token"
        if expected is None:
            jsonschema.validate(json.loads(sample["text"]), SCHEMA)
        else:
            assert re.fullmatch(expected, sample["text"])
    assert printed(capsys, run, *words, "--stream") == printed(capsys, run, *words)


def test_choices_go_together_with_a_stop_and_prompts_beyond_the_slots(capsys, run, monkeypatch):
    monkeypatch.setattr(batch, "MAX_ROWS", 2)
    choices = ("--choice=red", "--choice=blue (dark)")
    prompts = [f"--prompt={number}" for number in range(5)]
    words = (*choices, "--max_tokens=56", "--stop=(")  # the slots and positions of the test above
    _, answer = call(capsys, run, *prompts, *words)
    results = {(each["text"], each["finish_reason"]) for each in answer["samples"]}
    assert len(answer["samples"]) == 5
    assert results <= {("red", "eos_token"), ("blue ", "stop_sequence")}
    _, later = call(capsys, run, *prompts[3:], *words)
    assert [each["text"] for each in later["samples"]] == [
        each["text"] for each in answer["samples"][3:]
    ]


@pytest.mark.slow  # tests/generate/test_grammar.py has fast tests of limits
def test_a_grammar_at_its_limit_is_an_error(capsys, run, tmp_path):
    (tmp_path / "bomb.lark").write_text(BOMBS["rules"].text)
    code, answer = call(capsys, run, PROMPTS[0], f"--grammar={tmp_path / 'bomb.lark'}")
    assert code == 2
    assert "too complex" in answer["error"]["what"]
    assert answer["error"]["where"] == "--grammar"


def printed(capsys, run, *words):
    capsys.readouterr()
    code = main(["generate", f"--workdir={run}", "--max_tokens=23", *words])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        ("--temperature=0",),
        ("--temperature=1.5", "--seed=5", "--seed=6", "--top_k=40"),
        ("--temperature=1.2", "--stop=t", "--stop=\u00e9", "--frequency_penalty=0.5"),
        ("--temperature=0", "--max_tokens=1"),
        ("--temperature=0", "--beams=2"),
    ],
)
def test_text_printed_as_it_is_made_is_the_text_printed_at_the_end(capsys, run, monkeypatch, words):
    whole = printed(capsys, run, *PROMPTS, *words)
    parts = recorded(monkeypatch)
    assert printed(capsys, run, *PROMPTS, *words, "--stream") == whole
    if "--beams=2" in words:
        assert parts == []
    else:
        assert len([part for part in parts if part]) > (2 if "--max_tokens=1" in words else 6)


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory, one_device, without_plots):
    folder = tmp_path_factory.mktemp("heads")
    settings = {"objective.name": "mtp", "objective.weights": (0.3, 0.2), "train.steps": 2}
    return harness.trained(harness.write_config(folder, settings), folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--temperature=0", "--stream", "--draft=lookup"),
        ("--temperature=0.8", "--seed=5", "--seed=6", "--draft=lookup"),
        ("--temperature=0.8", "--seed=5", "--seed=6", "--stop=t", "--draft=RUN"),
        ("--temperature=0", "--draft=heads"),
        ("--temperature=0.8", "--seed=5", "--draft=heads"),
        ("--temperature=0", "--kv_cache_dtype=int8", "--draft=lookup"),
    ],
)
def test_a_draft_changes_no_text(capsys, request, monkeypatch, words):
    """Prompts of several lengths, one of them a repetition."""
    # If a draft saves time depends on the machine.
    monkeypatch.setattr(DraftBalance, "next_call", lambda _, passes: DrawCall(True, passes))
    run = request.getfixturevalue("with_heads" if words[-1] == "--draft=heads" else "run")
    *words, draft = [word.replace("RUN", str(run)) for word in words]
    asked = ("--prompt=" + "import os\n" * 4, "--prompt=def ", *words)
    plain = printed(capsys, run, *asked, "--quiet")
    engines, log = [], drafts.log_guesses
    monkeypatch.setattr(
        drafts, "log_guesses", lambda engine, say: (engines.append(engine), log(engine, say))
    )
    assert printed(capsys, run, *asked, draft, "--quiet") == plain
    (counters,) = [engine.counters for engine in engines]
    assert 0 < counters.guessed_passes == counters.passes


def test_texts_with_a_draft_beyond_the_memory_are_refused(capsys, run, monkeypatch):
    """Each of the fixes suffices, and five prompts are the most that fit."""
    available = 640_000
    monkeypatch.setattr(
        host_machine, "physical_bytes", lambda: available * jax.local_device_count()
    )

    def make(*_, **__):
        raise ConfigError("made", where="", why="", fix="")

    monkeypatch.setattr(generate, "Engine", make)

    def error(count, *words):
        prompts = [f"--prompt={number}" for number in range(count)]
        code, answer = call(capsys, run, *prompts, *words)
        assert code == answer["error"]["code"]
        return answer["error"]

    refused = error(6, f"--draft={run}")
    assert (refused["code"], refused["where"]) == (71, "checked before anything is compiled")
    assert refused["what"].startswith("6 texts of ")
    draft, most, fewer = refused["fix"].splitlines()
    assert draft == "without --draft the text is the same"
    assert most == "at most 5 prompts at once"
    assert fewer.startswith("--max_tokens=")
    assert error(5, f"--draft={run}")["what"] == "made"
    assert error(6, f"--draft={run}", fewer)["what"] == "made"
    assert error(6, "--draft=lookup")["what"] == "made"


@pytest.mark.parametrize(
    ("draft", "code", "named", "fix"),
    [
        ("runs/nowhere", 66, "runs/nowhere/config.json", ""),
        ("heads", 2, "--draft=heads", "--draft=lookup"),
    ],
)
def test_a_wrong_draft_is_refused_as_by_the_server(capsys, run, draft, code, named, fix):
    got, answer = call(capsys, run, *PROMPTS, f"--draft={draft}")
    assert (got, answer["error"]["where"]) == (code, named)
    assert fix in answer["error"]["fix"]


def recorded(monkeypatch):
    """The parts that are printed from here on."""
    parts, part = [], Output.stream
    monkeypatch.setattr(Output, "stream", lambda self, text: (parts.append(text), part(self, text)))
    return parts


@pytest.mark.slow
def test_on_a_terminal_text_is_printed_as_it_is_made(capsys, run, monkeypatch):
    words = (PROMPTS[0], "--temperature=0")
    whole = printed(capsys, run, *words)
    parts = recorded(monkeypatch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert printed(capsys, run, *words) == whole
    assert len(parts) > 4


@pytest.mark.slow
def test_an_object_is_not_given_in_parts(capsys):
    code, answer = call(capsys, "/nowhere", "--stream")
    assert code == 2
    assert "--stream and --json" in answer["error"]["what"]


def test_texts_and_rows_beyond_the_positions_of_the_training_are_noted(capsys, run):
    positions = json.loads((run / "config.json").read_text())["model"]["max_positions"]
    words = ["generate", f"--workdir={run}", "--prompt=a", "--temperature=0"]
    assert main([*words, f"--max_tokens={positions}"]) == 0
    assert f"exceed model.max_positions = {positions}" in capsys.readouterr().out
    assert main([*words, "--max_tokens=4"]) == 0
    assert "exceed" not in capsys.readouterr().out
    (run / "few.txt").write_text("some words\n")
    words = ["eval", f"--workdir={run}", f"--text={run / 'few.txt'}"]
    words.append(f"--sequence={2 * positions}")
    assert main(words) == 0
    caution = f"rows of {2 * positions} tokens exceed model.max_positions = {positions}"
    assert caution in capsys.readouterr().out
    assert main([*words[:-1], f"--sequence={positions}"]) == 0
    assert "exceed" not in capsys.readouterr().out
