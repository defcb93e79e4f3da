"""`jaxlm replay` repeats steps of a run, also one that was not applied or was given up."""

import json
import shutil
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core import faults
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

EIGHT = {"XLA_FLAGS": f"{harness.FLAGS} --xla_force_host_platform_device_count=8"}
BAD_BATCH = 8  # by its number in the stream
FAULTS = f"batch:nan@{BAD_BATCH}-{BAD_BATCH + 1}"
GUARD = ("--config.guard.budget=2", "--config.guard.rewind_steps=2", "--config.guard.skip=4")


@pytest.fixture(scope="module", autouse=True)
def spoilt():
    """Two batches whose loss is not finite, for the runs and for who does their steps again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "_faults", faults.parse(FAULTS))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run that stopped at step 4, resumed with another rate, and did not apply steps 9 and 10."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    flags = ("--config.checkpoint.every=4", "--config.checkpoint.keep_last=9")
    assert main(harness.words(config, workdir, *flags, "--stop_at=4")) == 0
    changed = ("--config.optim.lr=1e-3", "--allow_change=optim.lr")
    assert main(harness.words(config, workdir, *flags, *changed)) == 0
    return workdir


@pytest.fixture(scope="module")
def rewound(config, tmp_path_factory):
    """A run that went back from step 10 to step 6, and around the two batches."""
    workdir = tmp_path_factory.mktemp("runs") / "rewound"
    assert main(harness.words(config, workdir, *GUARD, "--config.checkpoint.every=3")) == 0
    assert [r["to"] for r in json.loads((workdir / "rewinds.json").read_text())] == [6]
    return workdir


def replay(capsys, workdir, step, *flags, code=0):
    """Return the JSON answer of the verb."""
    capsys.readouterr()
    assert main(["replay", f"--workdir={workdir}", f"--step={step}", "--json", *flags]) == code
    return json.loads(capsys.readouterr().out)


def logged(workdir):
    return {r["step"]: r for r in harness.records(workdir) if r["split"] == "train"}


def total(layers):
    """The norm of the whole gradient from those of its parts."""
    parts = [x for x in layers.values() if isinstance(x, float)]
    parts += [part for x in layers.values() if isinstance(x, list) for part in x]
    return sum(part**2 for part in parts) ** 0.5


def snapshot(workdir):
    return {path: path.stat().st_mtime_ns for path in [workdir, *workdir.rglob("*")]}


@pytest.mark.few(1)
@pytest.mark.parametrize(("step", "start"), [(3, 0), (12, 8)])
def test_the_loss_of_a_step_is_the_logged_one_in_every_bit(run, capsys, step, start):
    """Before and after the change of the learning rate, and after the skipped steps."""
    before = snapshot(run)
    report = replay(capsys, run, step)
    record = logged(run)[step]
    assert report["loss_nats"].hex() == report["loss_hex"] == record["loss_nats"].hex()
    assert report["grad_norm"].hex() == record["grad_norm"].hex()
    assert report["learning_rate"] == record["learning_rate"]
    assert report["is_as_logged"]
    assert report["is_applied"]
    assert (report["from_step"], report["batch"]) == (start, step - 1)
    assert snapshot(run) == before


@pytest.mark.slow
def test_the_norms_by_layer_add_up_to_the_norm_of_the_gradient(run, capsys):
    report = replay(capsys, run, 7)
    assert report["from_step"] == 4
    assert report["is_as_logged"]
    assert total(report["layers"]) == pytest.approx(report["grad_norm"], rel=1e-5)
    assert len(report["layers"]["stack/0/mlp/down/weight"]) == 2
    losses = [row["loss_nats"] for row in report["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert max(losses) > report["loss_nats"] - 0.1
    assert len({row["row"] for row in report["rows"]}) == 5


def test_a_step_that_was_not_applied_shows_what_spikes_jsonl_has(run, capsys):
    spike = harness.records(run, "spikes.jsonl")[0]
    assert (spike["step"], spike["batch"]) == (BAD_BATCH + 1, BAD_BATCH)
    report = replay(capsys, run, BAD_BATCH + 1)
    assert report["is_as_logged"]
    assert not report["is_applied"]
    assert report["loss_nats"] is None
    assert report["kind"] == "loss not finite, gradient not finite"
    for name in ("kind", "batch", "documents", "layers", "layers_not_finite", "learning_rate"):
        assert report[name] == spike[name], name


@pytest.mark.slow
def test_without_the_fault_the_batch_is_an_ordinary_one_and_the_log_is_said_to_differ(
    run, capsys, monkeypatch
):
    monkeypatch.setattr(faults, "_faults", ())
    capsys.readouterr()
    assert main(["replay", f"--workdir={run}", f"--step={BAD_BATCH + 1}"]) == 0
    shown = capsys.readouterr().out
    assert "from checkpoint 8 through step 9" in shown
    assert "verdict   applied\n" in shown
    assert "the log has nan" in shown
    documents = harness.records(run, "spikes.jsonl")[0]["documents"]
    assert all(document["file"] in shown for document in documents[:16])


@pytest.mark.slow
def test_after_a_rewind_a_step_has_its_new_batch_and_the_old_one_can_be_asked_for(rewound, capsys):
    report = replay(capsys, rewound, 9)
    assert report["batch"] == 8 + 4
    assert report["is_applied"]
    assert report["loss_nats"].hex() == logged(rewound)[9]["loss_nats"].hex()
    given_up = replay(capsys, rewound, 10, "--rewinds=0")
    assert given_up["batch"] == BAD_BATCH + 1
    assert not given_up["is_applied"]
    assert given_up["from_step"] <= 6
    assert given_up["in_a_row"] == 2
    assert given_up["is_as_logged"]
    error = replay(capsys, rewound, 9, "--rewinds=2", code=2)["error"]
    assert error["fix"] == "--rewinds=1"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/checkpoints/8/digests.json").unlink()
    report = replay(capsys, tmp_path / "run", 12)
    assert report["from_step"] == 4
    assert report["is_as_logged"]


@pytest.mark.slow
def test_a_step_behind_a_change_that_no_checkpoint_leads_to_is_refused(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    for step in (4, 8):
        shutil.rmtree(tmp_path / f"run/checkpoints/{step}")
    error = replay(capsys, tmp_path / "run", 7, code=65)["error"]
    assert "optim.lr: 0.003 -> 0.001" in error["why"]


@pytest.mark.slow
def test_a_step_behind_a_new_optimizer_state_is_done_with_that(config, tmp_path, capsys):
    workdir, words = tmp_path / "run", harness.words(config, tmp_path / "run")
    keep = "--config.checkpoint.keep_last=9"
    assert main([*words, keep, "--stop_at=4"]) == 0
    assert main([*words, keep, "--reset_optimizer", "--stop_at=6"]) == 0
    report = replay(capsys, workdir, 6)
    assert (report["is_as_logged"], report["from_step"]) == (True, 4)
    (workdir / "checkpoints/4/digests.json").unlink()
    error = replay(capsys, workdir, 5, code=65)["error"]
    assert error["where"] == "step 4, where the run resumed"
    assert "--reset_optimizer" in error["why"]


@pytest.mark.slow
def test_a_step_behind_a_cast_is_done_in_the_new_dtypes(config, tmp_path, capsys):
    words = harness.words(config, tmp_path / "run", "--stop_at=4")
    assert main(words) == 0
    cast = ("--config.precision.params=bfloat16", "--cast")
    assert main([*words, *cast, "--stop_at=6", "--config.checkpoint.every=6"]) == 0
    report = replay(capsys, tmp_path / "run", 6)
    assert (report["is_as_logged"], report["from_step"]) == (True, 4)


@pytest.mark.slow
def test_steps_that_were_done_again_from_an_older_one_are_replayed_as_they_are_now(
    config, tmp_path, capsys
):
    """Steps 5 to 8 had another learning rate; then the run went on from step 2 with a third."""
    workdir, words = tmp_path / "run", harness.words(config, tmp_path / "run")
    keep = "--config.checkpoint.keep_last=9"
    assert main([*words, keep, "--stop_at=4"]) == 0
    change = "--allow_change=optim.lr"
    assert main([*words, keep, "--config.optim.lr=1e-2", change, "--stop_at=8"]) == 0
    back = ("--start_at=2", "--force", "--config.optim.lr=1e-3", change)
    assert main([*words, keep, *back, "--stop_at=6"]) == 0
    for step, rate in ((2, 3e-3), (4, 1e-3), (6, 1e-3)):
        report = replay(capsys, workdir, step)
        assert report["is_as_logged"], step
        assert report["learning_rate"] == pytest.approx(rate)


@pytest.mark.slow
def test_a_process_of_its_own_with_the_fault_sees_the_step_that_was_not_applied(run):
    words = ["replay", f"--workdir={run}", f"--step={BAD_BATCH + 1}", "--quiet"]
    code, output = harness.run(words, FAULTS)
    assert code == 0, output
    assert "verdict   not applied: loss not finite, gradient not finite" in output
    assert "loss      nan nats, equal to the logged loss, bit for bit" in output


@pytest.mark.slow
def test_where_the_guard_knows_no_spikes_the_norms_are_taken_all_the_same(config, tmp_path):
    """Over eight devices, of micro-batches."""
    flags = ("--config.guard.sigmas=none", "--config.train.microbatches=2")
    words = harness.words(config, tmp_path / "run", *flags, "--config.train.batch=16")
    code, output = harness.run([*words, "--stop_at=3"], **EIGHT)
    assert code == 0, output
    words = ["replay", f"--workdir={tmp_path / 'run'}", "--step=3", "--json", "--quiet"]
    code, output = harness.run(words, **EIGHT)
    assert code == 0, output
    report = json.loads(output.splitlines()[-1])
    assert report["loss_nats"].hex() == logged(tmp_path / "run")[3]["loss_nats"].hex()
    assert total(report["layers"]) == pytest.approx(report["grad_norm"], rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("step", "fix"), [(0, "--step=1"), (-3, "--step=1"), (13, "--step=12")])
def test_a_step_that_the_run_does_not_have_is_refused(run, capsys, step, fix):
    error = replay(capsys, run, step, code=2)["error"]
    assert error["fix"] == fix
    assert "1 to 12" in error["why"]


@pytest.mark.slow
def test_data_that_has_changed_since_is_refused(run, config, capsys):
    text = Path(config).parent / "007.txt"
    before = text.read_text()
    text.write_text("eleven twelve")
    try:
        error = replay(capsys, run, 7, code=65)["error"]
    finally:
        text.write_text(before)
    assert "differs from that of this run" in error["what"]
    assert "train" in error["why"]


def test_a_folder_that_is_no_run_ends_with_66(tmp_path, capsys):
    assert "config.json" in replay(capsys, tmp_path, 1, code=66)["error"]["what"]


def test_a_run_that_was_not_trained_has_no_steps_to_replay(run, tmp_path, capsys):
    hub, copy = tmp_path / "hub", tmp_path / "copy"
    assert main(["export", f"--workdir={run}", f"--out={hub}", "--quiet"]) == 0
    assert main(["import", f"--from={hub}", f"--workdir={copy}", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["replay", f"--workdir={copy}", "--step=1"]) == 2
    error = capsys.readouterr().err
    assert "the run has no steps to replay" in error
    assert "it was imported, not trained" in error
