"""Lines E3, F3, F5, F8, F9 and S14: resuming with a change needs the user's consent or shows it."""

import dataclasses
import importlib.metadata
import json
import shlex
import shutil

import pytest
from etils import epath

from jaxlm.checkpoint import record as records
from jaxlm.cli.main import main
from jaxlm.optim import adam_8bit, moments
from jaxlm.recipes.train import resume
from jaxlm.training.rundir import STARTS_FILE
from tests.faults import harness

BLOCKS = moments.blocks

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def half(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "half", "--stop_at=6")


@pytest.fixture
def run(half, tmp_path):
    shutil.copytree(half, tmp_path / "run")
    return tmp_path / "run"


# Logged by the clock, as each step is: the program of the step stays as it was.
SAFE = ("--config.log.every=0.5s", "--config.eval.every=3", "--config.checkpoint.every=3")


def test_f3_safe_fields_go_on_and_are_said(config, run):
    assert main(harness.words(config, run, *SAFE)) == 0
    log = (run / "log.txt").read_text()
    assert all(field in log for field in ("log.every", "eval.every", "checkpoint.every"))
    assert [start.config["log"]["every"] for start in resume.read_starts(run)] == [1, "0.5s"]
    assert json.loads((run / "config.json").read_text())["log"]["every"] == "0.5s"


def test_s14_libraries_that_changed_under_a_run_are_said_and_each_start_keeps_its_own(config, run):
    path = run / STARTS_FILE
    (first,) = resume.read_starts(run)
    assert first.versions["package jax"] == importlib.metadata.version("jax")
    older = dataclasses.asdict(first)
    older["versions"] |= {"package jax": "0.1.2", "package gone": "3"}
    path.write_text(json.dumps(older) + "\n")
    assert main([*harness.words(config, run), "--stop_at=7"]) == 0
    log = (run / "log.txt").read_text()
    assert f"package jax: 0.1.2 -> {importlib.metadata.version('jax')}" in log
    assert "package gone: 3 -> " in log
    assert log.count(" -> ") == 2, "nothing else did"
    assert resume.read_starts(run)[-1].versions == first.versions
    assert harness.exit_of(run)["cause"] == "stopped after step 7, as --stop_at requires"
    path.write_text("{}\n")
    assert main([*harness.words(config, run), "--stop_at=8"]) == 0
    assert STARTS_FILE in (run / "warnings.jsonl").read_text()


@pytest.mark.slow
def test_how_a_start_ended_says_nothing_of_the_next_that_was_killed(config, run):
    assert harness.exit_of(run)["code"] == 0
    code, output = harness.run(harness.words(config, run), "step.before:sigkill@8")
    assert code == -9, output
    assert not (run / "exit.json").exists()


