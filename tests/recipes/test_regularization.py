"""Regularization and stabilization of training, by the command line."""

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import ConfigError
from jaxlm.models.config import RegularizationConfig
from jaxlm.models.families.qwen import Qwen3
from jaxlm.optim.config import AdamW, ScheduleFree
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from tests.faults import harness

CLIPPED = RegularizationConfig(qk_clip=1.0)
SETTINGS = {
    "train.steps": 6,
    "checkpoint.every": 3,
    "data.validation": (),
    "regularization.layer_drop": 0.4,
    "regularization.embedding_noise": 5.0,
    "regularization.embedding_dropout": 0.2,
    "regularization.attention_dropout": 0.1,
    "regularization.qk_clip": 0.003,
}


def test_where_heads_cannot_be_scaled_back_it_is_said_before_compiling():
    normed = Run(model=Qwen3(vocab=64, width=32, depth=2, heads=4), regularization=CLIPPED)
    with pytest.raises(ConfigError, match="normalized"):
        setup.build_sharded_model(normed, 64, mesh.build(MeshConfig(data=1), jax.devices()[:1]))
    staged = Run(mesh=MeshConfig(data=1, pipe=2), regularization=CLIPPED)
    with pytest.raises(ConfigError, match="pipeline"):
        setup.build_sharded_model(staged, 64, mesh.build(staged.mesh, jax.devices()[:2]))
    for optim in (AdamW(freeze=("*/attention/query/*",)), AdamW(lr_scale=("*/key/weight=0",))):
        held = Run(optim=optim, regularization=CLIPPED)
        with pytest.raises(ConfigError, match="frozen"):
            setup.build_sharded_model(held, 64, mesh.build(MeshConfig(data=1), jax.devices()[:1]))
    averaged = Run(optim=ScheduleFree(), regularization=CLIPPED)
    assert "regularization.qk_clip" in [path for path, _, _ in averaged.problems()]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_all_of_it_together_goes_on_bit_for_bit(tmp_path):
    config = harness.write_config(tmp_path, SETTINGS)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(harness.words(config, whole)) == 0
    assert main(harness.words(config, parts, "--stop_at=3")) == 0
    assert main(harness.words(config, parts)) == 0
    assert harness.losses(whole) == harness.losses(parts)
    assert harness.state_digest(whole) == harness.state_digest(parts)
    assert all(record["qk_clipped_heads"] > 0 for record in harness.records(whole))


@pytest.mark.slow
def test_heads_come_back_alike_in_micro_batches_and_over_a_mesh(tmp_path):
    """The largest logit of a step is that of all of its rows and heads, on all devices."""
    plain = {"model.dropout": 0.0, "regularization.qk_clip": 0.003, "data.validation": ()}
    config = harness.write_config(tmp_path, plain | {"train.steps": 3, "checkpoint.every": 3})
    ways = {
        "whole": ("--cpu_devices=1",),
        "parts": ("--cpu_devices=1", "--config.train.microbatches=4"),
        "mesh": ("--cpu_devices=4", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"),
    }
    for name, flags in ways.items():
        words = harness.words(config, tmp_path / name, *flags)
        code, output = harness.run(words, XLA_FLAGS=harness.FLAGS)
        assert code == 0, output
    whole = harness.store(tmp_path / "whole").arrays(3)
    records = harness.records(tmp_path / "whole")
    assert all(record["qk_clipped_heads"] > 0 for record in records)
    for name in ("parts", "mesh"):
        for path, array in harness.store(tmp_path / name).arrays(3).items():
            if path.startswith("params/"):
                np.testing.assert_allclose(array, whole[path], rtol=1e-4, atol=1e-6, err_msg=path)
        for one, other in zip(records, harness.records(tmp_path / name), strict=True):
            assert one["qk_clipped_heads"] == other["qk_clipped_heads"]
            np.testing.assert_allclose(
                one["attention_logit_max"], other["attention_logit_max"], rtol=1e-5
            )
