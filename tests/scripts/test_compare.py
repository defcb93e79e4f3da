"""Scripts that compare optimizers, objectives and schedules search, resume and write tables."""

import importlib.util
import json
import math
import sys
import typing
from argparse import Namespace
from pathlib import Path

import pytest

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, Preempted
from jaxlm.objectives.config import TokenObjective
from jaxlm.optim.config import Optimizer
from jaxlm.optim.schedule_config import LinearDecay, Schedule
from jaxlm.recipes.compare import sweep as sweeps
from tests.faults import harness

ROOT = Path(__file__).parents[2]
MANUAL = {
    "objectives": "jaxlm/docs/objectives.md",
    "optimizers": "jaxlm/docs/optimizers.md",
    "schedules": "jaxlm/docs/optimizers.md",
}  # the page with the table of a study
MODULES = "runs table study optimizers objectives schedules".split()
TINY = {
    "data.validation": "20%",
    "data.tokenizer": "bytes",
    "data.sequence": "32",
    "model.width": "32",
    "train.batch": "8",
}


@pytest.fixture(scope="module")
def scripts():
    """The modules of the scripts' folder, by the names under which they know each other."""
    modules = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            file = ROOT / f"scripts/compare_{name}.py"
            spec = importlib.util.spec_from_file_location(file.stem, file)
            modules[name] = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, file.stem, modules[name])
            spec.loader.exec_module(modules[name])
        yield Namespace(**modules)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").mkdir()
    harness.write_config(tmp_path / "texts")
    return f"{tmp_path}/texts/*.txt"


@pytest.fixture
def compare(scripts, texts, tmp_path, monkeypatch, capsys):
    """Return a function that runs a script as a command: exit code, output and results.

    Args:
      scripts: the modules.
      texts: the training text.
      tmp_path: parent of the runs.
      monkeypatch: sets the working directory and the arguments.
      capsys: the output of this process.
    """
    monkeypatch.chdir(ROOT)

    def run(name, *flags):
        settings = [f"--config.{path}={value}" for path, value in TINY.items()]
        settings.append(f"--config.data.train={texts}")
        words = [f"--workdir={tmp_path}/runs", *flags, *settings]
        monkeypatch.setattr(sys, "argv", [f"scripts/compare_{name}.py", *words])
        module = getattr(scripts, name)
        code = scripts.study.main(module.STUDY)
        file = tmp_path / f"runs/{name}.json"
        return code, capsys.readouterr(), json.loads(file.read_text()) if code == 0 else None

    return run


