"""`jaxlm compare`: runs side by side, on the console, as JSON and as a page."""

import json
import re
import shutil
import statistics

import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import CommandError
from jaxlm.recipes.compare import comparison
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")
RUNS = {
    "first": {},
    "second": {"seed": 1},
    "slow": {"optim": {"lr": 1e-3}, "train": {"steps": 4}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and copies of its files with other settings, losses and numbers of steps.

    The sweep of test_sweep.py compares runs that were all trained.
    """
    settings = {"train.steps": 6, "eval.batches": 2, "eval.every": 2}
    config = harness.write_config(tmp_path_factory.mktemp("texts"), settings)
    folder = tmp_path_factory.mktemp("runs")
    trained = harness.trained(config, folder / "first")
    made, records = json.loads((trained / "config.json").read_text()), harness.records(trained)
    for number, (name, changes) in enumerate(RUNS.items()):
        if name == "first":
            continue
        shutil.copytree(trained, folder / name)
        changed = made | {
            key: made[key] | value if isinstance(value, dict) else value
            for key, value in changes.items()
        }
        (folder / name / "config.json").write_text(json.dumps(changed))
        steps = changed["train"]["steps"]
        lines = [
            json.dumps(each | {"loss_nats": each["loss_nats"] * (1 + number / 100)}) + "\n"
            for each in records
            if each["step"] <= steps
        ]
        (folder / name / "metrics.jsonl").write_text("".join(lines))
        ended = harness.exit_of(trained)
        ended |= {"step": steps, "time_unix": ended["time_unix"] + number}
        (folder / name / "exit.json").write_text(json.dumps(ended))
    return folder


@pytest.fixture(scope="module")
def answer(runs, tmp_path_factory):
    page = tmp_path_factory.mktemp("page") / "compare.html"
    compared = comparison.compare([runs / name for name in RUNS])
    assert main(["compare", *(str(runs / name) for name in RUNS), f"--out={page}", "--json"]) == 0
    return json.loads(json.dumps(compared.record())), page


def last(folder):
    *_, record = (each for each in harness.records(folder) if each["split"] == "val")
    return record


def test_the_settings_that_differ_are_those_that_were_set(answer):
    values = answer[0]["differences"]
    assert values == {
        "seed": {"first": 0, "second": 1, "slow": 0},
        "optim.lr": {"first": 3e-3, "second": 3e-3, "slow": 1e-3},
        "train.steps": {"first": 6, "second": 6, "slow": 4},
    }


def test_seeds_are_one_result_and_their_spread_is_its_doubt(answer, runs):
    best, slow = answer[0]["results"]
    losses = [last(runs / name)["loss_nats"] for name in ("first", "second")]
    assert best["runs"] == ["first", "second"]
    assert best["nats"] == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert best["doubt"] == pytest.approx(statistics.stdev(losses) / 2**0.5, rel=1e-12)
    assert (best["doubt_of"], best["over_best"]) == ("seeds", 0.0)
    assert (slow["runs"], slow["name"]) == (["slow"], "slow")
    assert slow["over_best"] == pytest.approx(last(runs / "slow")["loss_nats"] - best["nats"])


def test_a_copy_of_a_run_is_no_other_seed_and_a_run_is_not_averaged_with_an_unfinished_one(
    runs, tmp_path
):
    copy, cut = tmp_path / "copy", tmp_path / "cut"
    shutil.copytree(runs / "first", copy)
    shutil.copytree(runs / "second", cut)
    lines = [each for each in harness.records(cut) if each["step"] <= 4]
    (cut / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    names = runs / "first", runs / "second", copy, cut
    results = comparison.compare(names).results
    assert sorted(each.runs for each in results) == [["copy"], ["cut"], ["first", "second"]]
    assert {each.doubt_of for each in results if len(each.runs) == 1} <= {"rows", ""}


def test_the_curves_have_the_steps_tokens_and_seconds_of_each_evaluation(answer, runs):
    curve = answer[0]["curves"]["first"]
    records = harness.records(runs / "first")
    logged = {r["step"]: r for r in records if r["split"] == "train"}
    scores = {r["step"]: r["loss_nats"] for r in records if r["split"] == "val"}
    assert {point["steps"]: point["loss"] for point in curve} == scores
    seconds = 0.0
    for step in range(1, 7):
        seconds += logged[step]["step_seconds"] or 0.0
        (point,) = [p for p in curve if p["steps"] == step] or [None]
        if point:
            assert point["tokens"] == logged[step]["tokens"]
            assert point["seconds"] == pytest.approx(seconds)


def test_losses_at_equal_steps_are_on_the_curve_and_end_with_it(runs):
    compared = comparison.compare([runs / "first", runs / "slow"])
    amounts, table = compared.tables["steps"]
    assert {2, 4, 6} <= set(amounts)
    known = {point.steps: point.value for point in compared.curves["first"]}
    assert set(amounts) <= known.keys()  # steps of evaluations
    for amount, loss, of_slow in zip(amounts, table["first"], table["slow"], strict=True):
        assert loss == (pytest.approx(known[amount]), True)
        assert (of_slow is None) == (amount > 4)


def test_losses_between_evaluations_are_marked(runs, tmp_path, capsys):
    sparse, page = tmp_path / "sparse", tmp_path / "page.html"
    shutil.copytree(runs / "first", sparse)
    lines = [
        each for each in harness.records(sparse) if (each["split"], each["step"]) != ("val", 4)
    ]
    (sparse / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    _, table = comparison.compare([runs / "first", sparse]).tables["steps"]
    assert [each.is_measured for each in table["sparse"]].count(False) == 1
    assert main(["compare", str(runs / "first"), str(sparse), f"--out={page}"]) == 0
    output = capsys.readouterr().out
    assert len(re.findall(r"~\d", output)) == 3 == len(re.findall(r"~\d", page.read_text()))
    assert "~ is interpolated" in output


def test_the_page_needs_no_other_file_and_has_what_the_console_has(answer, runs, tmp_path, capsys):
    text = answer[1].read_text()
    assert not re.search(r"(src|href)=\"?https?:|<script[^>]", text)
    assert text.count("data-chart=") == 1
    assert f"{answer[0]['results'][0]['nats']:.4f}" in text
    assert "optim.lr" in text
    capsys.readouterr()
    assert main(["compare", f"--workdir={runs}", f"--out={tmp_path / 'all.html'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "result"
    assert f"{answer[0]['results'][0]['nats']:.4f} \u00b1" in lines[1]
    assert any(re.match(r"optim\.lr +0\.001\b", line) for line in lines)
    assert [line for line in lines if line.startswith("nats at ")]
    assert lines[-1] == f"page  {tmp_path / 'all.html'}"
    assert (tmp_path / "all.html").is_file()


def test_a_name_that_is_markup_is_text(runs, tmp_path):
    evil = tmp_path / "<b>x"
    evil.mkdir()
    for name in ("config.json", "metrics.jsonl", "exit.json"):
        (evil / name).write_text((runs / "first" / name).read_text())
    page = tmp_path / "p.html"
    assert main(["compare", str(evil), str(runs / "slow"), f"--out={page}", "--quiet"]) == 0
    assert "&lt;b&gt;x" in page.read_text()
    assert "<b>x" not in page.read_text()


def test_other_text_and_runs_that_did_not_finish_are_noted(runs, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((runs / "first/config.json").read_text())
    config["data"]["train"] = ["elsewhere/*.txt"]
    (other / "config.json").write_text(json.dumps(config))
    (other / "metrics.jsonl").write_text((runs / "first/metrics.jsonl").read_text())
    notes = comparison.compare([runs / "first", other]).notes
    assert any("data.train" in note for note in notes)
    assert "other: killed at step 6 of 6" in notes


def test_seeds_of_text_that_changed_between_them_are_no_mean_and_are_noted(runs, tmp_path):
    """The settings name files, whose text is in the digests of each start."""
    other = shutil.copytree(runs / "second", tmp_path / "other")
    (start,) = harness.records(other, "starts.jsonl")
    start["data"] |= {"seed": 1, "validation.val": "0" * 64, "validation.val.tokens": 3}
    (other / "starts.jsonl").write_text(json.dumps(start) + "\n")
    compared = comparison.compare([runs / "first", runs / "second", other])
    assert [each.runs for each in compared.results] == [["first", "second"], ["other"]]
    (note,) = compared.notes
    assert note == (
        "the files of first, second, other changed between the runs (validation.val): "
        "their losses are of different text"
    )


def test_a_run_that_was_merged_is_noted_as_not_trained(runs, tmp_path):
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text((runs / "first/config.json").read_text())
    (merged / "imported.json").write_text('{"status": "merged"}')
    notes = comparison.compare([merged, runs / "first"]).notes
    assert "merged is merged, not trained: it has no steps or losses of its own" in notes
    assert not any(note.startswith("merged:") for note in notes)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "no run directory is named"),
        (["first"], "one run directory is named"),
        (["first", "first"], "all 2 directories that are named are the same run"),
    ],
)
def test_a_comparison_of_fewer_than_two_runs_says_how_many_are_named(tmp_path, names, why):
    with pytest.raises(CommandError, match="a comparison needs two runs") as caught:
        comparison.compare([tmp_path / name for name in names])
    assert caught.value.why == why


def test_one_tokenizer_under_two_names_is_no_difference_of_the_tokens(runs, tmp_path):
    """The setting is a path: it was compared, and not the tokenizer."""
    shutil.copytree(runs / "first", tmp_path / "other")
    made = json.loads((tmp_path / "other/config.json").read_text())
    made["data"]["tokenizer"] = "tok2/tokenizer"
    (tmp_path / "other/config.json").write_text(json.dumps(made))

    def notes():
        return " ".join(comparison.compare([runs / "first", tmp_path / "other"]).notes)

    assert "data.tokenizer" not in notes()
    (tmp_path / "other/tokenizer").write_text("another")
    assert "the runs differ in data.tokenizer" in notes()


def test_runs_without_evaluations_are_compared_by_their_training(runs, tmp_path):
    paths = []
    for name in ("first", "slow"):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text((runs / name / "config.json").read_text())
        kept_lines = [r for r in harness.records(runs / name) if r["split"] == "train"]
        (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept_lines))
        paths.append(path)
    compared = comparison.compare(paths)
    assert compared.curves == compared.training
    assert any("those of training" in note for note in compared.notes)


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        ([], 2, "a comparison needs two runs"),
        (["first"], 2, "a comparison needs two runs"),
        (["first", "first"], 2, "a comparison needs two runs"),
        (["first", "none"], 66, "the directory contains no run"),
    ],
)
def test_what_cannot_be_compared_is_an_error(words, code, what, runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["compare", *words]) == code
    assert what in capsys.readouterr().err


def test_a_damaged_run_is_an_error_with_its_file(runs, tmp_path, capsys):
    run = tmp_path / "broken"
    run.mkdir()
    (run / "config.json").write_text((runs / "first/config.json").read_text())
    (run / "metrics.jsonl").write_text("{\n{}\n")
    assert main(["compare", str(runs / "first"), str(run)]) == 65
    assert f"{run / 'metrics.jsonl'}:1" in capsys.readouterr().err


@pytest.fixture
def rewarded(runs, tmp_path):
    """Copies of two runs, the first with rewards that are the higher ones."""
    for name, scale in (("first", 1.0), ("slow", 0.5)):
        shutil.copytree(runs / name, tmp_path / name)
        lines = []
        for each in harness.records(runs / name):
            each.pop("loss_stderr", None)
            reward = scale * each["step"]
            loss = {} if each["split"] == "train" else {"loss_nats": -reward}
            lines.append(json.dumps(each | {"reward": reward} | loss) + "\n")
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def test_runs_with_rewards_are_compared_by_them(rewarded, tmp_path, capsys):
    page = tmp_path / "compare.html"
    names = [str(rewarded / name) for name in ("slow", "first")]
    assert main(["compare", *names, f"--out={page}"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["result", "reward", "over", "the", "highest"]
    assert [row.split() for row in rows[:2]] == [
        ["first", "6.0000", "+0.0000"],
        ["slow", "2.0000", "-4.0000"],
    ]
    compared = comparison.compare([rewarded / name for name in ("slow", "first")])
    last = compared.record()["curves"]["first"][-1]
    assert (last["steps"], last["reward"]) == (6, 6.0)
    assert [point.value for point in compared.training["slow"]][-1] == 2.0
    assert "mean of a sample" in page.read_text()


@pytest.mark.parametrize(("kind", "is_other"), [("preference", True), ("distill", False)])
def test_losses_of_other_objectives_are_noted(runs, tmp_path, kind, is_other):
    other = tmp_path / "other"
    shutil.copytree(runs / "first", other)
    config = json.loads((other / "config.json").read_text())
    config["objective"]["name"] = kind
    (other / "config.json").write_text(json.dumps(config))
    notes = comparison.compare([runs / "first", other]).notes
    note = f"the runs differ in objective.name (first: causal, other: {kind})"
    assert any(each.startswith(note) for each in notes) == is_other


def test_rewards_are_not_compared_with_losses(rewarded, runs):
    compared = comparison.compare([rewarded / "first", runs / "slow"])
    assert not compared.is_rewarded
    assert any("first are negative rewards" in note for note in compared.notes)
    slow, first = compared.results
    assert (slow.name, first.name) == ("slow", "first")
    assert (slow.over_best, first.nats) == (0, None)
    assert compared.curves["slow"]
    assert not compared.curves["first"]
