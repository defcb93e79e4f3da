"""Runs in float16: they learn what the others learn, and the loss scale goes on where it stood."""

import itertools
import json

import numpy as np
import pytest

from jaxlm.cli.main import main
from tests.faults import harness

FLOAT16 = "--config.precision.compute=float16"


def trained(config, workdir, *flags):
    assert main(harness.words(config, workdir, *flags)) == 0
    return [r for r in harness.records(workdir) if r["split"] == "train"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("float16"))


def test_the_scale_comes_down_is_told_and_goes_on_after_a_stop(
    config, tmp_path, one_device, capsys
):
    flags = (FLOAT16, "--config.guard.loss_scale=16777216", "--config.guard.loss_scale_growth=4")
    whole = trained(config, tmp_path / "whole", *flags)
    first = whole[0]
    assert (first["loss_scale"], first["overflows_total"]) == (2.0**23, 1)
    assert first["tokens"] == 0, "what was not applied is not counted"
    assert {r["skipped_total"] for r in whole} == {0}
    scales = [r["loss_scale"] for r in whole]
    assert any(b > a for a, b in itertools.pairwise(scales)), "and grows again"
    assert harness.records(tmp_path / "whole", "spikes.jsonl") == []
    log = (tmp_path / "whole/log.txt").read_text()
    assert (
        "step 1 was not applied: gradient too large for the loss scale, which is 8.38861e+06 now"
        in log
    )
    assert whole[-1]["loss_nats"] < whole[0]["loss_nats"] - 0.5

    trained(config, tmp_path / "parts", *flags, "--stop_at=5")
    parts = trained(config, tmp_path / "parts", *flags)
    assert [r["loss_scale"] for r in parts] == scales
    assert harness.state_digest(tmp_path / "parts") == harness.state_digest(tmp_path / "whole")

    capsys.readouterr()
    assert main(["replay", f"--workdir={tmp_path / 'whole'}", "--step=12", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["is_as_logged"]
    assert again["grad_norm"] == whole[-1]["grad_norm"]
    assert all(norm for norms in again["layers"].values() for norm in np.ravel(norms))


def test_a_run_goes_on_in_float16_with_a_scale_of_its_own(config, tmp_path, one_device):
    trained(config, tmp_path / "run", "--stop_at=4")
    records = trained(config, tmp_path / "run", FLOAT16, "--allow_change=precision.compute")
    assert [r.get("loss_scale") for r in records] == [None] * 4 + [2.0**15] * 8
    assert records[-1]["loss_nats"] < records[3]["loss_nats"]


def test_master_weights_are_not_float16(config, tmp_path, capsys):
    flags = ("--config.precision.params=float16",)
    assert main(harness.words(config, tmp_path / "run", *flags)) == 2
    assert "precision.params" in capsys.readouterr().err


@pytest.mark.slow
def test_the_quickstarts_model_learns_as_in_bfloat16_within_noise(tmp_path, record_property):
    """Validation loss after 120 steps on the standard library's source; seeds tell what noise is."""
    settings = {
        "train.steps": 120,
        "data.tokenizer": "bytes",
        "data.sequence": 128,
        "model.width": 128,
    }
    ends = {}
    for precision, seed in (("float16", 0), ("bfloat16", 0), ("bfloat16", 1), ("bfloat16", 2)):
        workdir = tmp_path / f"{precision}-{seed}"
        flags = [f"--config.{name}={value}" for name, value in settings.items()]
        flags += [f"--config.precision.compute={precision}", f"--config.seed={seed}"]
        trained("configs/quickstart.py", workdir, *flags)
        (ends[precision, seed],) = [
            r["loss_nats"]
            for r in harness.records(workdir)
            if r["split"] == "val" and r["step"] == 120
        ]
    noise = [ends["bfloat16", seed] for seed in range(3)]
    record_property(
        "table",
        f"float16 {ends['float16', 0]:.4f}, bfloat16 {', '.join(f'{x:.4f}' for x in noise)}",
    )
    assert abs(ends["float16", 0] - noise[0]) < max(max(noise) - min(noise), 0.01 * noise[0])