# Field -> what it is in the run, and another value.
UNSAFE = {
    "seed": ("0", "1"),
    "data.sequence": ("32", "16"),
    "train.batch": ("8", "16"),
    "data.tokenizer": ("bytes", "characters"),
    "model.depth": ("2", "1"),
    "optim.lr": ("0.003", "0.001"),
    "schedule.name": ("constant", "cosine"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "fields",
    [*([field] for field in UNSAFE), ["seed", "train.batch", "optim.lr"], [*UNSAFE][:-1]],
    ids=lambda fields: " ".join(fields) if len(fields) < 4 else "most of them",
)
def test_f3_e3_unsafe_fields_are_refused_with_a_table_and_a_flag(config, run, capsys, fields):
    before = harness.tree(run)
    flags = [f"--config.{field}={UNSAFE[field][1]}" for field in fields]
    assert main(harness.words(config, run, *flags)) == 2
    output = capsys.readouterr().err
    for field in fields:
        old, new = UNSAFE[field]
        assert f"{field}: {old} -> {new}" in output
    if len(fields) > 1:
        assert f"{len(fields)} settings differ" in output
        assert output.count(" -> ") == len(fields)
    assert len(output.splitlines()) <= 8
    if "model.depth" in fields:
        assert "--allow_change" not in output  # the parameters have other shapes
    else:
        named = output.partition("--allow_change=")[2].split()[0]
        assert {*fields} <= {*named.split(",")}
    assert harness.tree(run) == before, "also how the run ended"


BACK = ("--start_at=8", "--force")  # gives steps up, once the run resumes
MORE = ("--config.train.steps=14", "--allow_change=train.steps")
REFUSED = {
    "a setting of the model": ["--config.model.depth=1"],
    "the mesh": [*MORE, "--config.mesh.tensor=3"],
    "the data": [*MORE, "--config.data.train=none/*.txt"],
    "an earlier step": [*MORE, "--start_at=3"],
    "going back, a setting of the model": [*BACK, "--config.model.depth=1"],
    "going back, heads": [*BACK, "--config.mesh.tensor=3"],
    "going back, the batch": [*BACK, "--config.mesh.data=3"],
}


@pytest.fixture(scope="module")
def finished(config, half, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    shutil.copytree(half, workdir)
    assert main(harness.words(config, workdir)) == 0
    assert main(["report", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.mark.few(2)
@pytest.mark.parametrize("flags", REFUSED.values(), ids=REFUSED)
def test_a_refused_start_reads_no_array_and_leaves_a_finished_run_as_it_was(
    config, finished, tmp_path, monkeypatch, flags
):
    """A checkpoint may have a terabyte: errors must come within seconds, from its record alone."""
    run = shutil.copytree(finished, tmp_path / "run")
    before = harness.tree(run)
    with monkeypatch.context() as patch:
        patch.setattr(records, "_digest", lambda path: pytest.fail(f"{path} was read"))
        assert main(harness.words(config, run, *flags)) in (2, 66)
    assert harness.tree(run) == before
    assert main(["report", f"--workdir={run}"]) == 0
    assert "ended with code 0: finished" in (run / "report.html").read_text()


def spoil(run, step):
    """Changes a byte of the arrays of a step: its record is as it was."""
    path = max((run / f"checkpoints/{step}").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


LATE = {"going back": BACK, "around a damaged step": ()}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("flags", LATE.values(), ids=LATE)
def test_a_start_that_is_refused_for_its_data_leaves_every_step_where_it_was(
    config, finished, tmp_path, flags
):
    """Data is opened last of all that can refuse a start; only then are steps moved."""
    run = shutil.copytree(finished, tmp_path / "run")
    spoil(run, 12)
    before = harness.tree(run)
    glob = json.loads((run / "config.json").read_text())["data"]["train"][0]
    fewer = [f"--config.data.train={glob.replace('*', '00*')}", "--allow_change=data.train"]
    assert main(harness.words(config, run, *flags, *fewer)) == 2
    assert harness.tree(run) == before
    assert main(harness.words(config, run, *flags, "--stop_at=11")) == 0
    moved = {path.name for path in (run / "quarantine").iterdir() if path.is_dir()}
    assert moved == ({"10", "12"} if "--force" in flags else {"12"})


@pytest.mark.slow
def test_a_checkpoint_of_another_shape_is_refused_whatever_was_allowed_and_all_stays_where_it_was(
    config, finished, tmp_path, capsys
):
    run = shutil.copytree(finished, tmp_path / "run")
    before = harness.tree(run) | {"exit.json": b""}
    flags = (*BACK, "--config.model.width=16", "--allow_change=model")
    assert main(harness.words(config, run, *flags)) == 65
    assert "checkpoint 8 does not match the model" in capsys.readouterr().err
    assert harness.exit_of(run)["code"] == 65
    assert harness.tree(run) | {"exit.json": b""} == before


@pytest.mark.slow
def test_moments_in_blocks_of_another_size_are_refused_and_may_begin_anew(
    config, tmp_path, capsys, monkeypatch
):
    """In a run of adamw8bit from before blocks followed shards, 64 numbers had one scale."""
    run, flags = tmp_path / "run", ("--config.optim.name=adamw8bit",)
    with monkeypatch.context() as before:
        for module in (adam_8bit, moments):
            before.setattr(module, "blocks", lambda shape, axes, longest: _whole(shape, axes))
        assert main(harness.words(config, run, *flags, "--stop_at=6")) == 0
    files = harness.tree(run) | {"exit.json": b""}
    assert main(harness.words(config, run, *flags)) == 65
    output = capsys.readouterr().err
    assert "checkpoint 6 has another optimizer state" in output
    assert "mlp/up/weight/scales: want float32[2, 32, 16], found float32[2, 32, 1]" in output
    assert harness.tree(run) | {"exit.json": b""} == files
    assert "fix    --reset_optimizer    #" in output
    assert main(harness.words(config, run, *flags, "--reset_optimizer", "--stop_at=7")) == 0
    assert "--workdir=runs/another\n" in output
    monkeypatch.chdir(tmp_path)
    assert main(harness.words(config, "runs/another", *flags, "--stop_at=1")) == 0


def _whole(shape, axes):
    """One block for each row of hidden units; for what attention has, as ever."""
    return (axes.index("mlp"), 64) if "mlp" in axes else BLOCKS(shape, axes, 256)


@pytest.mark.slow
def test_f3_a_change_that_was_allowed_is_recorded(config, run):
    words = harness.words(config, run, "--config.optim.lr=1e-3", "--allow_change=optim.lr")
    assert main(words) == 0
    log = (run / "log.txt").read_text()
    assert "optim.lr: 0.003 -> 0.001" in log
    assert "--allow_change=optim.lr" in log
    assert harness.store(run).record(12).meta["config"]["optim"]["lr"] == 1e-3


def test_e3_another_text_is_refused_with_a_diff_and_recorded_where_it_is_allowed(
    config, run, tmp_path, capsys
):
    folder = tmp_path / "texts"
    before = json.loads((run / "config.json").read_text())["data"]["train"][0]
    shutil.copytree(before[:-6], folder)
    (folder / "000.txt").write_text("something else")
    changed = f"--config.data.train={folder}/*.txt"
    named = f"data.train: ('{before}',) -> ('{folder}/*.txt',)"
    assert main(harness.words(config, run, changed)) == 2
    assert named in capsys.readouterr().err
    assert main(harness.words(config, run, changed, "--allow_change=data.train")) == 2
    output = capsys.readouterr().err
    assert "the data differs from that of this run" in output
    assert "--allow_change=data" in output
    assert main(harness.words(config, run, changed, "--allow_change=data", "--stop_at=7")) == 0
    assert named in (run / "log.txt").read_text()

    # The same pattern, and other text behind it: no setting differs, and what is read does.
    (folder / "001.txt").write_text("something else again, and more of it")
    assert main(harness.words(config, run, changed)) == 2
    output = capsys.readouterr().err
    assert main(harness.words(config, run, changed, "--allow_change=data", "--stop_at=8")) == 0
    log = (run / "log.txt").read_text().rpartition("--stop_at=8")[2]
    old, new = (start.data for start in resume.read_starts(run)[-2:])
    differences = {name for name in old | new if old.get(name) != new.get(name)}
    assert {"train", "train.tokens"} <= differences
    for name in differences:
        difference = f"data ({name}): {str(old[name])[:12]} -> {str(new[name])[:12]}"
        assert difference in output
        assert difference in log
    assert "--allow_change=data" in log


def test_e3_a_tokenizer_trained_on_the_text_stays_that_of_the_run(tmp_path, capsys):
    settings = {"data.tokenizer": "characters"}
    config, run = harness.write_config(tmp_path, settings), tmp_path / "run"
    harness.trained(config, run, "--stop_at=4")
    before = (run / "tokenizer").read_bytes()
    for path in tmp_path.glob("*.txt"):
        path.write_text(path.read_text().upper())
    capsys.readouterr()
    words = harness.words(config, run, "--stop_at=6", "--allow_change=data")
    assert main(words) == 2
    output = capsys.readouterr().err
    assert "the tokenizer differs from that of this run" in output
    assert (run / "tokenizer").read_bytes() == before
    fix = output.partition("  fix ")[2].splitlines()[0]
    assert main([*words, *shlex.split(fix)]) == 0
    assert (run / "tokenizer").read_bytes() == before
    assert main(harness.words(config, run, "--allow_change=data,data.tokenizer")) == 0
    assert (run / "tokenizer").read_bytes() != before


def test_f3_a_run_that_resumes_from_its_own_config_keeps_the_origins_of_settings(config, tmp_path):
    run = harness.trained(config, tmp_path / "run", "--stop_at=4", "--config.seed=5")
    before = json.loads((run / "provenance.json").read_text())
    assert before["seed"] == "--config.seed=5"
    assert before["train.steps"].startswith(config)
    words = ["train", f"--workdir={run}", "--quiet", "--stop_at=6", "--config.log.every=2"]
    assert main(words) == 0
    after = json.loads((run / "provenance.json").read_text())
    assert after == before | {"log.every": "--config.log.every=2"}
    (run / "provenance.json").write_text("{")
    assert main([*words[:3], "--stop_at=8"]) == 0


def test_f3_a_change_that_is_no_setting_is_refused(config, run, capsys):
    words = harness.words(config, run, "--config.seed=5")
    assert main([*words, "--allow_change=sed"]) == 2
    assert "fix    --allow_change=seed\n" in capsys.readouterr().err
    assert main([*words, "--allow_change=seed,nonsense"]) == 2
    assert "'nonsense' is no setting" in capsys.readouterr().err


def test_f5_a_run_is_repeated_from_its_own_config_bit_for_bit(half, tmp_path):
    words = ["train", f"--config={half / 'config.json'}", f"--workdir={tmp_path / 'again'}"]
    assert main([*words, "--quiet", "--stop_at=6"]) == 0
    assert harness.losses(tmp_path / "again") == harness.losses(half)
    assert harness.state_digest(tmp_path / "again") == harness.state_digest(half)
    facts = json.loads((half / "environment.json").read_text())
    assert {"jax", "flax", "optax", "orbax-checkpoint"} <= set(facts["packages"])


def test_f8_another_optimizer_needs_reset_optimizer_and_other_dtypes_need_cast(config, run, capsys):
    """Each alone is refused, and both at once without one of the flags."""
    optimizer, dtype = "--config.optim.name=lion", "--config.precision.params=bfloat16"
    reset, cast = "--reset_optimizer", "--cast"
    before = harness.store(run).arrays(6)
    for flags, missing in (
        ([optimizer], reset),
        ([dtype], cast),
        ([optimizer, dtype, cast], reset),
        ([optimizer, dtype, reset], cast),
    ):
        assert main(harness.words(config, run, *flags)) == 2
        assert missing in capsys.readouterr().err
    both = harness.words(config, run, optimizer, dtype, reset, cast, "--stop_at=7")
    assert main(both) == 0
    after = harness.store(run).arrays(7)
    assert before["params/final_norm/scale"].shape == after["params/final_norm/scale"].shape
    assert "bfloat16" in harness.store(run).layout(7)["params/final_norm/scale"]
    assert any("/nu/" in path for path in before)
    assert not any("/nu/" in path for path in after)
    losses = [r["loss_nats"] for r in harness.records(run) if r["split"] == "train"]
    assert abs(losses[6] - losses[5]) < 0.5, "it went on from the parameters"


LOW = ("--config.precision.params=bfloat16", "--config.precision.moments=bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_f8_a_run_in_bfloat16_that_was_stopped_is_the_unbroken_one_bit_for_bit(
    config, tmp_path, moments
):
    """Rounding is at random, and yet a function of the seed, the step and the place alone."""
    flags = (LOW[0], f"--config.precision.moments={moments}")
    for workdir, stops in (("whole", (6,)), ("parts", (2, 6))):
        for stop in stops:
            run = harness.words(config, tmp_path / workdir, *flags, f"--stop_at={stop}")
            assert main(run) == 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert harness.losses(whole) == harness.losses(parts)
    assert harness.state_digest(whole) == harness.state_digest(parts)
    figures = f"bfloat16 with stochastically rounded updates, moments in {moments}"
    assert figures in (whole / "log.txt").read_text()
    dtypes = {
        path: kind.partition("[")[0]
        for path, kind in harness.store(whole).layout(6).items()
        if path.startswith(("params/", "opt_state/")) and not kind.endswith("[]")
    }
    assert {kind for path, kind in dtypes.items() if path.startswith("params/")} == {"bfloat16"}
    assert {kind for path, kind in dtypes.items() if path.startswith("opt_state/")} == {moments}


@pytest.mark.slow
def test_f8_moments_in_bfloat16_of_a_run_of_before_the_setting_need_cast(config, tmp_path, capsys):
    """No setting differs then: a record without `precision.moments` is read with its default."""
    run = tmp_path / "run"
    assert main(harness.words(config, run, *LOW, "--stop_at=2")) == 0
    step = epath.Path(run) / "checkpoints/2"
    record = records.read(step)
    del record.meta["config"]["precision"]["moments"]
    records.write(step, record)
    words = harness.words(config, run, LOW[0])
    capsys.readouterr()
    assert main(words) == 65
    output = capsys.readouterr().err
    assert "checkpoint 2 has other dtypes than this config" in output
    assert "found bfloat16" in output
    assert "--cast" in output
    assert main([*words, "--cast", "--stop_at=3"]) == 0
    moments = [
        kind for path, kind in harness.store(run).layout(3).items() if path.startswith("opt_state/")
    ]
    assert not any("bfloat16" in kind for kind in moments)


@pytest.mark.slow
def test_f9_an_older_start_needs_force_and_keeps_the_newer_steps(config, run, capsys):
    assert harness.steps(run) == [2, 4, 6]
    words = harness.words(config, run, "--start_at=2")
    assert main(words) == 2
    assert "--start_at=2 --force" in capsys.readouterr().err
    assert harness.steps(run) == [2, 4, 6]
    assert main([*words, "--force", "--stop_at=3"]) == 0
    assert harness.steps(run) == [2, 3]
    assert sorted(p.name for p in (run / "quarantine").iterdir() if p.is_dir()) == ["4", "6"]
    assert [r["step"] for r in harness.records(run)] == [1, 2, 3]


def test_f9_a_step_that_is_not_there_is_said_with_those_that_are(config, run, capsys):
    assert main(harness.words(config, run, "--start_at=3")) == 2
    assert "committed steps: 2, 4, 6" in capsys.readouterr().err
