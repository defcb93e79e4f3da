"""`jaxlm eval --verify` through the front door, of a model that learned its answers and others."""

import json
import shlex
import shutil
from unittest import mock

import pytest

import jaxlm
from jaxlm.cli.main import main
from jaxlm.data import chat_templates
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Bytes
from jaxlm.generate import continuer
from jaxlm.recipes.use import evaluate, generate, load, model_difference, verify
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

ANSWERS = {"a": "one", "b": "two: 2.", "cc": "3", "ddd": "f\u00fcnf", "e": "- 1,000", "f": "no"}
HELD = {"g": "1", "h" * 40: "-2", "i": "none"}


def write(path, answers, copies=1):
    lines = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in answers.items()
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) * copies)
    return str(path)


def call(capsys, *words):
    capsys.readouterr()
    code = main(["eval", *words, "--json"])
    written = capsys.readouterr()
    return code, json.loads(written.out or "{}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def config(folder):
    settings = {
        "data.train": (write(folder / "train.jsonl", ANSWERS, 20),),
        "data.validation": (write(folder / "held.jsonl", HELD),),
        "data.kind": "chat",
        "data.sequence": 96,
        "optim.lr": 1e-2,
        "train.steps": 120,
        "checkpoint.every": 120,
        "model.dropout": 0.0,
    }
    write(folder / "asked.jsonl", ANSWERS)
    return harness.write_config(folder, settings)


@pytest.fixture(scope="module")
def trained(config, folder):
    assert main(harness.words(config, folder / "trained")) == 0
    return folder / "trained"


@pytest.fixture(scope="module")
def untrained(config, folder):
    assert main(harness.words(config, folder / "untrained", "--config.train.steps=1")) == 0
    return folder / "untrained"


def test_other_files_without_text_get_a_fix_that_eval_takes(untrained, folder, capsys):
    """The fixes of `jaxlm train` set how records are read, which eval cannot."""
    (folder / "body.jsonl").write_text('{"body": "a"}\n')
    bare = folder / "bare"
    shutil.copytree(untrained, bare)
    shutil.rmtree(bare / chat_templates.HUB)
    for run, name, fix in (
        (bare, "asked", "name files of text"),
        (untrained, "body", "one JSON object a line, whose text is in 'text'"),
    ):
        capsys.readouterr()
        assert main(["eval", f"--workdir={run}", f"--text={folder / name}.jsonl"]) == 65
        assert fix in capsys.readouterr().err


def test_a_token_that_the_template_does_not_name_makes_no_other_template(
    untrained, tmp_path, capsys
):
    """The files of an imported model have one of padding, ChatML does not."""
    run = tmp_path / "run"
    shutil.copytree(untrained, run)
    settings = run / chat_templates.HUB / chat_templates.SETTINGS
    tokens = json.loads(settings.read_text())
    settings.write_text(json.dumps(tokens | {"pad_token": "<|pad|>"}))
    code, result = call(capsys, f"--workdir={run}", "--verify=exact", "--max_tokens=2")
    assert (code, result["answers"]["prompts"]) == (0, len(HELD))
    template = run / chat_templates.HUB / chat_templates.FILE
    template.write_text(f"{template.read_text()} ")
    code, _ = call(capsys, f"--workdir={run}", "--verify=exact", "--max_tokens=2")
    assert code == 65


def test_other_conversations_have_a_loss_without_answers(untrained, folder, capsys):
    """The loss is that of the answers, as with --verify."""
    asked = f"--text={folder / 'asked.jsonl'}"
    code, plain = call(capsys, f"--workdir={untrained}", asked)
    assert code == 0
    assert "answers" not in plain
    words = f"--workdir={untrained}", asked, "--verify=exact", "--max_tokens=1", "--prompts=1"
    _, verified = call(capsys, *words)
    assert verified.pop("answers")
    verified["sets"]["text"].pop("answers")
    assert plain == verified
    whole = call(capsys, f"--workdir={untrained}")[1]
    held = call(capsys, f"--workdir={untrained}", f"--text={folder / 'held.jsonl'}")[1]
    assert held["loss_nats"] == whole["loss_nats"]
    loaded = jaxlm.load(untrained)
    assert loaded.evaluate(str(folder / "asked.jsonl"))["loss_nats"] == plain["loss_nats"]


def test_a_run_is_quantized_by_the_loss_of_other_conversations(
    untrained, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(model_difference, "TIMED_SECONDS", 0.0)
    asked, out = f"--text={folder / 'asked.jsonl'}", tmp_path / "out"
    words = ["quantize", f"--workdir={untrained}", asked, f"--out={out}", "--scheme=int8", "--json"]
    capsys.readouterr()
    assert main([*words, "--allow=loss:50%"]) == 0
    table = json.loads(capsys.readouterr().out)
    _, plain = call(capsys, f"--workdir={untrained}", asked)
    assert table["before"]["loss_nats"] == plain["loss_nats"]


@pytest.mark.slow
def test_a_trained_model_answers_all_and_ends_by_itself(trained, folder, capsys):
    words = [f"--workdir={trained}", f"--text={folder / 'asked.jsonl'}", "--max_tokens=20"]
    code, result = call(capsys, *words, "--verify=exact", "--samples=2")
    assert code == 0
    assert result["answers"]["prompts"] == 6
    greedy = result["answers"]["greedy"]
    assert (greedy["exact_match"], greedy["ended_share"]) == (1.0, 1.0)
    assert result["answers"]["sampled"]["exact_match"] > 0.7
    assert result["token_accuracy"] == 1.0
    assert call(capsys, *words, "--verify=exact", "--samples=2")[1] == result
    code, result = call(capsys, *words, "--verify=number", "--batch=2")
    assert (result["answers"]["prompts"], result["answers"]["greedy"]["exact_match"]) == (3, 1.0)
    assert result["answers"]["left_out"] == {verify.NO_NUMBER: 3}


@pytest.mark.slow
def test_the_number_of_rows_or_passes_changes_no_answer(untrained, folder, capsys, monkeypatch):
    words = [f"--workdir={untrained}", f"--text={folder / 'asked.jsonl'}", "--max_tokens=8"]
    words += ["--verify=exact", "--samples=3"]
    results = [call(capsys, *words, f"--batch={rows}")[1]["answers"] for rows in (1, 4)]
    monkeypatch.setattr(continuer, "is_supported", lambda _: False)
    results.append(call(capsys, *words)[1]["answers"])
    assert results[0] == results[1] == results[2]
    assert results[0]["greedy"]["exact_match"] < 0.2
    assert results[0]["sampled"]["samples"] == 3


def test_prompts_are_those_of_generate_and_a_table_lists_the_scores(untrained, capsys, monkeypatch):
    opened = load.load_run(untrained)
    asker = verify.AnswerVerifier(opened, untrained, verify.VerifySettings(check="exact"))
    asked = asker.questions(evaluate.open_loaders(opened, (), 96, print))["val"]
    tokenizer = ChatTokenizer(Bytes(), generate.template_of(untrained))
    assert asked.prompts == tokenizer.encode_many(list(HELD))
    assert asked.references == list(HELD.values())
    words = ["eval", f"--workdir={untrained}", "--verify=number", "--max_tokens=2", "--prompts=3"]
    engines = mock.Mock(wraps=continuer.Engine)
    monkeypatch.setattr(continuer, "Engine", engines)
    assert main(words) == 0
    engines.assert_called_once()
    *_, head, row, left_out = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["set", "answers", "prompts", "exact"]
    assert row.split()[:3] == ["val", "greedy", "2"]
    assert left_out == f"left out of val: 1 {verify.NO_NUMBER}"


@pytest.mark.slow
def test_the_date_of_a_template_is_the_same_on_every_day(untrained, folder, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(untrained, run)
    file = run / chat_templates.HUB / chat_templates.FILE
    file.write_text("{%- set now = strftime_now('%d %b %Y') %}" + file.read_text())
    words = ["generate", f"--workdir={run}", "--chat", "--prompt=a", "--max_tokens=2"]
    assert main(words) == 0
    assert "the chat template's date is 2024-07-26" in capsys.readouterr().out
    words = [f"--workdir={run}", f"--text={folder / 'asked.jsonl'}", "--max_tokens=2"]
    assert main(["eval", *words, "--verify=exact", "--prompts=1"]) == 0
    assert "the chat template's date is 2024-07-26" in capsys.readouterr().out


def paste(capsys, words, part=0):
    """Return the error of a command line, and the result of its fix."""
    capsys.readouterr()
    code = main(["eval", *words, "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    fix, _, _ = error["fix"].splitlines()[part].partition("    #")
    flags = shlex.split(fix)
    if flags[0] == "jaxlm":
        more = flags[2:]
    else:
        name = flags[0].partition("=")[0]
        more = [*(word for word in words if word.partition("=")[0] != name), *flags]
    return code, error["what"], call(capsys, *more)


@pytest.mark.slow
def test_a_limit_that_no_prompt_leaves_is_refused(config, folder, capsys):
    run = folder / "gpt2"
    flags = [
        "model.family=gpt2",
        "model.max_positions=96",
        "model.width=32",
        "model.depth=2",
        "model.heads=4",
        "train.steps=1",
    ]
    flags = [f"--config.{flag}" for flag in flags]
    assert main(harness.words(config, run, *flags)) == 0
    words = [f"--workdir={run}", "--verify=exact", "--max_tokens=50"]
    code, result = call(capsys, *words)
    assert result["answers"]["left_out"] == {verify.TOO_LONG: 1}
    code, what, (repeated, _) = paste(capsys, [*words[:2], "--max_tokens=96"])
    assert (code, what) == (2, "no prompt of val and its answer fit in the context")
    assert repeated == 0


@pytest.mark.slow
def test_what_cannot_be_verified_has_a_fix_to_paste(untrained, folder, capsys):
    words = [f"--workdir={untrained}", "--max_tokens=2"]
    code, what, (repeated, _) = paste(capsys, [*words, "--samples=2"])
    assert (code, what, repeated) == (2, "--samples needs --verify", 0)
    none = write(folder / "none.jsonl", {"a": "none"})
    code, what, (repeated, _) = paste(capsys, [*words, f"--text={none}", "--verify=number"])
    assert (code, what) == (65, "no conversation of text has an answer to verify")
    assert repeated == 0
    long = write(folder / "long.jsonl", {"a": "b" * 100})
    code, what, (repeated, _) = paste(capsys, [*words, f"--text={long}", "--verify=exact"])
    assert (code, what, repeated) == (65, "the data contains no document", 0)
    (folder / "asked_only.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    code, result = call(capsys, *words, f"--text={folder / 'asked_only.jsonl'}", "--verify=exact")
    assert (code, result["error"]["what"]) == (65, "no conversation has an answer")


@pytest.mark.slow
def test_a_run_of_text_has_no_answers(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(harness.words(harness.write_config(tmp_path), run, "--config.train.steps=2")) == 0
    for text in ((), (f"--text={write(tmp_path / 'chat.jsonl', ANSWERS)}",)):
        code, what, (repeated, _) = paste(capsys, [f"--workdir={run}", "--verify=exact", *text])
        assert (code, what, repeated) == (2, "this run has no answers to verify", 0)


@pytest.mark.slow
def test_a_run_without_conversations_is_asked_others_by_its_template(untrained, tmp_path, capsys):
    """A model that was imported with its template is measured before it is tuned."""
    run = tmp_path / "run"
    shutil.copytree(untrained, run)
    asked = f"--text={write(tmp_path / 'chat.jsonl', ANSWERS)}"
    words = ["--verify=exact", "--max_tokens=4", "--prompts=2"]
    expected = call(capsys, f"--workdir={run}", asked, *words)[1]["answers"]
    settings = json.loads((run / "config.json").read_text())
    settings["data"]["kind"] = "text"
    (run / "config.json").write_text(json.dumps(settings))
    assert call(capsys, f"--workdir={run}", asked, *words)[1]["answers"] == expected


def test_another_template_than_that_of_the_run_is_refused(untrained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(untrained, run)
    template = run / "hub/chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "model"))
    code, result = call(capsys, f"--workdir={run}", "--verify=exact", "--max_tokens=2")
    assert code == 65
    assert "another chat template" in result["error"]["what"]
