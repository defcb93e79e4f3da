"""Encoders, and decoders too, on meshes of several devices."""

import numpy as np
import pytest

from jaxlm.cli.main import main
from tests.faults import harness
from tests.recipes import test_encoder_decoders as pairs
from tests.recipes.test_encoders import MASKED, SETTINGS, SMALL, call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("bert", {"data": 1, "fsdp": 2, "tensor": 2}),
        ("modernbert", {"data": 1, "fsdp": 2, "context": 2}),
        ("roberta", {"data": 2, "pipe": 2}),
    ],
)
def test_an_encoder_split_over_devices_computes_what_one_device_does(
    tmp_path, capsys, family, mesh
):
    config = harness.write_config(tmp_path, SETTINGS)
    split = [f"--config.mesh.{axis}={ways}" for axis, ways in mesh.items()]
    flags = [f"--config={config}", *SMALL, *MASKED, f"--config.model.family={family}", *split]
    flags += ["--config.model.depth=4", "--config.train.microbatches=2"]
    code, answer = call(capsys, "check", *flags, "--devices=4")
    assert (code, answer.get("ok")) == (0, True), answer


@pytest.mark.slow
def test_an_encoder_decoder_split_over_devices_learns_as_on_one(tmp_path):
    config = harness.write_config(tmp_path, pairs.SETTINGS)
    losses = []
    for number, mesh in enumerate(({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2})):
        split = [f"--config.mesh.{axis}={ways}" for axis, ways in mesh.items()]
        more = ["--config.train.microbatches=2", "--config.train.batch=16"]
        run = tmp_path / f"run{number}"
        assert main(harness.words(config, run, *pairs.SMALL, *pairs.SPANS, *split, *more)) == 0
        losses.append([(r["split"], r["loss_nats"]) for r in harness.records(run)])
    for (split, loss), (other, expected) in zip(*losses, strict=True):
        assert split == other
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
