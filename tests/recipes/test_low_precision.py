"""Runs in float16, int8 and fp8 learn as others do, and the loss scale is resumed."""

import itertools
import json

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import backend
from tests.faults import harness

FLOAT16 = "--config.precision.compute=float16"
SCALED = (FLOAT16, "--config.guard.loss_scale=16777216", "--config.guard.loss_scale_growth=4")


def trained(config, workdir, *flags):
    assert main(harness.words(config, workdir, *flags)) == 0
    return [r for r in harness.records(workdir) if r["split"] == "train"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("float16"))


@pytest.fixture(scope="module")
def scaled(config, tmp_path_factory, one_device):
    """The directory of a run whose scale is too large at first."""
    workdir = tmp_path_factory.mktemp("runs") / "scaled"
    trained(config, workdir, *SCALED)
    return workdir


@pytest.mark.slow  # tests/training/test_loss_scale.py has fast tests
def test_the_scale_comes_down_is_told_and_grows_again(scaled):
    whole = [r for r in harness.records(scaled) if r["split"] == "train"]
    first = whole[0]
    assert (first["loss_scale"], first["overflows_total"]) == (2.0**23, 1)
    assert first["tokens"] == 0, "what was not applied is not counted"
    assert {r["skipped_total"] for r in whole} == {0}
    scales = [r["loss_scale"] for r in whole]
    assert any(b > a for a, b in itertools.pairwise(scales)), "and grows again"
    assert harness.records(scaled, "spikes.jsonl") == []
    log = (scaled / "log.txt").read_text()
    assert (
        "step 1 was not applied: gradient too large for the loss scale, which is 8.38861e+06 now"
        in log
    )
    assert whole[-1]["loss_nats"] < whole[0]["loss_nats"] - 0.5


@pytest.mark.slow
def test_the_scale_goes_on_after_a_stop_and_a_step_is_done_again_with_its_own(
    config, scaled, tmp_path, capsys
):
    whole = [r for r in harness.records(scaled) if r["split"] == "train"]
    trained(config, tmp_path / "parts", *SCALED, "--stop_at=5")
    parts = trained(config, tmp_path / "parts", *SCALED)
    assert [r["loss_scale"] for r in parts] == [r["loss_scale"] for r in whole]
    assert harness.state_digest(tmp_path / "parts") == harness.state_digest(scaled)
    capsys.readouterr()
    assert main(["replay", f"--workdir={scaled}", "--step=12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_as_logged"]
    assert report["grad_norm"] == whole[-1]["grad_norm"]
    assert all(norm for norms in report["layers"].values() for norm in np.ravel(norms))


@pytest.mark.slow
def test_a_run_goes_on_in_float16_with_a_scale_of_its_own(config, tmp_path, one_device):
    trained(config, tmp_path / "run", "--stop_at=4")
    records = trained(config, tmp_path / "run", FLOAT16, "--allow_change=precision.compute")
    assert [r.get("loss_scale") for r in records] == [None] * 4 + [2.0**15] * 8
    assert records[-1]["loss_nats"] < records[3]["loss_nats"]


def test_master_weights_are_not_float16(config, tmp_path, capsys):
    flags = ("--config.precision.params=float16",)
    assert main(harness.words(config, tmp_path / "run", *flags)) == 2
    assert "precision.params" in capsys.readouterr().err


@pytest.fixture(scope="module")
def exact(config, tmp_path_factory, one_device):
    """The course of the run without rounding."""
    return trained(config, tmp_path_factory.mktemp("runs") / "exact")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("products", ["int8", "fp8"])
def test_rounded_products_train_and_evaluation_is_not_rounded(
    config, exact, tmp_path, capsys, products
):
    records = trained(config, tmp_path / "run", f"--config.precision.products={products}")
    assert f"float32, projections in {products}" in (tmp_path / "run/log.txt").read_text()
    gaps = [abs(a["loss_nats"] / b["loss_nats"] - 1) for a, b in zip(records, exact, strict=True)]
    assert 1e-6 < max(gaps) < 0.01

    # A scale for the whole tensor would make the figure depend on the batch.
    (ended,) = [r for r in harness.records(tmp_path / "run") if r["split"] == "val"]
    capsys.readouterr()
    assert main(["eval", f"--workdir={tmp_path / 'run'}", "--json", "--batch=3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["loss_nats"] == pytest.approx(ended["loss_nats"], rel=1e-5)


@pytest.mark.slow
def test_the_quickstarts_model_learns_in_low_precision_as_in_bfloat16(tmp_path, record_property):
    """The course of 150 steps on the standard library's source, and its end in validation.

    The noise is measured by seeds.
    """
    settings = {
        "train.steps": 150,
        "data.tokenizer": "bytes",
        "data.sequence": 128,
        "model.width": 128,
        "precision.compute": "bfloat16",
    }
    arms = {
        "bfloat16": {},
        "bfloat16, seed 1": {"seed": 1},
        "float16": {"precision.compute": "float16"},
        "int8": {"precision.products": "int8"},
        "fp8": {"precision.products": "fp8"},
    }
    ends, courses = {}, {}
    for number, (name, losses) in enumerate(arms.items()):
        workdir = tmp_path / str(number)
        flags = [f"--config.{key}={value}" for key, value in (settings | losses).items()]
        records = trained("configs/quickstart.py", workdir, *flags)
        (end,) = [
            r["loss_nats"]
            for r in harness.records(workdir)
            if r["split"] == "val" and r["step"] == 150
        ]
        ends[name] = end
        courses[name] = np.array([r["loss_nats"] for r in records])
    whole = courses["bfloat16"]
    gaps = {name: np.abs(course / whole - 1) for name, course in courses.items()}
    record_property(
        "table",
        "validation loss, and the mean and largest gap of the course to bfloat16: "
        + "; ".join(
            f"{name} {ends[name]:.4f}, {gaps[name].mean():.2%}, {gaps[name].max():.2%}"
            for name in arms
        ),
    )
    for name in ("float16", "int8", "fp8"):
        assert abs(ends[name] / ends["bfloat16"] - 1) < 0.01, name
        assert gaps[name].mean() < 0.01, name


def test_auto_is_chosen_when_the_run_begins_and_resumes_on_another_machine(
    config, tmp_path, monkeypatch, one_device
):
    auto = ("--config.precision.compute=auto", "--config.train.steps=4")
    for units, stop in ((set(), 2), ({backend.VECTORS}, 4)):
        monkeypatch.setattr(backend, "fast_cpu_units", lambda units=units: frozenset(units))
        trained(config, tmp_path / "auto", *auto, f"--stop_at={stop}")
        settings = json.loads((tmp_path / "auto/config.json").read_text())
        assert settings["precision"]["compute"] == "float32"
        assert harness.records(tmp_path / "auto")[-1]["step"] == stop
