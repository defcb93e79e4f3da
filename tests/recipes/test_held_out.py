"""The validation data of a run whose user names only training text; by the command line."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxlm
from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.data import dataset
from jaxlm.data.shards import TokenShards
from jaxlm.recipes.config import Run
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.py")
TINY = {
    "data.tokenizer": "bytes",
    "data.sequence": 32,
    "model.depth": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "train.steps": 4,
    "eval.batches": "all",
    "log.sinks": "()",
    "sample.prompts": "()",
}
LINES = [f"line {number} of a text that is the user's own\n" for number in range(400)]
TEXT = "".join(LINES)
REASON = "tail:5% held out of data.train, as data.validation is not set"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.txt").write_text(TEXT)
    return folder


def flags(**settings):
    return [f"--config.{path}={value}" for path, value in (TINY | settings).items()]


def trained(workdir, *words, config=QUICKSTART, code=0):
    words = ["train", f"--config={config}", f"--workdir={workdir}", "--quiet", *words]
    assert main(words) == code
    return workdir


def shown(capsys, *words):
    assert main(["config", "show", "--json", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    return answer["config"]["data"]["validation"], answer["provenance"]["data.validation"]


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory):
    """A config with `data.train` set on the command line, and no validation setting."""
    folder = tmp_path_factory.mktemp("runs")
    config = Path(harness.write_config(folder, {"eval.batches": "all", "train.steps": 4}))
    config.write_text(re.sub(r" +c\.data\.validation = .*\n", "", config.read_text()))
    return trained(folder / "run", f"--config.data.train={texts}/*.txt", config=config)


def text_of(workdir):
    """The text that a run trains on and validates on, by the shards that it reads."""
    run = configs.load(Run, str(workdir / "config.json")).value
    data = dataset.open_data(run.data, seed=run.seed)
    parts = {"train": data.train.shards} | {n: s.shards for n, s in data.validation.items()}
    return {name: decoded(shards) for name, shards in parts.items()}


def decoded(shards):
    texts = []
    for document in range(shards.documents):
        (length,) = shards.lengths(document, document + 1)
        ids = np.asarray(shards.read(document, 1, int(length) - 1)).tolist()
        texts.append(shards.tokenizer.decode(ids))
    return "".join(texts)


def test_text_named_for_training_alone_is_validated_on_its_own_end(run):
    cut = int(len(TEXT) * 0.95)
    assert text_of(run) == {"train": TEXT[:cut], "val": TEXT[cut:]}
    assert json.loads((run / "config.json").read_text())["data"]["validation"] == ["tail:5%"]


def test_the_header_the_records_and_the_report_say_what_is_held_out(run):
    log = (run / "log.txt").read_text()
    (header,) = [line for line in log.splitlines() if line.startswith("  validation")]
    assert REASON in header
    assert REASON in json.loads((run / "provenance.json").read_text())["data.validation"]
    warned = [record["text"] for record in harness.records(run, "warnings.jsonl")]
    assert len([text for text in warned if "tail:5%" in text and "data.validation" in text]) == 1
    report = (run / "report.html").read_text()
    assert report.count("tail:5%") >= 2, "as a warning, and among the settings"


@pytest.mark.slow
def test_config_says_who_set_what_is_held_out(texts, capsys):
    mine = f"--config.data.train={texts}/*.txt"
    value, origin = shown(capsys, f"--config={QUICKSTART}", mine)
    assert value == ["tail:5%"]
    assert REASON in origin
    assert main(["config", "explain", "data.validation", f"--config={QUICKSTART}", mine]) == 0
    output = capsys.readouterr().out
    assert "tail:5%" in output
    assert REASON in output
    assert main(["config", "diff", QUICKSTART, QUICKSTART, mine, "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {change["path"] for change in changes} == {"data.train", "data.validation"}


def test_the_quickstart_alone_is_what_it_was(capsys):
    assert shown(capsys, f"--config={QUICKSTART}") == (["stdlib:validation"], "default")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("()", []),
        ("10%", ["10%"]),
        ("stdlib:validation", ["stdlib:validation"]),
        ("auto", ["tail:5%"]),
    ],
)
def test_validation_that_the_user_names_is_used(named, value, texts, capsys):
    words = (f"--config.data.train={texts}/*.txt", f"--config.data.validation={named}")
    values, origin = shown(capsys, f"--config={QUICKSTART}", *words)
    assert (values, origin) == (value, words[1])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("order", [1, -1])
def test_a_resolved_config_takes_other_text_like_the_file_it_came_from(
    order, run, texts, tmp_path, capsys
):
    """The user named no validation text and no hold-out."""
    other = f"--config.data.train={texts}/[m]*.txt"
    assert shown(capsys, f"--config={run / 'config.json'}", other)[0] == ["tail:5%"]
    assert main(["config", "show", "--json", f"--config={QUICKSTART}"]) == 0
    plain = tmp_path / "config.json"
    plain.write_text(json.dumps(json.loads(capsys.readouterr().out)["config"]))
    words = (other, "--config.train.steps=3")[::order]
    value, origin = shown(capsys, f"--config={plain}", *words)
    assert value == ["tail:5%"]
    assert REASON in origin
    assert shown(capsys, f"--config={plain}")[0] == ["stdlib:validation"]
    back = "--config.data.train=stdlib:train"
    assert shown(capsys, f"--config={run / 'config.json'}", back)[0] == ["stdlib:validation"]


def test_validation_files_of_the_users_own_config_stay_when_other_text_is_trained_on(
    texts, tmp_path, capsys
):
    config = harness.write_config(tmp_path, {"data.validation": (f"{texts}/mine.txt",)})
    other = f"--config.data.train={tmp_path}/00*.txt"
    assert shown(capsys, f"--config={config}", other)[0] == [f"{texts}/mine.txt"]


@pytest.mark.slow
def test_a_config_derived_from_a_shipped_one_holds_out_of_its_own_text(texts, tmp_path, capsys):
    derived = tmp_path / "mine.py"
    derived.write_text(
        "import runpy\n\n\ndef get_config():\n"
        f"    c = runpy.run_path({QUICKSTART!r})['get_config']()\n"
        f"    c.data.train = ('{texts}/*.txt',)\n    return c\n"
    )
    value, origin = shown(capsys, f"--config={derived}")
    assert value == ["tail:5%"]
    assert REASON in origin


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["settings", "draft", "run"])
def test_the_function_holds_out_of_text_that_it_is_given(kind, run, texts, tmp_path):
    settings = {path: value for path, value in TINY.items() if value != "()"}
    settings |= {"log.sinks": (), "sample.prompts": (), "model.family": "qwen3"}
    train = (f"{texts}/*.txt",)
    if kind == "settings":
        config, settings = QUICKSTART, settings | {"data.train": train}
    elif kind == "draft":
        config = configs.new(Run)
        config.data.train = train
    else:
        config = Run(data=type(Run().data)(train=train))
    jaxlm.train(config, workdir=tmp_path / "run", settings=settings, quiet=True)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["data"]["validation"] == ["tail:5%"]
    assert text_of(tmp_path / "run") == text_of(run)
    provenance = json.loads((tmp_path / "run/provenance.json").read_text())
    assert REASON in provenance["data.validation"]


@pytest.mark.slow
def test_of_several_sources_the_end_of_each_is_a_set_of_its_own(texts, tmp_path):
    (tmp_path / "code.txt").write_text(TEXT.upper())
    named = f"--config.data.train=web={texts}/*.txt,code={tmp_path}/*.txt"
    run = trained(tmp_path / "run", *flags(), named)
    cut = int(len(TEXT) * 0.95)
    read = text_of(run)
    assert read["val_web"] == TEXT[cut:]
    assert read["val_code"] == TEXT[cut:].upper()
    assert read["train"] == TEXT[:cut] + TEXT[:cut].upper()


@pytest.mark.slow
def test_a_hold_out_of_less_than_a_row_is_an_error_whose_fix_works(tmp_path, capsys):
    (tmp_path / "short.txt").write_text(TEXT[:400])
    mine = f"--config.data.train={tmp_path}/*.txt"
    trained(tmp_path / "refused", *flags(), mine, code=2)
    output = capsys.readouterr().err
    assert "too little text is held out" in output
    assert "val has 22 tokens, and a row 32" in output
    fixes = [line.split()[-1 if "fix" in line else 0] for line in output.splitlines()]
    share = next(word for word in fixes if word.startswith("--config.data.validation=tail:"))
    trained(tmp_path / "run", *flags(), mine, share)
    assert [r["split"] for r in harness.records(tmp_path / "run")].count("val") > 0
    assert "'--config.data.validation=()'" in output


@pytest.mark.slow
def test_token_shards_are_refused_with_ways_out_of_the_users_own_text(texts, tmp_path, capsys):
    words = [f"--config={QUICKSTART}", *flags(), f"--config.data.train={texts}/*.txt"]
    assert main(["data", "tokenize", *words, f"--out={tmp_path / 'shards'}"]) == 0
    capsys.readouterr()
    assert sorted(os.listdir(tmp_path / "shards")) == ["train", "val"]
    assert decoded(TokenShards.open(tmp_path / "shards/val")) == TEXT[int(len(TEXT) * 0.95) :]
    stored = f"--config.data.train={tmp_path / 'shards/train'}"
    trained(tmp_path / "refused", *flags(), stored, code=2)
    output = capsys.readouterr().err
    assert "stdlib" not in output
    fix = output.partition("fix")[2].strip()
    assert fix == f"--config.data.validation={tmp_path / 'shards/val'}"
    trained(tmp_path / "run", *flags(), stored, fix)
    (tmp_path / "shards/val").rename(tmp_path / "elsewhere")
    trained(tmp_path / "without", *flags(), stored, code=2)
    fix = shlex.split(capsys.readouterr().err.partition("fix")[2], comments=True)
    assert fix == ["--config.data.validation=()"]
    trained(tmp_path / "without", *flags(), stored, *fix)


@pytest.mark.slow
def test_the_tokenizer_of_own_text_is_trained_on_that_text(texts, tmp_path):
    mine = f"--config.data.train={texts}/*.txt"
    named = flags(**{"data.tokenizer": "characters"})
    run = trained(tmp_path / "run", *named, mine)
    tokenizer = configs.load(Run, str(run / "config.json")).value.data
    ids = dataset.open_tokenizer(tokenizer)
    pieces = {piece for piece in map(bytes.decode, ids.table) if len(piece) == 1}
    assert pieces == set(TEXT)


@pytest.mark.slow  # the library's validation text is compressed for the report
def test_a_run_from_before_keeps_its_own_data(texts, tmp_path):
    """A run of an earlier version, which validated on the library by default, keeps doing so."""
    mine = f"--config.data.train={texts}/*.txt"
    before = "--config.data.validation=stdlib:validation"
    few = flags(**{"eval.batches": 2, "eval.every": 2, "train.steps": 400})
    trained(tmp_path / "whole", *few, mine, before, "--stop_at=4")
    run = trained(tmp_path / "run", *few, mine, before, "--stop_at=2")
    shutil.copytree(run, tmp_path / "copy")
    trained(run, *few, mine, "--stop_at=4")
    assert harness.losses(run) == harness.losses(tmp_path / "whole")
    assert harness.state_digest(run) == harness.state_digest(tmp_path / "whole")
    saved = json.loads((run / "config.json").read_text())
    assert saved["data"]["validation"] == ["stdlib:validation"]
    warned = " ".join(record["text"] for record in harness.records(run, "warnings.jsonl"))
    assert "stdlib:validation" in warned
    # Who names another set is refused, as ever.
    trained(tmp_path / "copy", *few, mine, "--config.data.validation=tail:10%", code=2)


@pytest.mark.slow
def test_the_other_verbs_read_what_the_run_would(texts, run, tmp_path, capsys):
    words = [f"--config={QUICKSTART}", *flags(), f"--config.data.train={texts}/*.txt", "--json"]
    assert main(["data", "stats", *words]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert "stdlib" not in json.dumps(stats)
    assert main(["eval", f"--workdir={run}", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    last = [r for r in harness.records(run) if r["split"] == "val"][-1]
    assert evaluated["loss_nats"] == pytest.approx(last["loss_nats"], rel=1e-5)
    assert main(["lr-find", *words, "--steps=10", f"--out={tmp_path / 'found'}"]) in (0, 1)
