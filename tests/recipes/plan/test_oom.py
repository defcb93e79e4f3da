"""A run that does not fit is refused before its first step, and the suggested flags make it fit."""

import json
import re

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import OutOfMemory
from jaxlm.monitor.chips import machine
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import oom, predict
from jaxlm.recipes.train.programs import CompiledStep
from tests.faults import harness

SETTINGS = {
    "model.vocab": 2048,
    "model.width": 64,
    "data.sequence": 64,
    "train.batch": 64,
    "train.steps": 2,
    "log.every": 1,
    "sample.prompts": (),
    "mesh.data": 8,
}


@pytest.mark.slow
def test_what_does_not_fit_is_told_before_the_first_step_and_the_first_fix_makes_it_fit(
    tmp_path, capsys
):
    (tmp_path / "texts").mkdir()
    file = harness.write_config(tmp_path / "texts", SETTINGS)
    words = ["train", f"--config={file}", "--config.train.memory_gib=0.012", "--quiet"]
    assert main([*words, f"--workdir={tmp_path / 'short'}"]) == 71
    output = capsys.readouterr().err
    needed, available = re.search(
        r"needs ([\d.]+) MiB per device, ([\d.]+) MiB is available", output
    ).groups()
    assert float(needed) > float(available) == pytest.approx(12.3, rel=0.01)
    assert "biggest: " in output
    assert "checked before the first step" in output
    assert not (tmp_path / "short/metrics.jsonl").read_text()
    assert json.loads((tmp_path / "short/exit.json").read_text())["code"] == 71
    first = output.split("fix")[1].splitlines()[0]
    flags, promised = re.match(r"\s*(.*?)    # ([\d.]+) MiB per device", first).groups()
    assert float(promised) <= float(available)
    assert main([*words, *flags.split(), f"--workdir={tmp_path / 'fits'}"]) == 0
    held = json.loads((tmp_path / "fits/forecast.json").read_text())["compiled_bytes_per_device"]
    assert held["total"] <= 0.012 * 2**30

    log = (tmp_path / "fits/log.txt").read_text()
    line = r"\n  plan +[\d.]+ \w*B of .* a device, .* an evaluation; .* a step, .* for 2 steps\n"
    assert re.search(line, log)
    text = (tmp_path / "fits/report.html").read_text()
    assert "<h2>Plan</h2>" in text
    assert "memory per device" in text


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "without_plots")
def test_what_the_device_has_not_is_told_in_the_middle_of_a_run(tmp_path, monkeypatch, capsys):
    """The third step raises the error of XLA: exit 71, the biggest parts, and fixes."""
    step = CompiledStep.__call__

    def short(self, state, batch):
        if self.completed == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456 bytes.")
        return step(self, state, batch)

    monkeypatch.setattr(CompiledStep, "__call__", short)
    run = tmp_path / "run"
    assert main(harness.words(harness.write_config(tmp_path), run)) == 71
    output = capsys.readouterr().err
    assert output.startswith("out of memory: this run needs more than ")
    assert "reported by the device" in output
    assert re.search(r"biggest: \w+ [\d.]+ [KM]iB · ", output)
    assert re.search(r"fix +--config\.[\w.=]+.*    # [\d.]+ [KMG]iB per device, ", output)
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 8
    left = harness.exit_of(run)
    assert (left["code"], left["step"]) == (71, 2)
    assert left["cause"].startswith("OutOfMemory: ")
    monkeypatch.setattr(CompiledStep, "__call__", step)
    assert main(harness.words(harness.write_config(tmp_path), run)) == 0, "and it resumes"


def test_an_error_of_the_device_becomes_the_same_words():
    run = config.load(Run, "configs/llama_1b.py", []).value
    forecast = predict.forecast(run, machine("h200", flag="--on"))
    error = oom.oom_error(forecast, None, 20 * 2**30, when="reported by the device")
    assert isinstance(error, OutOfMemory)
    assert error.code == 71
    lines = error.fix.splitlines()
    assert 1 <= len(lines) <= 3
    for line in lines:
        flags, _, promise = line.partition("    # ")
        overrides = [tuple(word.removeprefix("--config.").split("=")) for word in flags.split()]
        changed = config.load(Run, "configs/llama_1b.py", overrides).value
        assert (
            predict.forecast(changed, forecast.machine).bytes_per_device["total"]
            < forecast.bytes_per_device["total"]
        )
        assert "slower" in promise or "as fast" in promise


def test_a_chip_that_no_table_knows_has_no_plan_but_an_error():
    error = oom.oom_error(None, 3 * 2**30, 2**30, when="reported by the device")
    assert "3 GiB" in error.why
    assert error.fix
