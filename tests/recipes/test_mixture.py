"""A mixture of three sources by the command line: trained, stopped, resumed, refused, shown."""

import json

import pytest

from jaxlm.cli.main import main
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

WEIGHTS = "web=0.5,code=0.3@25%..0.1@75%,books=0.2@25%..0.4@75%"
SETTINGS = {
    "train.steps": 8,
    "eval.every": 4,
    "eval.follow": "val_code",
    "schedule.warmup": 0,
    "checkpoint.every": 2,
    "data.mixture.name": "weights",
    "data.mixture.weights": tuple(WEIGHTS.split(",")),
    "data.mixture.epochs": ("books=0.1",),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    sources = (
        f"web={folder}/0[0-3]*.txt",
        f"code={folder}/0[4-5]*.txt",
        f"books={folder}/0[67]*.txt",
    )
    return harness.write_config(folder, SETTINGS | {"data.train": sources})


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "unbroken")


def sources(workdir):
    """Figures of the sources in each logged step, by step."""
    return {
        r["step"]: {name: value for name, value in r.items() if name.startswith("sources/")}
        for r in harness.records(workdir)
        if r["split"] == "train"
    }


def test_what_was_read_of_each_source_is_in_metrics_log_and_report(unbroken):
    records = harness.records(unbroken)
    assert {r["split"] for r in records} == {"train", "val_web", "val_code", "val_books"}
    trained = {r["step"]: r for r in records if r["split"] == "train"}
    for step, record in trained.items():
        rows, tokens = (
            sum(record[f"sources/{name}/{what}"] for name in ("web", "code", "books"))
            for what in ("rows", "tokens")
        )
        assert rows == 8 * step
        assert tokens == record["tokens"], "every token of a causal run is trained on"
    # At the end what was that of books is theirs, in proportion.
    weights = [[trained[n][f"sources/{name}/weight"] for name in ("web", "code")] for n in (1, 8)]
    assert weights == [pytest.approx([0.5, 0.3]), pytest.approx([0.5 / 0.6, 0.1 / 0.6])]
    last = trained[8]
    size = last["sources/books/rows"] / last["sources/books/epochs"]
    assert last["sources/books/rows"] == int(0.1 * round(size)) > 2
    assert last["sources/books/weight"] == 0, "its most epochs are over"
    followed = {r["step"]: r["loss_nats"] for r in records if r["split"] == "val_code"}
    assert harness.store(unbroken).record(8).loss_nats == followed[8]
    log = (unbroken / "log.txt").read_text()
    assert "val_code ranks checkpoints" in log
    assert " nats on val_code" in log
    assert "its maximum: from step" in log
    assert log.count("books has reached data.mixture.epochs") == 1
    page = (unbroken / "report.html").read_text()
    assert f"<td>books</td><td class=number>{last['sources/books/rows']}</td>" in page


@pytest.mark.slow
def test_e2_a_mixture_that_was_stopped_twice_reads_on_as_if_it_had_not_been(
    config, unbroken, tmp_path
):
    for stop in (3, 5):
        assert main(harness.words(config, tmp_path / "run", f"--stop_at={stop}")) == 0
    assert main(harness.words(config, tmp_path / "run")) == 0
    assert harness.losses(tmp_path / "run") == harness.losses(unbroken)
    assert harness.state_digest(tmp_path / "run") == harness.state_digest(unbroken)
    assert sources(tmp_path / "run") == sources(unbroken)


def test_maximum_epochs_are_compared_with_the_steps_that_train_epochs_leaves(tmp_path, capsys):
    """1,000 steps would read more than two epochs of each source; one epoch in all does not."""
    settings = SETTINGS | {
        "data.train": (f"web={tmp_path}/0[0-3]*.txt", f"code={tmp_path}/0[4-7]*.txt"),
        "data.mixture.weights": ("web=0.5", "code=0.5"),
        "train.steps": 1000,
        "train.epochs": 1.0,
    }
    config = harness.write_config(tmp_path, settings)
    for most, code in (("2", 0), ("0.1", 2)):
        caps = f"--config.data.mixture.epochs=web={most},code={most}"
        words = harness.words(config, tmp_path / f"run-{most}", "--stop_at=1", caps)
        assert main(words) == code, capsys.readouterr().err
    errors = capsys.readouterr().err
    assert "under their maximum epochs" in errors
    assert int(errors.partition("the run takes ")[2].split()[0]) < 1000 * 8


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("flags", "shown", "fix"),
    [
        (
            ["--config.data.mixture.weights=web=0.6,code=0.3,books=0.1"],
            ["data.mixture.weights: ", "books=0.1"],
            "--allow_change=data.mixture.weights",
        ),
        (
            ["--config.data.mixture.name=temperature", "--config.data.mixture.epochs=books=0.1"],
            [
                "data.mixture.name: weights -> temperature",
                "data.mixture.temperature: absent -> 1.0",
            ],
            "--allow_change=",
        ),
        (
            ["--config.train.steps=10"],
            ["train.steps: 8 -> 10"],
            "--allow_change=train.steps",
        ),
    ],
)
def test_another_mixture_at_a_resume_is_refused_field_by_field(
    flags, shown, fix, config, unbroken, capsys
):
    assert main(harness.words(config, unbroken, *flags)) == 2
    errors = capsys.readouterr().err
    assert all(each in errors for each in shown)
    assert fix in errors


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("flag", "why", "fix"),
    [
        (
            "weights=web=0.5,code=0.3,books=0.3",
            "web 0.5, code 0.3, books 0.3 have the sum 1.1",
            "web=0.4545",
        ),
        (
            "weights=web=0.5,code=0.5@0..0.1@4,books=0.0@0..0.4@50%",
            "",
            "",
        ),
        (
            "weights=web=0.5,code=0.5@0..0.1@50%,books=0.0@0..0.4@100%",
            "at 50% the weights web 0.5, code 0.1, books 0.2 have the sum 0.8",
            "web=0.5,code=0.5,books=0",
        ),
        ("weights=web=0.5,code=0.3@4..0.3@2,books=0.2", "are not in order", "web=0.5"),
        ("weights=web=0.5,code=0.3@1h..0.3@2h,books=0.2", "cannot change with time", "web=0.5"),
        ("weights=web=0.5,cod=0.3,books=0.2", "'cod=0.3' names no source", "code=0.3"),
        ("wieghts=web=1", "unknown setting", "data.mixture.weights"),
    ],
)
def test_weights_that_are_no_mixture_are_named_before_anything_is_read(
    flag, why, fix, config, capsys
):
    code = main(["config", "validate", f"--config={config}", f"--config.data.mixture.{flag}"])
    output = "".join(capsys.readouterr())
    assert code == (2 if why else 0)
    assert why in output
    assert fix in output


@pytest.mark.slow
def test_the_shares_are_shown_by_stats_and_peek(config, capsys):
    assert main(["data", "stats", f"--config={config}", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert sum(parts[f"train/{name}"]["read_rows"] for name in ("web", "code", "books")) == 64
    assert parts["train/books"]["share"] == pytest.approx(parts["train/books"]["read_rows"] / 64)
    documents = [parts[f"train/{name}"]["documents"] for name in ("web", "code", "books")]
    assert sum(documents) == parts["train"]["documents"]
    assert main(["data", "stats", f"--config={config}"]) == 0
    assert "mixture     books " in capsys.readouterr().out
    assert main(["data", "peek", "--rows=8", f"--config={config}"]) == 0
    shown = capsys.readouterr().out
    assert all(f": {name}, /" in shown for name in ("web", "code", "books"))