class Played:
    """Stands for `train_all` of sweeps: writes the files of runs, with bits by the rate's error.

    The bits per byte grow with the distance from a rate of 0.01.
    """

    def __init__(self, diverges_from=math.inf, stops_after=math.inf):
        self.trained, self.diverges_from, self.stops_after = [], diverges_from, stops_after

    def __call__(self, members, file, overrides, *, parallel, say):
        assert (overrides, parallel) == ([], 1)
        codes = {}
        for member in members:
            state = sweeps.ended(member.path)
            codes[str(member.path)] = self.play(member) if state is None else state.code
        return codes

    def play(self, member):
        run, workdir = member.run, member.path
        if len(self.trained) == self.stops_after:
            workdir.mkdir(parents=True)
            raise Preempted(
                "stopped by SIGTERM", where="step 0", why="it was asked to", fix="the same command"
            )
        self.trained.append(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        is_over = run.optim.lr >= self.diverges_from
        (workdir / "config.json").write_text(json.dumps(config.to_json(run)))
        steps = run.train.steps
        end = {"code": 79 if is_over else 0, "step": 1 if is_over else steps}
        (workdir / "exit.json").write_text(json.dumps(end | {"cause": "", "time_unix": 0.0}))
        if is_over:
            return 79
        bits = 2 + math.log(run.optim.lr / 0.01) ** 2 + 0.1 * run.seed + 1 / steps
        known = {"step": steps, "loss_nats": 1.0, "time_unix": 0.0}
        records = [
            {"split": "train", "tokens": steps * run.tokens_per_step // 2} | known,
            {"split": "val", "bits_per_byte": bits, "tokens": 1} | known,
        ]
        lines = [json.dumps(record) + "\n" for record in records]
        (workdir / "metrics.jsonl").write_text("".join(lines))
        return 0


@pytest.fixture
def sweep(scripts, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)

    def make(train, **settings):
        values = {**scripts.runs.SMALL, **settings}
        arms = scripts.optimizers.ARMS[:2]
        (tmp_path / "seconds.json").write_text(json.dumps({arms[0].name: 0.02, arms[1].name: 0.01}))
        made = scripts.runs.Sweep(scripts.runs.FILE, values, tmp_path, steps=40, say=lambda _: None)
        monkeypatch.setattr(sweeps, "train_all", train)

        def run():
            return scripts.runs.compare(
                made,
                arms,
                seeds=2,
                most=12,
                is_timed=True,
                figures=scripts.optimizers.STUDY.figures,
                say=lambda _: None,
                publish=lambda rows: None,
            )

        return run

    return make


@pytest.mark.parametrize("name", ["optimizers", "objectives", "schedules"])
def test_what_is_published_has_every_arm_as_measured(scripts, name):
    study = getattr(scripts, name).STUDY
    published = json.loads((ROOT / f"scripts/compared/{name}.json").read_text())
    assert published["missing"] == 0
    assert [row["name"] for row in published["arms"]] == [arm.name for arm in study.arms]
    assert (published["seeds"], published["steps"]) == (3, study.steps)
    table = scripts.table.table(published["arms"], study.measures, study.columns)
    for page in (f"scripts/compared/{name}.md", MANUAL[name]):
        assert table in (ROOT / page).read_text()


def test_every_optimizer_every_objective_and_every_schedule_is_compared(scripts):
    names = {arm.name for arm in typing.get_args(Optimizer)}
    assert {arm.name for arm in scripts.optimizers.ARMS} == names
    alone = {arm.name for arm in typing.get_args(TokenObjective)}
    mixed = {f"causal+{name}" for name in alone - {"causal"}}
    assert {arm.name for arm in scripts.objectives.ARMS} == alone | mixed
    names = {arm.name for arm in typing.get_args(Schedule)}
    assert {arm.name for arm in scripts.schedules.ARMS} == names | {"cosine_restarts"}


def test_a_schedule_is_compared_at_its_own_defaults_whatever_the_config_has(scripts, sweep):
    arm = next(arm for arm in scripts.schedules.ARMS if arm.name == "linear")
    made = scripts.runs.Sweep(
        scripts.runs.FILE, scripts.runs.SMALL, Path(), steps=40, say=lambda _: None
    )
    assert made.run(arm).schedule == LinearDecay()


@pytest.mark.parametrize("optimum", [2e-5, 3e-4, 1.1e-3, 0.7])
def test_the_search_ends_with_a_worse_rate_on_either_side_of_the_best(scripts, optimum):
    tried = []

    def score(rate):
        tried.append(rate)
        return abs(math.log(rate / optimum))

    rates = scripts.runs.tune(score, 1e-3, most=30)
    chosen = scripts.runs.best(rates)
    assert len(set(tried)) == len(tried) == len(rates)
    assert min(rates) < chosen < max(rates)
    assert 1 / 1.5 < chosen / optimum < 1.5


def test_the_search_is_bounded_and_goes_down_where_everything_diverges(scripts):
    rates = scripts.runs.tune(lambda rate: math.inf, 1.0, most=6)
    assert [*rates][:2] == [1.0, 4.0]
    assert sorted(rates)[:4] == [*rates][:1:-1]
    assert len(rates) == 6
    assert scripts.runs.best(rates) == min(rates)
    assert scripts.runs.tune(lambda rate: 1.0, 0.5, most=1) == {0.5: 1.0}


def test_equal_time_is_what_the_fastest_needs_and_small_differences_are_none(scripts):
    assert scripts.runs.affordable(400, 1.0) == 400
    assert scripts.runs.affordable(400, 0.985) == 400
    assert scripts.runs.affordable(400, 0.5) == 200
    assert scripts.runs.affordable(400, 0.001) == 20
    assert scripts.runs.affordable(4, 0.5) == 2


def test_places_say_what_the_seeds_leave_open(scripts):
    places = scripts.table.places(
        {"a": [1.0, 1.2], "b": [1.1, 1.3], "c": [1.25, 1.4], "d": [2.0, None], "e": []}
    )
    assert places == {"a": (1, 2), "b": (1, 3), "c": (2, 3), "d": (4, 4)}


def test_a_sweep_that_was_stopped_goes_on_and_trains_nothing_twice(sweep, tmp_path):
    begun, whole = Played(stops_after=5), Played()
    with pytest.raises(Preempted):
        sweep(begun)()
    rows = sweep(whole)()
    assert all(0.005 < row["rate"] < 0.02 for row in rows)
    slow, fast = rows
    assert (slow["equal_tokens"]["steps"], slow["equal_time"]["steps"]) == (40, 20)
    assert fast["equal_time"] == fast["equal_tokens"], "the fastest has all the time it needs"
    base = slow["equal_tokens"]["bits_per_byte"]
    assert base[1] - base[0] == pytest.approx(0.1), "a value for each seed"
    trained = begun.trained + whole.trained
    assert len(trained) == len(set(trained))
    resumed = Played()
    assert sweep(resumed)() == rows
    assert resumed.trained == []
    page = (tmp_path / "compare.html").read_text()
    assert all(f"s40-seed{seed}" in page for seed in (1, 2))
    assert "seed0" not in page, "rates are chosen by runs that are not reported"


def test_a_run_that_diverged_is_not_tried_again_and_never_the_best(sweep):
    rows = sweep(Played(diverges_from=0.004))()
    assert all(row["rate"] < 0.004 for row in rows)
    assert any(bits is None for _, bits in rows[0]["rates"])
    diverging = Played(diverges_from=0.004)
    assert sweep(diverging)() == rows
    assert diverging.trained == []


def test_a_folder_of_other_runs_is_refused(sweep):
    sweep(Played())()
    with pytest.raises(ConfigError, match="other settings") as caught:
        sweep(Played(), **{"model.width": 128})()
    assert "model.width: 64 -> 128" in caught.value.why


def test_the_table_and_the_sentences_name_the_lowest(scripts, sweep):
    rows = sweep(Played())()
    measures = scripts.optimizers.STUDY.measures
    table = scripts.table.table(rows[::-1], measures, scripts.table.COLUMNS)
    lines = table.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    first = scripts.table.ordered(rows, measures[0])[0]
    assert lines[2].startswith(f"| `{first['name']}` | 1")
    assert f"`{first['name']}` has the lowest mean" in scripts.table.shown(rows, measures)
    assert scripts.table.draw(rows, measures).startswith(b"\x89PNG")


def test_the_manual_has_a_place_for_every_table(scripts):
    for study in (scripts.optimizers.STUDY, scripts.objectives.STUDY, scripts.schedules.STUDY):
        text = (ROOT / MANUAL[study.name]).read_text(encoding="utf-8")
        assert f"<!-- {study.name} -->" in text
        assert f"<!-- end of {study.name} -->" in text


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (["--only=adam,muonn"], "--only=muon"),
        (["--config.train.steps=9"], "--steps=200"),
        (["--seeds=0"], "--seeds=3"),
        (["--step=9"], "--steps=9"),
        (["--page=CHANGELOG.md"], "--page=jaxlm/docs/optimizers.md"),
    ],
)
def test_a_wrong_command_is_told_with_its_fix(compare, flags, fix):
    code, output, _ = compare("optimizers", *flags)
    assert code == 2
    assert output.err.rstrip().endswith(fix)


