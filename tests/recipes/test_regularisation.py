"""What disturbs and steadies training, through the front door."""

import jax
import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import ConfigError
from jaxlm.models.config import RegularisationConfig
from jaxlm.models.families.qwen3 import Qwen3
from jaxlm.optim.config import AdamW, ScheduleFree
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import assembly
from jaxlm.recipes.config import Run
from tests.faults import harness

CLIPPED = RegularisationConfig(qk_clip=1.0)
SETTINGS = {
    "train.steps": 6,
    "checkpoint.every": 3,
    "data.validation": (),
    "regularisation.layer_drop": 0.4,
    "regularisation.embedding_noise": 5.0,
    "regularisation.embedding_dropout": 0.2,
    "regularisation.attention_dropout": 0.1,
    "regularisation.qk_clip": 0.003,
}


def test_where_heads_cannot_be_scaled_back_it_is_said_before_compiling():
    normed = Run(model=Qwen3(vocab=64, width=32, depth=2, heads=4), regularisation=CLIPPED)
    with pytest.raises(ConfigError, match="normed"):
        assembly.assemble(normed, 64, mesh.build(MeshConfig(data=1), jax.devices()[:1]))
    staged = Run(mesh=MeshConfig(data=1, pipe=2), regularisation=CLIPPED)
    with pytest.raises(ConfigError, match="pipeline"):
        assembly.assemble(staged, 64, mesh.build(staged.mesh, jax.devices()[:2]))
    for kept in (AdamW(freeze=("*/attention/query/*",)), AdamW(lr_scale=("*/key/weight=0",))):
        held = Run(optim=kept, regularisation=CLIPPED)
        with pytest.raises(ConfigError, match="stay as they are"):
            assembly.assemble(held, 64, mesh.build(MeshConfig(data=1), jax.devices()[:1]))
    averaged = Run(optim=ScheduleFree(), regularisation=CLIPPED)
    assert "regularisation.qk_clip" in [path for path, _, _ in averaged.problems()]


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
