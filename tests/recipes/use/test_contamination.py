"""`jaxlm eval --tasks --against_training`: items of the training text are named, others are not."""

import json
import shutil

import pytest

from jaxlm.cli.main import main
from tests.faults import harness

TASK = """\
kind = "choice"
items = "items.jsonl"
context = "{{ question }}"
choices = ["yes it does", "no it does not"]
answer = "0"
"""
QUESTIONS = [
    f"Does number {n} of the list of {n * n} things stand before the others" for n in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_device, without_plots):
    folder = tmp_path_factory.mktemp("contamination")
    (folder / "task.toml").write_text(TASK)
    lines = [json.dumps({"question": each}) for each in QUESTIONS]
    (folder / "items.jsonl").write_text("\n".join([*lines, '{"question": "Why"}']) + "\n")
    config = harness.write_config(folder, {"train.steps": 1, "data.sequence": 128})
    more = [f"{each} yes,\nit does.\n" for each in QUESTIONS[:3]]
    text = folder / "000.txt"
    text.write_text(text.read_text() + "\n" + "\n".join(more))
    words = harness.words(config, folder / "run")
    assert main(words) == 0
    return folder


def copied(folder, name, **data):
    """Copy the run without results, with other data in its config; return the copy."""
    run = folder / name
    shutil.copytree(folder / "run", run, ignore=shutil.ignore_patterns("evals"))
    config = json.loads((run / "config.json").read_text())
    config["data"] |= data
    (run / "config.json").write_text(json.dumps(config))
    return run


def call(capsys, folder, run, *words, code=0):
    capsys.readouterr()
    words = ["eval", f"--workdir={folder / run}", *words, "--json"]
    assert main(words) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_items_of_the_text_are_named_and_scored_apart(folder, capsys):
    words = (f"--tasks={folder / 'task.toml'}", "--against_training")
    answer = call(capsys, folder, "run", *words)
    compared = answer["against_training"]["task"]
    assert (compared["touched"]["items"], compared["untouched"]["items"]) == (3, 6)
    assert compared["too_short"] == 1
    total = answer["tasks"]["task"]["metrics"]["accuracy"]["mean"]
    means = [compared[part]["metrics"]["accuracy"]["mean"] for part in ("touched", "untouched")]
    assert (3 * means[0] + 6 * means[1]) / 9 == pytest.approx(total)
    with open(compared["file"]) as file:
        listed = json.load(file)["items"]
    assert list(listed) == ["1", "2", "3"]
    assert listed["1"]["documents"] == 1
    assert listed["1"]["first"][0].endswith(".txt")


@pytest.mark.slow
def test_shards_are_searched_as_their_sources_are(folder, capsys):
    text = folder / "000.txt"
    data = [f"--config.data.train={text}", "--config.data.tokenizer=bytes"]
    data += ["--config.data.validation=()"]
    shards = folder / "shards"
    assert main(["data", "tokenize", *data, f"--out={shards}", "--quiet"]) == 0
    copied(folder, "sharded", train=[f"{shards}/train"], validation=[])
    words = (f"--tasks={folder / 'task.toml'}", "--against_training")
    compared = call(capsys, folder, "sharded", *words)["against_training"]["task"]
    assert compared["touched"]["items"] == 3


def test_data_that_is_gone_is_refused_before_anything_is_scored(folder, capsys):
    gone = copied(folder, "gone", train=[f"{folder}/*.none"])
    words = (f"--tasks={folder / 'task.toml'}", "--against_training")
    error = call(capsys, folder, "gone", *words, code=66)["error"]
    assert not (gone / "evals").exists()
    assert error["what"] == "the training data of the run is not found"
    error = call(capsys, folder, "run", "--against_training", code=2)["error"]
    assert error["what"] == "--against_training needs --tasks"
