"""`jaxlm compare` of task results: items are paired by id, and words state what they show."""

import json
import shutil

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.recipes.compare import tasks


def write(
    run,
    values,
    *,
    metric="accuracy",
    step=10,
    shots=0,
    groups=None,
    task="facts",
    weights="a",
    settings=None,
    **more,
):
    """Write a run with results of a task as `jaxlm eval --tasks` does.

    Args:
      run: the directory of the run.
      values: the metric of each item.
      metric, step, shots: name of the metric, step of the checkpoint, number of examples.
      groups: group of each item; None puts each into its own.
      task, weights: name of the task, and of the evaluated weights.
      settings: further settings of the evaluation.
      more: further facts.
    """
    folder = run / "evals" / f"{task}.{step}{shots}{weights}"
    folder.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    facts = {
        "task": {"name": task, "version": 1},
        "items": "digest",
        "examples": "",
        "settings": {"shots": shots, "form": "cloze", "limit": None},
        "weights": weights,
        "step": step,
        **more,
    }
    facts["settings"] |= {"too_long": "refuse", "seed": 0, "is_chat": False} | (settings or {})
    (folder / "task.json").write_text(json.dumps(facts))
    (folder / "results.json").write_text("{}")
    lines = [
        {
            "id": f"item {n}",
            "group": f"group {n if groups is None else groups[n]}",
            "weight": 1.0,
            "metrics": {metric: float(value)},
        }
        for n, value in enumerate(values)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def answers():
    """Answers of a run to 400 items, and of two others: one with other mistakes, one better."""
    return drawn_answers()


def drawn_answers():
    rng = np.random.default_rng(0)
    first = rng.random(400) < 0.5
    flip = rng.random(400) < 0.12
    return first, np.where(flip, ~first, first), first | (rng.random(400) < 0.2)


def compared(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["compare", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_other_mistakes_cannot_be_told_apart_and_a_real_difference_can(tmp_path, capsys, answers):
    names = ("first", "other", "better")
    for name, each in zip(names, answers, strict=True):
        write(tmp_path / name, each, weights=name)
    page = tmp_path / "page.html"
    answer = compared(capsys, *(tmp_path / name for name in names), f"--out={page}")
    other, better = answer["tasks"]
    flips = int((answers[0] != answers[1]).sum())
    assert len(other["rises"]) + len(other["falls"]) == flips
    assert other["rises"][0].startswith("item ")
    smallest = 100 * other["difference"]["smallest"]
    assert other["verdict"] == (
        f"cannot be distinguished: 400 items see a difference of {smallest:.1f} points"
    )
    assert 4 < smallest < 6
    gain = 100 * (answers[2].mean() - answers[0].mean())
    assert better["verdict"] == f"B is better by {gain:.1f} points"
    assert better["difference"]["low"] > 0
    assert better["falls"] == []
    text = page.read_text()
    assert other["verdict"] in text
    assert "items with another result" in text
    # Compared in the other order, it is worse.
    (worse,) = compared(capsys, tmp_path / "better", tmp_path / "first", f"--out={page}")["tasks"]
    assert worse["verdict"] == f"B is worse by {gain:.1f} points"


@pytest.mark.parametrize("metric", ["refused", "listed_words", "classified"])
def test_more_refusals_or_listed_words_are_called_neither_better_nor_worse(
    tmp_path, capsys, answers, metric
):
    first, _, more = answers
    for name, each in (("first", first), ("more", more)):
        write(tmp_path / name, each, weights=name, metric=metric)
    gain = 100 * (more.mean() - first.mean())
    for pair, word in ((("first", "more"), "higher"), (("more", "first"), "lower")):
        paths = (tmp_path / name for name in pair)
        (task,) = compared(capsys, *paths, f"--out={tmp_path / 'page.html'}")["tasks"]
        assert task["verdict"] == f"B is {word} by {gain:.1f} points"


def test_items_are_paired_by_id_in_any_order(tmp_path, capsys, answers):
    write(tmp_path / "a", answers[0])
    second = write(tmp_path / "b", answers[0])
    lines = (second / "samples.jsonl").read_text().splitlines()
    (second / "samples.jsonl").write_text("\n".join(lines[::-1]) + "\n")
    (each,) = compared(capsys, tmp_path / "a", tmp_path / "b", f"--out={tmp_path / 'p.html'}")[
        "tasks"
    ]
    assert (each["rises"], each["falls"]) == ([], [])


def test_no_difference_and_a_tiny_one_have_words_of_their_own(tmp_path, capsys):
    values = np.arange(40) % 2
    for name, each in (("a", values), ("same", values), ("tiny", values - 2e-4)):
        write(tmp_path / name, each, weights=name)
    names = (tmp_path / name for name in ("a", "same", "tiny"))
    same, tiny = compared(capsys, *names, f"--out={tmp_path / 'page.html'}")["tasks"]
    assert same["verdict"] == (
        "cannot be distinguished: 40 items have equal values and see a difference of 15.0 points"
    )
    assert tiny["verdict"] == "B is worse by less than 0.05 points"
    assert tiny["difference"]["mean"] == pytest.approx(-2e-4)


def test_two_items_with_the_same_difference_prove_nothing(tmp_path, capsys):
    for name, value in (("a", 0.1), ("b", 0.6)):
        write(tmp_path / name, np.full(2, value), weights=name)
    names = (tmp_path / "a", tmp_path / "b")
    page = f"--out={tmp_path / 'page.html'}"
    (each,) = compared(capsys, *names, page)["tasks"]
    assert each["verdict"] == "cannot be distinguished: 2 items are too few"
    assert main(["compare", *map(str, names), page, "--require=not_worse:1%"]) == 1


def test_a_requirement_is_met_only_if_the_interval_excludes_a_loss(tmp_path, capsys, answers):
    for name, each in zip(("first", "other", "better"), answers, strict=True):
        write(tmp_path / name, each, weights=name)
    page = f"--out={tmp_path / 'page.html'}"
    first, other, better = (tmp_path / name for name in ("first", "other", "better"))
    compared(capsys, first, better, page, "--require=not_worse:1%")
    compared(capsys, first, other, page, "--require=not_worse:9%")
    answer = compared(capsys, first, other, page, "--require=not_worse:1%", code=1)
    (why,) = answer["violations"]
    assert why.startswith("facts, accuracy: B may be worse, up to ")
    assert why.endswith("cannot be distinguished: " + answer["tasks"][0]["verdict"].split(": ")[1])
    error = compared(capsys, first, other, page, "--require=better", code=2)["error"]
    assert error["fix"] == "--require=not_worse:1%"


def test_losses_of_documents_are_paired_and_lower_is_better(tmp_path, capsys):
    rng = np.random.default_rng(1)
    first = rng.normal(2.0, 0.5, 60)
    second = first - 0.05 + rng.normal(0, 0.02, 60)
    groups = np.arange(60) // 3
    for name, each in (("first", first), ("second", second)):
        write(tmp_path / name, each, metric="bits_per_byte", groups=groups, weights=name)
    page = f"--out={tmp_path / 'page.html'}"
    words = (tmp_path / "first", tmp_path / "second", page, "--require=not_worse:1%")
    (each,) = compared(capsys, *words)["tasks"]
    assert each["verdict"].startswith("B is better by 0.0")
    assert each["verdict"].endswith(" bits per byte")
    assert each["difference"]["groups"] == 20
    assert each["difference"]["high"] < 0
    # Unpaired, their intervals overlap widely.
    assert each["a"]["low"] < each["b"]["mean"] < each["a"]["high"]


def test_another_version_is_not_paired_and_the_note_has_the_command(tmp_path, capsys, answers):
    first, other = tmp_path / "first", tmp_path / "other"
    write(first, answers[0], shots=5)
    write(other, answers[1], shots=0)
    write(other, answers[1], task="more")
    page = f"--out={tmp_path / 'page.html'}"
    answer = compared(capsys, first, other, page)
    assert answer["tasks"] == []
    (note,) = [each for each in answer["notes"] if "facts" in each]
    assert "is not paired, since settings of first and other differ" in note
    assert f"jaxlm eval --workdir={other} --tasks=facts.toml --shots=5" in note
    more = {"too_long": "skip", "seed": 3, "is_chat": True, "allow_code": True}
    write(first, answers[0], task="later", settings=more, path="my tasks/later.toml")
    (note,) = [e for e in compared(capsys, first, other, page)["notes"] if "task later" in e]
    assert note.endswith(
        f"jaxlm eval --workdir={other} '--tasks=my tasks/later.toml' --form=cloze --too_long=skip "
        "--seed=3 --chat --allow_code"
    )
    error = compared(capsys, first, other, page, "--require=not_worse:1%", code=2)["error"]
    assert "same version" in error["why"]


def test_a_requirement_without_shared_results_has_the_evaluations_that_make_them(
    tmp_path, capsys, answers, monkeypatch
):
    """The fix was a search for task files."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "first", answers[0], shots=5)
    write(tmp_path / "other", answers[1], task="more")
    words = ("first", "other", "--require=not_worse:1%")
    assert compared(capsys, *words, code=2)["error"]["fix"].startswith("find . -name '*.toml'")
    (tmp_path / "facts.toml").write_text('items = "a.jsonl"')
    fix = compared(capsys, *words, code=2)["error"]["fix"]
    assert fix.startswith("jaxlm eval --workdir=other --tasks=facts.toml --shots=5")
    for run in ("first", "other"):
        shutil.rmtree(tmp_path / run / "evals")
    fix = compared(capsys, *words, code=2)["error"]["fix"]
    assert fix.splitlines() == [
        f"jaxlm eval --workdir={run} --tasks=facts.toml" for run in ("first", "other")
    ]


def test_the_newest_finished_step_counts(tmp_path, answers):
    run = tmp_path / "run"
    write(run, answers[0], step=10, weights="a")
    write(run, answers[1], step=20, weights="b")
    (write(run, answers[2][:10], step=30, weights="c") / "results.json").unlink()
    (result,), notes = tasks.read(run)
    assert (result.step, len(result.samples)) == (20, 400)
    assert "is not finished" in notes[0]


def test_p_values_are_adjusted_for_the_number_of_tasks(tmp_path, capsys):
    first = np.zeros(100)
    second = np.arange(100) < 6  # alone p = 0.03
    for task in ("one", "two"):
        write(tmp_path / "first", first, task=task)
        write(tmp_path / "second", second, task=task, weights="b")
    page = f"--out={tmp_path / 'page.html'}"
    both = compared(capsys, tmp_path / "first", tmp_path / "second", page)["tasks"]
    assert [each["difference"]["p_value"] for each in both] == [0.03125] * 2
    assert [each["p_adjusted"] for each in both] == [0.0625] * 2
    assert "cannot be distinguished" in both[0]["verdict"]
