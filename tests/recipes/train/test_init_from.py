"""`jaxlm train --init_from`: a run that begins with weights of another run or model."""

import json

import numpy as np
import pytest

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.cli.main import main
from jaxlm.core.errors import CommandError, InputMissing
from jaxlm.recipes.train import init_from
from tests.cli.test_exchange import write
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of four steps that kept two, under `a`."""
    folder = tmp_path_factory.mktemp("beginning")
    (folder / "texts").mkdir()
    harness.write_config(folder / "texts")
    assert main([*words(folder, "a"), "--config.train.steps=4"]) == 0
    return folder


def words(folder, name, *rest):
    return harness.words(folder / "texts/config.py", folder / name, *rest)


def arrays(run, step):
    leaves = Store(run / "checkpoints", CheckpointConfig(), read_only=True).arrays(step)
    return {path: array for path, array in leaves.items() if path.startswith("params/")}


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {each["step"]: each["loss_nats"] for each in rows if each["split"] == "train"}


def error(capsys, *args):
    code = main([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)["error"]


def test_a_run_begins_with_the_weights_of_a_step_of_another(folder):
    run, straight = folder / "from-2", folder / "straight"
    begun = words(folder, run.name, f"--init_from={folder / 'a'}@2", "--config.train.steps=4")
    assert main([*begun, "--stop_at=1"]) == 0
    for path, array in arrays(folder / "a", 2).items():
        np.testing.assert_array_equal(arrays(run, 0)[path], array, err_msg=path)
    # Its origin is kept, and it resumes from its own steps, independently of the other run.
    gone = folder / "gone"
    (folder / "a").rename(gone)
    try:
        assert main([*begun, "--config.checkpoint.keep_last=1"]) == 0
    finally:
        gone.rename(folder / "a")
    assert 0 in Store(run / "checkpoints", CheckpointConfig(), read_only=True).steps()
    assert main([*begun, f"--workdir={straight}"]) == 0
    assert losses(run) == losses(straight)


def test_without_a_config_the_new_run_has_that_of_the_run_it_begins_with(folder):
    words = [f"--init_from={folder / 'a'}@2", f"--workdir={folder / 'same'}", "--quiet"]
    assert main(["train", *words, "--config.guard.budget=3", "--stop_at=1"]) == 0
    before, after = (
        json.loads((folder / name / "config.json").read_text()) for name in ("a", "same")
    )
    assert after["guard"]["budget"] == 3 != before["guard"]["budget"]
    assert after["data"]["train"] == before["data"]["train"]
    assert after["train"] == before["train"]
    for path, array in arrays(folder / "a", 2).items():
        np.testing.assert_array_equal(arrays(folder / "same", 0)[path], array, err_msg=path)


def test_the_run_has_the_mup_of_the_run_it_begins_with(folder, capsys):
    """muP divides logits and scores: without it the same weights are another model."""
    base = folder / "mup"
    flags = ["--config.mup.base_width=16", "--config.average.name=ema"]
    assert main([*words(folder, base.name, *flags), "--stop_at=2"]) == 0
    begun = words(folder, "from-mup", f"--init_from={base}", "--stop_at=1")
    assert main(begun) == 0
    assert json.loads((folder / "from-mup/config.json").read_text())["mup"]["base_width"] == 16
    warnings = (folder / "from-mup/warnings.jsonl").read_text()
    assert f"the parameters of step 2 of {base}, not with their average" in warnings
    capsys.readouterr()
    assert main(["eval", f"--workdir={base}", "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss_nats"]
    rows = harness.records(folder / "from-mup")
    first = next(row for row in rows if row["split"] == "val")
    assert (first["step"], first["loss_nats"]) == (0, pytest.approx(loss, rel=1e-5))
    none = words(folder, "no-mup", f"--init_from={base}", "--config.mup.base_width=None")
    code, message = error(capsys, *none)
    assert (code, message["fix"]) == (2, "--config.mup.base_width=16")


def test_an_imported_model_and_no_text_is_an_error_before_anything_is_read(folder, capsys):
    (folder / "a/imported.json").write_text("{}")
    try:
        code, message = error(
            capsys, "train", f"--init_from={folder / 'a'}", f"--workdir={folder / 'new'}"
        )
    finally:
        (folder / "a/imported.json").unlink()
    assert (code, message["fix"]) == (2, "--config.data.train='texts/*.txt'")
    assert not (folder / "new").exists()


@pytest.mark.slow
def test_a_step_of_it_is_replayed_from_where_it_began(folder, capsys):
    run = folder / "replayed"
    begun = words(folder, run.name, f"--init_from={folder / 'a'}@2", "--config.train.steps=2")
    assert main(begun) == 0
    capsys.readouterr()
    code = main(["replay", f"--workdir={run}", "--step=1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["from_step"], report["is_as_logged"]) == (0, 0, True)


@pytest.mark.slow
def test_another_model_or_tokenizer_is_refused_with_the_flags_that_do(folder, capsys):
    flag = f"--init_from={folder / 'a'}"
    code, message = error(capsys, *words(folder, "b", flag, "--config.model.width=48"))
    assert (code, message["what"]) == (2, "the model differs from that of the run to start from")
    assert "--config.model.width=" in message["fix"]
    code, message = error(capsys, *words(folder, "b", flag, "--config.data.tokenizer=characters"))
    assert (code, message["what"]) == (
        2,
        "the tokenizer differs from that of the run to start from",
    )
    assert main(words(folder, "b", flag, *message["fix"].split(), "--stop_at=1")) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "code", "what"),
    [
        ("a@3", 66, "the run has no checkpoint of step 3"),
        ("a@last", 2, "the step to start from is not a number"),
        ("nowhere", 66, "there is no config.json in the run directory"),
    ],
)
def test_a_place_that_is_none_is_refused(folder, capsys, place, code, what):
    exit_code, message = error(capsys, *words(folder, "c", f"--init_from={folder / place}"))
    assert (exit_code, message["what"]) == (code, what)
    if place == "a@3":
        assert message["fix"] == f"--init_from={folder / 'a'}@4"


def test_a_start_that_is_gone_is_not_replaced_by_another_step(folder):
    record = {"run": str(folder / "a"), "step": 3}
    with pytest.raises(InputMissing, match="began with is gone") as caught:
        init_from.find_start(record, None, print, Verifier())
    assert caught.value.fix == f"restore {folder / 'a'}@3 from a copy"


def texts(folder, **words_):
    """A folder of twelve texts of these words, by its name."""
    for name, vocabulary in words_.items():
        (folder / name).mkdir()
        for number in range(12):
            (folder / name / f"{number}.txt").write_text(f"{name} {number} {vocabulary} " * 6)


def shown(run, names):
    """Checks the table of what was learnt and forgotten in the report; its differences, by set."""
    losses_by_step = {
        (each["split"], each["step"]): each["loss_nats"] for each in harness.records(run)
    }
    last, report = max(step for _, step in losses_by_step), (run / "report.html").read_text()
    changes = {}
    for name in names:
        before, after = losses_by_step[name, 0], losses_by_step[name, last]
        changes[name] = after - before
        cells = [f"{before:.4f}", f"{after:.4f}", f"{changes[name]:+.4f}"]
        row = "".join(f"<td class=number>{cell}</td>" for cell in cells)
        assert f"<td>{name}</td>{row}" in report
    return changes


@pytest.mark.slow
def test_an_imported_model_learns_a_new_domain_beside_a_replay_of_the_old(folder, tmp_path, capsys):
    """In a directory of its own, by a schedule that starts again: the rate rises and falls."""
    source, run, further = write(tmp_path / "source"), tmp_path / "run", tmp_path / "further"
    assert main(["import", f"--from={source}", f"--workdir={run}"]) == 0
    capsys.readouterr()
    fix = error(capsys, *words(folder, "x"), f"--workdir={run}")[1]["fix"]
    origin = f"--init_from={run}"
    assert origin in fix.split()
    texts(tmp_path, old="one two three four", new="red green blue")
    sets = [f"{name}={tmp_path}/{name}" for name in ("new", "old")]
    settings = {
        "data.train": ",".join(f"{each}/[0-9].txt" for each in sets),
        "data.validation": ",".join(f"{each}/1[01].txt" for each in sets),
        "data.mixture.name": "weights",
        "data.mixture.weights": "new=0.75,old=0.25",
        "schedule.name": "cosine",
        "schedule.warmup": "4",
        "optim.lr": "3e-3",
        "train.steps": "12",
        "train.batch": "8",
        "log.every": "1",
    }
    begin = ["train", f"--config={run}/config.json", origin, f"--workdir={further}"]
    assert main([*begin, "--quiet", *(f"--config.{k}={v}" for k, v in settings.items())]) == 0
    steps = [each for each in harness.records(further) if each["split"] == "train"]
    rates = [each["learning_rate"] for each in steps]
    assert rates.index(max(rates)) in (3, 4)
    assert max(rates) == pytest.approx(3e-3)
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    rows = {name: steps[-1][f"sources/{name}/rows"] for name in ("new", "old")}
    assert rows == {"new": 72, "old": 24}
    assert max(shown(further, ("new", "old")).values()) < 0


@pytest.mark.slow
def test_what_was_forgotten_is_a_number_in_the_report(folder, capsys):
    """The words differ from those of the first run: each named set is evaluated first and last."""
    texts(folder, old="one two three four", new="red green blue", more="red blue")
    run = folder / "domain"
    begun = words(
        folder,
        run.name,
        f"--init_from={folder / 'a'}",
        f"--config.data.train={folder}/more/*.txt",
        f"--config.data.validation=old={folder}/old/*.txt,new={folder}/new/*.txt",
        f"--config.data.tokenizer={folder / 'a' / 'tokenizer'}",
        "--config.data.packing=concat",  # as `eval` reads any text
        "--config.train.steps=6",
        "--config.optim.lr=0.02",
    )
    assert main(begun) == 0
    capsys.readouterr()
    text = f"--text={folder}/old/*.txt"
    assert main(["eval", f"--workdir={folder / 'a'}", text, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    rows = {(each["split"], each["step"]): each for each in harness.records(run)}
    np.testing.assert_allclose(rows["old", 0]["loss_nats"], before["loss_nats"], rtol=1e-6)
    changes = shown(run, ("old", "new"))
    assert changes["new"] < changes["old"]
    assert "nats before" not in (folder / "a" / "report.html").read_text()


def model_of(run):
    saved = json.loads((run / "config.json").read_text())
    return saved["model"], saved["data"]["tokenizer"]


@pytest.mark.slow
def test_the_model_and_the_tokenizer_of_the_other_run_replace_those_of_a_config(folder, capsys):
    """A shipped config trains on from any run: its own model and tokenizer are named, and left."""
    run = folder / "by-name"
    settings = {
        "data.train": f"{folder}/texts/*.txt",
        "data.validation": "tail:20%",
        "data.sequence": "32",
        "train.steps": "3",
        "train.batch": "4",
        "sample.prompts": "()",
        "model.dropout": "0.1",  # keeps the meaning of the weights
    }
    command = ["train", "--config=quickstart", f"--init_from={folder / 'a'}", f"--workdir={run}"]
    command += [f"--config.{path}={value}" for path, value in settings.items()]
    assert main([*command, "--stop_at=2"]) == 0
    (model, tokenizer), (source, _) = model_of(run), model_of(folder / "a")
    assert model == source | {"dropout": 0.1, "init": "gpt2"}  # of no meaning to weights
    assert tokenizer == str(folder / "a/tokenizer")
    log = (run / "log.txt").read_text()
    place = "in place of that of"
    assert f"model: that of {folder / 'a'}, {place}" in log
    assert f"tokenizer: that of {folder / 'a'}, {place}" in log
    assert json.loads((run / "provenance.json").read_text())["model.width"].startswith(str(folder))
    printed = capsys.readouterr().err
    assert f"jaxlm train --workdir={run}" in printed
    assert main(["train", f"--workdir={run}"]) == 0  # the line that the end prints
    assert main(command) == 0  # the first command, too
    assert "already complete" in capsys.readouterr().out


@pytest.mark.slow
def test_a_vocabulary_of_the_size_of_the_tokenizer_equals_auto(folder):
    size = {}
    for name, vocab in (("auto", "auto"), ("fixed", "320")):
        run = folder / f"vocab-{name}"
        assert main([*words(folder, run.name, f"--config.model.vocab={vocab}"), "--stop_at=1"]) == 0
        size[name] = Store(run / "checkpoints", CheckpointConfig(), read_only=True).layout(1)
    assert size["auto"] == size["fixed"]
    for one, other in (("auto", "320"), ("fixed", "auto")):
        flags = (f"--init_from={folder / f'vocab-{one}'}", f"--config.model.vocab={other}")
        assert main([*words(folder, f"from-{one}", *flags), "--stop_at=1"]) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["eval", "generate --prompt=a --max_tokens=2"])
def test_a_model_of_another_library_as_a_run_is_fixed_by_an_import(
    tmp_path, capsys, verb, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "hf")
    code, message = error(capsys, *verb.split(), "--workdir=hf")
    assert (code, message["what"]) == (2, "hf is a model of another library")
    command = message["fix"].split()
    assert main([*command[1:], "--quiet"]) == 0
    more = [] if verb != "eval" else [f"--text={__file__}", "--sequence=32"]
    assert main([*verb.split(), command[-1], *more]) == 0


def test_one_of_several_processes_imports_no_model(tmp_path):
    write(tmp_path / "hf")
    source, run = str(tmp_path / "hf"), tmp_path / "run"
    with pytest.raises(CommandError, match="several processes cannot import") as refused:
        init_from.as_run(source, run, None, print, is_alone=False)
    command, flag = refused.value.fix.splitlines()
    assert main([*command.split()[1:], "--quiet"]) == 0
    assert flag.split()[0] == f"--init_from={run}-base"
    assert init_from.as_run(source, run, None, print, is_alone=False) == f"{run}-base"


def test_a_recipe_as_the_config_of_a_run_is_fixed_to_its_verb(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text of some words. " * 200)
    more = ["--config.source=a.txt", "--quiet"]
    code, message = error(capsys, "train", "--config=data/clean-stdlib", "--workdir=x")
    assert code == 2
    assert message["fix"] == "jaxlm data run --config=data/clean_stdlib --out=out"
    assert main([*message["fix"].split()[1:], *more]) == 0
    capsys.readouterr()
    code, message = error(capsys, "data", "run", "--config=quickstart", "--out=out")
    assert (code, message["fix"]) == (2, "jaxlm train --config=quickstart --workdir=runs/a")
