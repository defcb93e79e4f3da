"""`jaxlm init`: a config for one's own text, sized by the planner, that loads and trains."""

import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.monitor.chips import machine
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal
    (tmp_path / "texts").mkdir()
    for number in range(4):
        words = f"Sentence {number} of a text that a small model reads again and again. "
        (tmp_path / "texts" / f"{number}.txt").write_text(words * 2000)
    return tmp_path


def made(capsys, *flags: str) -> tuple[dict, Run]:
    """Return the answer of --json, and the run of the config that was written."""
    assert main(["init", "--data=texts", "--json", *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    return answer, config.load(Run, answer["config"], ()).value


@pytest.mark.few(1)
@pytest.mark.parametrize(("on", "minutes"), [("t4", 15.0), ("h100x8", 1.0), ("v5e-16", 5.0)])
def test_the_config_is_the_plan_of_its_settings_and_takes_no_longer(texts, capsys, on, minutes):
    answer, run = made(capsys, f"--on={on}", f"--minutes={minutes}")
    plan = predict.forecast(run, machine(on, flag="--on"))
    assert plan.fits
    assert answer["parameters"] == plan.record()["parameters"]
    low, high = (run.train.steps * seconds / 60 for seconds in plan.seconds)
    assert answer["minutes"] == pytest.approx([low, high])
    assert low <= minutes
    assert run.data.train == ("texts/*.txt",)
    assert answer["epochs"] <= 16.5, "repeated text teaches nothing any more"


def test_parameters_that_were_asked_for_are_made(texts, capsys):
    answer, run = made(capsys, "--on=h100", "--params=30M", "--out=thirty.py")
    assert answer["parameters"] == pytest.approx(30e6, rel=0.15)
    assert answer["config"] == "thirty.py"
    text = (texts / "thirty.py").read_text()
    assert "jaxlm init --data=texts --params=30M --on=h100" in text
    assert "jaxlm train --config=thirty.py --workdir=runs/thirty" in text
    assert run.model.width % run.model.heads == 0


@pytest.mark.parametrize(
    ("params", "fix"),
    [("50k", "100k"), ("0", "100k"), ("-3M", "100k"), ("2000B", "1000B"), ("many", "30M")],
)
def test_parameters_out_of_range_are_fixed_to_the_nearest(params, fix, texts, capsys):
    """50 thousand were fixed to 30 million."""
    assert main(["init", "--data=texts", "--on=t4", f"--params={params}"]) == 2
    assert f"fix    --params={fix}\n" in capsys.readouterr().err


def test_quotes_and_backslashes_of_a_path_stay_as_they_are(texts, capsys):
    name = 'the "author\'s" \\new texts'
    (texts / "texts").rename(texts / name)
    assert main(["init", f"--data={name}/0.txt", f"--data={name}/1.txt", "--on=t4"]) == 0
    run = config.load(Run, "my_config.py", ()).value
    assert run.data.train == (f"{name}/0.txt", f"{name}/1.txt")
    assert "--on=t4" in (texts / "my_config.py").read_text()


def test_the_memory_of_an_unknown_gpu_is_in_the_command(texts, capsys):
    made(capsys, "--on=mygpu", "--memory=24GB", "--params=1000K", "--out=sub/own.py")
    assert "--on=mygpu --memory=24GB" in (texts / "sub/own.py").read_text()
    assert main(["init", "--data=texts", "--out=sub/own.py"]) == 2
    assert "--out=sub/own-2.py" in capsys.readouterr().err


@pytest.mark.slow
def test_a_larger_time_gives_a_larger_model(texts, capsys):
    (texts / "texts" / "large.txt").write_text("A large text, of many words. " * 400_000)
    sizes = [
        made(capsys, "--on=t4", f"--minutes={minutes}", f"--out={minutes}.py")[0]["parameters"]
        for minutes in (0.1, 100)
    ]
    assert sizes == sorted(set(sizes))


@pytest.mark.slow
def test_the_config_trains(texts, capsys):
    answer, _ = made(capsys, "--minutes=0.01", "--params=100k")
    words = ["train", f"--config={answer['config']}", "--workdir=run", "--stop_at=1", "--quiet"]
    assert main([*words, "--config.data.tokenizer=bytes"]) == 0


def test_conversations_are_referred_to_fine_tuning(texts, capsys):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (texts / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    assert main(["init", "--data=chat.jsonl"]) == 65
    assert "--config=finetune/lora" in capsys.readouterr().err
    assert not (texts / "my_config.py").exists()


def test_records_of_other_fields_are_read_by_the_flag_that_the_error_prints(texts, capsys):
    records = [{"url": "a", "content": f"{n} words of text"} for n in range(200)]
    (texts / "web.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    assert main(["init", "--data=web.jsonl", "--on=t4"]) == 65
    assert "fix    --text_key=content\n" in capsys.readouterr().err
    assert main(["init", "--data=web.jsonl", "--on=t4", "--text_key=content"]) == 0
    made_config = (texts / "my_config.py").read_text()
    assert '    c.data.text_key = "content"\n' in made_config
    assert "jaxlm init --data=web.jsonl --text_key=content --on=t4" in made_config
    asked = {"question": "1+1?", "answer": "2"}
    (texts / "qa.jsonl").write_text(json.dumps(asked) + "\n")
    assert main(["init", "--data=qa.jsonl", "--out=qa.py"]) == 65
    fixes = capsys.readouterr().err
    assert "--config.data.fields=user=question,assistant=answer --workdir=runs/chat" in fixes
    assert "--text_key=question\n" in fixes


def test_pairs_are_referred_to_training_on_preferences(texts, capsys):
    pair = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    (texts / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    assert main(["init", "--data=pairs.jsonl"]) == 65
    fix = re.search(r"  fix    jaxlm (.*?)    #", capsys.readouterr().err)[1]
    assert fix.startswith("train --config=preference/dpo --init_from=runs/base")
    assert fix.endswith("--config.data.train=pairs.jsonl --workdir=runs/dpo")


def test_a_table_is_said_to_be_read_as_one_text(texts, capsys):
    (texts / "rows.csv").write_text("text,label\n" + "".join(f"word {n},a\n" for n in range(9000)))
    assert main(["init", "--data=rows.csv", "--on=t4"]) == 0
    assert "rows.csv is read as one text, with the delimiters" in capsys.readouterr().out


def test_a_file_is_not_overwritten(texts, capsys):
    (texts / "my_config.py").write_text("# mine\n")
    assert main(["init", "--data=texts"]) == 2
    assert "--out=my_config-2.py" in capsys.readouterr().err
    assert (texts / "my_config.py").read_text() == "# mine\n"


def test_in_a_terminal_it_asks(texts):
    terminal, end = pty.openpty()
    words = [sys.executable, "-m", "jaxlm", "init", "--on=t4"]
    process = subprocess.Popen(words, stdin=end, stdout=end, stderr=end, cwd=texts)
    os.close(end)
    os.write(terminal, b"texts\n5\n")
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # closed at the other end
            break
        if not part:
            break
        shown += part
    os.close(terminal)
    assert process.wait() == 0, shown.decode()
    assert b"minutes [60]" in shown
    assert "--minutes=5" in (texts / "my_config.py").read_text()


def test_a_config_is_sized_by_the_text_of_records(texts, capsys):
    """Other fields of the records were text, too: the run had 20 passes and no dropout."""
    line = "Words of a text that a small model reads again and again. " * 15
    rows = [{"id": n, "html": "<p>" * 6000, "text": line} for n in range(400)]
    (texts / "web.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert main(["init", "--data=web.jsonl", "--on=t4", "--params=10M"]) == 0
    assert f"the text of {400 * len(line) / 2**10:.0f} KiB" in capsys.readouterr().out
    run = config.load(Run, "my_config.py", ()).value
    assert run.data.tokenizer == "sentencepiece:2048"
    assert run.model.dropout > 0


def written(folder, kind: str) -> str:
    """Write a short text of a kind, and return the flags that name it."""
    if kind == "records":
        sums = [{"prompt": f"{n % 10}+{n % 7}=", "html": "<p>" * 200} for n in range(250)]
        (folder / "short.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
        return "--data=short.jsonl --text_key=prompt"
    size = int(kind)
    (folder / "short.txt").write_text(("A few words of a short text.\n" * size)[:size])
    return "--data=short.txt"


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["records", "800", pytest.param("2000", marks=pytest.mark.slow)])
def test_the_config_of_a_very_short_text_trains(texts, capsys, kind):
    """It was refused: the text was shorter than one batch, or its tail shorter than a row."""
    words = written(texts, kind).split()
    assert main(["init", *words, "--params=1M", "--on=t4x8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["epochs"] <= 16.5
    words = ["train", f"--config={answer['config']}", "--workdir=run", "--stop_at=1", "--quiet"]
    assert main(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize(("size", "on"), [("319", "t4"), ("799", "h100x8")])
def test_a_text_is_refused_if_no_batch_fits(texts, capsys, size, on):
    assert main(["init", *written(texts, size).split(), f"--on={on}"]) == 65
    error = capsys.readouterr().err
    assert "the text is too short" in error
    assert f"it has {size} bytes" in error
    assert not (texts / "my_config.py").exists()


@pytest.mark.parametrize(("on", "size"), [("h100x8", 800), ("v5e-256", 25_600), ("t4", 210_000)])
@pytest.mark.parametrize("params", ["1M", "1B"])
def test_a_batch_and_a_row_fit_the_text(texts, capsys, on, size, params):
    words = written(texts, str(size)).split()
    code = main(["init", *words, f"--on={on}", f"--params={params}", "--json"])
    if on == "t4" and params == "1B":
        assert code == 2, "one T4 has too little memory"
        return
    assert code == 0
    answer = json.loads(capsys.readouterr().out)
    run = config.load(Run, answer["config"], ()).value
    assert answer["epochs"] <= 16.5
    assert run.data.sequence <= size / 20
    assert run.model.max_positions == run.data.sequence
    assert run.train.batch * run.data.sequence <= size / 4