@pytest.mark.slow
def test_two_optimizers_from_the_command_to_the_page_and_nothing_again(
    compare, tmp_path, one_device
):
    manual = tmp_path / "page.md"
    manual.write_text("before\n<!-- optimizers -->\nold\n<!-- end of optimizers -->\nafter\n")
    flags = ("--only=sgd,adamw", "--steps=2", "--seeds=1", "--rates=1", f"--page={manual}")
    code, output, results = compare("optimizers", *flags)
    assert code == 0, output.err
    assert [row["name"] for row in results["arms"]] == ["adamw", "sgd"]
    assert results["tokens"] == 2 * 8 * 32
    for row in results["arms"]:
        (bits,) = row["equal_tokens"]["bits_per_byte"]
        assert 0 < bits < 9
        assert row["step_seconds"] > 0
    page = (tmp_path / "runs/optimizers.md").read_text()
    assert "What it cannot show" in page
    assert output.out.strip() in page
    shown = manual.read_text()
    assert shown.startswith(f"before\n<!-- optimizers -->\n\n{output.out.strip()}\n")
    assert shown.endswith("<!-- end of optimizers -->\nafter\n")
    assert "old" not in shown
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/exit.json")}
    assert len(stamps) >= 4
    assert compare("optimizers", *flags)[2] == results
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


@pytest.mark.slow
def test_two_schedules_from_the_command_to_the_page_and_none_is_timed(
    compare, tmp_path, one_device
):
    flags = ("--only=step,cosine_restarts", "--steps=10", "--seeds=1", "--rates=1")
    code, output, results = compare("schedules", *flags)
    assert code == 0, output.err
    assert {row["name"] for row in results["arms"]} == {"step", "cosine_restarts"}
    for row in results["arms"]:
        (bits,) = row["equal_tokens"]["bits_per_byte"]
        assert 0 < bits < 9
        assert "equal_time" not in row
    assert not (tmp_path / "runs/seconds.json").exists()
    assert "What it cannot show" in (tmp_path / "runs/schedules.md").read_text()
    runs = tmp_path.glob("runs/*/lr*-seed1/config.json")
    schedules = {path.parts[-3]: json.loads(path.read_text())["schedule"] for path in runs}
    assert schedules["cosine_restarts"]["cycles"] == 3
    assert schedules["step"]["name"] == "step"


@pytest.mark.slow
def test_objectives_are_read_from_left_to_right_where_they_can_be(
    scripts, compare, tmp_path, one_device
):
    flags = ("--only=causal,masked,blank,causal+span", "--steps=4", "--seeds=1", "--rates=1")
    code, output, results = compare("objectives", *flags)
    assert code == 0, output.err
    rows = {row["name"]: row["equal_tokens"] for row in results["arms"]}
    for name in ("causal", "causal+span"):
        assert rows[name]["left_to_right"] == rows[name]["own"]
        (place,) = (tmp_path / "runs" / name).glob("*-s4-seed1")
        read = scripts.objectives.from_left_to_right(place)
        assert read == pytest.approx(rows[name]["own"][0], rel=1e-5), "what training measured"
    assert rows["blank"]["left_to_right"] != rows["blank"]["own"]
    assert "left_to_right" not in rows["masked"]
    assert 0.05 < rows["masked"]["predicted"][0] < 0.3 < rows["causal"]["predicted"][0]
