"""`jaxlm scale` by the command line: the plan, its refusals and fixes, and a real sweep."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.data import tokenizer
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips
from jaxlm.recipes.config import Run
from jaxlm.recipes.scaling import sweep
from jaxlm.recipes.scaling.loss_law import PUBLISHED, Law
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

LAW = Law(E=0.6, A=40.0, B=300.0, alpha=0.4, beta=0.42)
WIDTHS, STEPS = (16, 32, 48), (100, 300)


def scale(capsys, *flags):
    capsys.readouterr()
    code = main(["scale", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def write_run(folder, width, steps, *, done=None, settings=(), data=(), losses=LAW, scatter=0.0):
    """Write the files of a finished run, with its loss by a law.

    Args:
      folder: the run directory.
      width, steps: width of the model, steps of its config.
      done: number of steps that are done; None for all.
      settings: pairs of a path and a value.
      data: changes of the fingerprint of the data.
      losses: the law that gives the loss.
      scatter: error of the logarithm of the loss.
    """
    run = configs.load(
        Run,
        None,
        [
            ("data.tokenizer", "bytes"),
            ("data.sequence", "32"),
            ("train.batch", "8"),
            ("train.steps", str(steps)),
            ("model.width", str(width)),
            ("model.depth", "2"),
            ("model.heads", "2"),
            ("model.kv_heads", "2"),
            *settings,
        ],
    ).value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configs.to_json(run)))
    encoder = tokenizer.Bytes()
    (folder / "tokenizer").write_bytes(encoder.serialize())
    fingerprint = {"tokenizer": encoder.digest, "sequence": 32, "seed": 0, "train": "a" * 64}
    fingerprint |= {"train.tokens": 10**7, "validation.val": "b" * 64} | dict(data)
    start = {"step": 0, "rewinds": 0, "reset_optimizer": False, "cast": False, "versions": {}}
    start |= {"config": configs.to_json(run), "data": fingerprint}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    done = steps if done is None else done
    vocab = -(-encoder.size // 64) * 64
    parameters = model_cost.parameters(
        configs.from_json(Run, _with_vocab(run, vocab)).model.build()
    )
    seen = 8 * 32 * done
    loss = float(losses.loss(parameters, seen)) * float(np.exp(scatter))
    lines = [{"step": done, "split": "train", "tokens": seen, "loss_nats": loss}]
    lines += [{"step": done, "split": "val", "tokens": 999, "loss_nats": loss}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return parameters, seen, loss


def _with_vocab(run, vocab):
    raw = configs.to_json(run)
    raw["model"]["vocab"] = vocab
    return raw


@pytest.fixture
def runs(tmp_path):
    for width in WIDTHS:
        for steps in STEPS:
            write_run(tmp_path / f"runs/w{width}-s{steps}", width, steps)
    return tmp_path / "runs"


def test_published_constants_answer_without_a_config(capsys):
    code, answer = scale(capsys, "--budget=5.76e23")
    assert code == 0
    expected = PUBLISHED["arXiv:2404.10102"].optimum(5.76e23)
    assert (answer["parameters"], answer["tokens"]) == (expected.parameters, expected.tokens)
    assert answer["tokens_per_parameter"] == pytest.approx(18.4, rel=0.01)
    low, high = answer["band"]["parameters"]
    assert (low, high) == (pytest.approx(40.3e9, rel=0.01), answer["parameters"])
    assert any("6 FLOPs per parameter" in line for line in answer["assumed"])
    assert any("192 times the FLOPs of the largest run" in line for line in answer["risks"])
    assert (answer["machine"], answer["shape"], answer["self_check"]) == (None, None, None)


def test_a_config_gives_the_shape_and_its_own_flops(capsys):
    code, answer = scale(capsys, "--budget=1e19", "--config=configs/gpt2_124m.py")
    assert code == 0
    assert answer["risks"] == []
    shape = answer["shape"]
    overrides = [tuple(flag.removeprefix("--config.").split("=")) for flag in shape["flags"]]
    run = configs.load(Run, "configs/gpt2_124m.py", overrides).value
    decoder = run.model.build()
    spent = model_cost.flops_per_token(decoder, run.data.sequence, causal=True) * run.train.steps
    assert spent * run.tokens_per_step == pytest.approx(1e19, rel=0.01)
    assert model_cost.parameters(decoder) == shape["parameters"]
    assert shape["parameters"] == pytest.approx(answer["parameters"], rel=0.1)
    assert answer["flops_per_token"] > 6 * answer["parameters"], "attention counts"


def test_a_machine_gives_days_by_a_stated_share_of_its_peak(capsys):
    code, answer = scale(capsys, "--budget=1e21", "--on=h100x8")
    assert code == 0
    peak = 8 * chips.CHIPS["h100"].flops["bfloat16"]
    assert answer["machine"]["days"] == pytest.approx(
        [1e21 / peak / s / 86400 for s in (0.6, 0.25)]
    )
    assert answer["machine"]["fits"]
    assert any("MFU between 25% and 60%" in line for line in answer["assumed"])


@pytest.mark.parametrize(
    ("on", "nearest"), [("h100", "h100x"), ("v5e-4", "v5e-"), ("v3", "h200x"), ("cpu", "h200x")]
)
def test_what_does_not_fit_is_answered_with_the_nearest_that_does(capsys, on, nearest):
    code, answer = scale(capsys, "--budget=1e24", f"--on={on}")
    assert (code, answer["machine"]["fits"]) == (0, False)
    other = answer["machine"]["nearest"]
    assert other.startswith(nearest)
    assert any(f"--on={other}" in line for line in answer["risks"])
    code, answer = scale(capsys, "--budget=1e24", f"--on={other}")
    assert answer["machine"]["fits"]


@pytest.mark.parametrize(
    ("flags", "code", "fix"),
    [
        (["--budget=0"], 2, "jaxlm scale --help"),
        (["--budget=-1e21"], 2, "jaxlm scale --help"),
        (["--budget=nan"], 2, "jaxlm scale --help"),
        (["--budget=inf"], 2, "jaxlm scale --help"),
        (["--budget=12"], 2, "jaxlm scale --help"),
        (["--budget=a lot"], 2, "jaxlm scale --help"),
        ([], 2, "jaxlm scale --help"),
        (["--budget=1e20", "--on=h10"], 2, "--on=h10 --memory=24GB"),
        (["--budget=1e20", "--on=tpu9x9000"], 2, "--on="),
        (["--budget=1e20", "--runs=none/*"], 66, "find . -name metrics.jsonl"),
        (["--budget=1e20", "--runs=a/*", "--sweep"], 2, "jaxlm scale --budget=1e20 --runs='a/*'"),
        (
            ["--budget=1e20", "--runs=a/*", "--config=configs/quickstart.py"],
            2,
            "jaxlm scale --budget=1e20 --runs='a/*'",
        ),
        (["--budget=1e20", "--widths=16,32"], 2, "--sweep --widths=16,32"),
        (["--budget=1e20", "--sweep"], 2, "--workdir="),
    ],
)
def test_nonsense_is_refused_with_what_makes_sense(capsys, flags, code, fix):
    exit_code, answer = scale(capsys, *flags)
    assert exit_code == code
    assert all(answer["error"][part] for part in ("what", "why", "fix"))
    assert answer["error"]["fix"].startswith(fix)
    assert len(capsys.readouterr().err.splitlines()) <= 8


def test_a_budget_too_small_for_any_law_says_so(capsys):
    _, answer = scale(capsys, "--budget=1e8")
    assert any("no law was fitted below 10000" in line for line in answer["risks"])
    assert any("fewer FLOPs than the smallest run" in line for line in answer["risks"])
    _, answer = scale(capsys, "--budget=1e12", "--config=configs/llama_8b.py")
    assert any("the narrowest model" in line for line in answer["risks"])


def test_own_runs_give_a_law_that_foretells_the_largest(runs, capsys):
    code, answer = scale(capsys, "--budget=3e12", f"--workdir={runs}")
    assert code == 0
    assert [row["flops"] for row in answer["runs"]] == sorted(r["flops"] for r in answer["runs"])
    for row in answer["runs"]:
        width, steps = (int(part[1:]) for part in row["run"].rpartition("/")[2].split("-"))
        assert row["tokens"] == 8 * 32 * steps
        assert row["loss_nats"] == pytest.approx(float(LAW.loss(row["parameters"], row["tokens"])))
        assert row["fitted_nats"] == pytest.approx(row["loss_nats"], rel=1e-3)
        assert width in WIDTHS
    check = answer["self_check"]
    assert check["run"].endswith("w48-s300")
    assert (check["from_runs"], abs(check["error"])) == (5, pytest.approx(0, abs=0.01))
    low, high = answer["band"]["parameters"]
    assert low <= answer["parameters"] <= high
    assert (runs / "scale.png").read_bytes().startswith(b"\x89PNG")
    # What is drawn in the text, to a person.
    assert main(["scale", "--budget=3e12", f"--runs={runs}/w*"]) == 0
    output = capsys.readouterr().out
    assert "w48-s300" in output
    assert f"--config={runs}/w48-s300/config.json --config." in output
    assert "assumed " in output


def test_the_flops_of_a_run_are_those_of_its_model_and_not_six_a_parameter(runs, capsys):
    _, answer = scale(capsys, "--budget=3e12", f"--workdir={runs}")
    for row in answer["runs"]:
        raw = json.loads(Path(row["run"], "config.json").read_text())
        raw["model"]["vocab"] = 320
        decoder = configs.from_json(Run, raw).model.build()
        each = model_cost.flops_per_token(decoder, 32, causal=True)
        assert row["flops"] == pytest.approx(each * row["tokens"])
        assert abs(each / (6 * row["parameters"]) - 1) > 0.02


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": {"tokenizer": "c" * 64}}, "data tokenizer: "),
        ({"data": {"validation.val": "c" * 64}}, "data validation.val: bbbbbbbbbbbb"),
        ({"settings": [("optim.name", "lion")]}, "optim.name: adamw and lion"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_with_what_differs(runs, capsys, change, named):
    write_run(runs / "other", 64, 100, **change)
    code, answer = scale(capsys, "--budget=1e12", f"--workdir={runs}")
    assert code == 2
    assert named in answer["error"]["why"]
    assert str(runs / "other") in answer["error"]["where"]


def test_a_seed_alone_makes_no_difference(runs, capsys):
    write_run(runs / "other", 64, 100, data={"seed": 7})
    assert scale(capsys, "--budget=1e12", f"--workdir={runs}")[0] == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"done": 60}, "stopped at step 60 of 100"),
        (
            {"settings": [("schedule.end", "1000")]},
            "decays until step 1000, but the run ends at 100",
        ),
    ],
)
def test_a_run_that_did_not_come_to_its_end_is_left_out_and_named(runs, capsys, change, why):
    write_run(runs / "other", 64, 100, **change)
    code, answer = scale(capsys, "--budget=1e12", f"--workdir={runs}")
    assert (code, len(answer["runs"])) == (0, 6)
    assert [line for line in answer["left_out"] if why in line and "other" in line]


def test_a_run_that_begins_with_weights_of_another_is_left_out(runs, capsys):
    """Its losses are not those of its tokens alone."""
    write_run(runs / "other", 64, 100)
    file = runs / "other/metrics.jsonl"
    first = {"step": 0, "split": "val", "tokens": 999, "loss_nats": 3.0}
    file.write_text(json.dumps(first) + "\n" + file.read_text())
    code, answer = scale(capsys, "--budget=1e12", f"--workdir={runs}")
    assert (code, len(answer["runs"])) == (0, 6)
    assert any("other: it began with the weights" in line for line in answer["left_out"])


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([(16, 100), (32, 100), (32, 300), (48, 100)], 1),
        ([(16, 100), (16, 300), (48, 100), (48, 300), (48, 900)], 1),
        ([(48, 300)], 4),
    ],
)
def test_too_few_runs_are_refused_with_lines_that_make_the_missing_ones(
    tmp_path, capsys, present, missing
):
    for width, steps in present:
        write_run(tmp_path / f"w{width}-s{steps}", width, steps)
    code, answer = scale(capsys, "--budget=1e12", f"--runs={tmp_path}/*")
    assert code == 66
    assert f"{len(present)} finished" in answer["error"]["why"]
    lines = answer["error"]["fix"].splitlines()
    assert len(lines) == missing
    for line in lines:
        words = dict(word.partition("=")[::2] for word in shlex.split(line)[2:])
        settings = [(k[9:], v) for k, v in words.items() if k.startswith("--config.")]
        run = configs.load(Run, words["--config"], settings).value  # a line to paste that works
        write_run(tmp_path / words["--workdir"], run.model.width, run.train.steps)
    assert scale(capsys, "--budget=1e12", f"--runs={tmp_path}/*")[0] == 0


def test_a_run_of_five_is_not_checked_and_says_so(runs, capsys):
    code, answer = scale(capsys, "--budget=1e12", f"--runs={runs}/w[13]*")
    assert (code, answer["error"]["code"]) == (66, 66), "four are too few"
    write_run(runs / "w32-s900", 40, 900)
    code, answer = scale(capsys, "--budget=1e12", f"--runs={runs}/w[13]*")
    assert (code, answer["self_check"]) == (0, None)
    assert any("not checked" in line for line in answer["risks"])


def test_a_ladder_ends_each_run_at_its_own_end():
    settings = {"schedule.end": "4000", "schedule.warmup": "100", "train.patience": "3"}
    run = configs.load(Run, "configs/quickstart.py", [*settings.items(), ("train.steps", "1000")])
    ladder = sweep.rungs(run.value)
    assert len(ladder) == 12
    assert next(iter(ladder)) == "w64-s250"
    assert [*ladder][-1] == "w256-s1000"
    for changed in ladder.values():
        assert {
            ("schedule.end", "100%"),
            ("schedule.warmup", "10%"),
            ("train.patience", "None"),
        } <= set(changed)
        rung = configs.load(Run, "configs/quickstart.py", changed).value
        assert rung.schedule.end.steps(rung.train.steps, rung.tokens_per_step) == rung.train.steps
    quickstart = configs.load(Run, "configs/quickstart.py").value
    plain = [*sweep.rungs(quickstart).values()][-1]
    assert plain == [
        ("train.steps", str(quickstart.train.steps)),
        ("sample.prompts", "()"),
    ]


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (["--widths=16,32"], "--widths=8,16,24,32 --steps=24,12"),
        (["--widths=16,24,32", "--steps=12"], "--widths=8,16,24,32 --steps=24,12"),
        (["--widths=15,24,32"], "--widths=16,24,32"),
        (["--widths=wide"], "--widths=8,16,24,32"),
        (["--steps=0"], "--steps=3,6,12"),
        (["--config.data.validation=()"], "--config.data.validation=5%"),
    ],
)
def test_a_ladder_too_short_for_a_law_is_refused_before_anything_is_trained(
    tmp_path, capsys, flags, fix
):
    (tmp_path / "texts").mkdir()
    file = harness.write_config(tmp_path / "texts")
    words = ["--budget=1e12", "--sweep", f"--config={file}", f"--workdir={tmp_path}/sweep"]
    code, answer = scale(capsys, *words, *flags)
    assert (code, answer["error"]["fix"]) == (2, fix)
    assert not (tmp_path / "sweep").exists()


def test_the_runs_of_a_ladder_are_those_of_a_sweep(tmp_path, monkeypatch, capsys):
    """They are trained by the code of `jaxlm sweep`, which resumes; a failure has its code."""
    (tmp_path / "texts").mkdir()
    file = harness.write_config(tmp_path / "texts")
    started = []

    def train(members, file_, overrides, *, parallel, say):
        started.append([member.path.name for member in members])
        assert (file_, overrides, parallel) == (str(file), [], 2)
        for member in members:
            run = member.run
            assert configs.load(Run, file_, member.settings).value == run
            if not member.path.exists():
                write_run(member.path, run.model.width, run.train.steps)
        return {str(member.path): 74 if len(started) == 1 else 0 for member in members}

    monkeypatch.setattr(sweep, "train_all", train)
    monkeypatch.setattr(sweep, "check_same", lambda *_: None)
    words = [f"--config={file}", f"--workdir={tmp_path}/sweep", "--widths=16,24,32", "--steps=6,12"]
    words += ["--budget=1e12", "--sweep", "--parallel=2"]
    code, answer = scale(capsys, *words)
    assert (code, set(answer["codes"].values())) == (74, {74})
    code, answer = scale(capsys, *words)
    assert (code, len(answer["runs"])) == (0, 6), answer
    assert started == [[*sweep.rungs(configs.load(Run, file).value, "16,24,32", "6,12")]] * 2


def test_a_folder_with_another_ladder_is_refused(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    file = harness.write_config(tmp_path / "texts")
    words = [f"--config={file}", f"--workdir={tmp_path}/sweep", "--widths=16,24,32", "--steps=6,12"]
    write_run(tmp_path / "sweep/w16-s6", 16, 6)
    code, answer = scale(capsys, "--budget=1e12", "--sweep", *words)
    assert (code, answer["error"]["fix"]) == (2, f"--workdir={tmp_path}/sweep-2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_sweep_foretells_its_largest_run_within_five_percent(
    tmp_path, capsys, record_property
):
    """Six runs on Python's library, 9 to 130 thousand parameters; a second start trains nothing."""
    settings = {
        "data.tokenizer": "bytes",
        "data.sequence": "64",
        "model.width": "64",
        "model.depth": "2",
        "train.batch": "16",
        "eval.every": "100%",
        "eval.batch": "256",
        "checkpoint.every": "100%",
        "log.sinks": "()",
    }
    words = ["--sweep", "--config=configs/quickstart.py", f"--workdir={tmp_path}/sweep"]
    words += ["--widths=16,32,64", "--steps=200,400"]
    words += [f"--config.{name}={value}" for name, value in settings.items()]
    code, answer = scale(capsys, "--budget=1e13", *words)
    assert (code, len(answer["runs"])) == (0, 6)
    check = answer["self_check"]
    low, high = check["interval_nats"]
    rows = [
        f"{row['run'].rpartition('/')[2]}: {row['parameters']:,} parameters, {row['tokens']:,} "
        f"tokens, {row['loss_nats']:.4f} nats"
        for row in answer["runs"]
    ]
    rows.append(
        f"largest from the others {check['predicted_nats']:.4f} ({low:.4f} to {high:.4f}), error "
        f"{check['error']:+.2%}"
    )
    rows.append(f"law {answer['law']}")
    record_property("table", "\n".join(rows))
    assert abs(check["error"]) < 0.05
    written = {p: p.stat().st_mtime for p in tmp_path.rglob("metrics.jsonl")}
    assert scale(capsys, "--budget=1e13", *words)[1]["runs"] == answer["runs"]
    assert {p: p.stat().st_mtime for p in tmp_path.rglob("metrics.jsonl")} == written
