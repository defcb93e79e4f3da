"""Line B14: a checkpoint moves between meshes, bit for bit."""

import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import tree
from jaxlm.parallel import host
from jaxlm.recipes.train import checkpointing
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def half(config, tmp_path_factory):
    """A run that stopped after 8 of its steps, on eight data-parallel devices."""
    run = tmp_path_factory.mktemp("half") / "run"
    train_on({"data": 8}, harness.words(config, run, "--stop_at=8"))
    return run


MESHES = {
    "one device": {"data": 1},
    "two by tensor": {"data": 1, "tensor": 2},
    "four by both": {"data": 1, "fsdp": 2, "tensor": 2},
    "eight by fsdp": {"data": 1, "fsdp": 8},
}
LONG = ("--config.train.steps=28", "--allow_change=train.steps", "--config.checkpoint.every=20")


def train_on(mesh: dict[str, int], words: list[str]) -> None:
    """Trains in this process on as many of its devices as the mesh has."""
    some = jax.devices()[: math.prod(mesh.values())]
    axes = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: some)
        patch.setattr(jax, "device_count", lambda *_: len(some))
        assert main([*words, *axes]) == 0


@pytest.fixture(scope="module")
def long(config, half, tmp_path_factory):
    """The run continued to 28 steps on its own mesh."""
    run = tmp_path_factory.mktemp("long") / "run"
    shutil.copytree(half, run)
    train_on({"data": 8}, harness.words(config, run, *LONG))
    return run


def moves(
    config: str, run: Path, mesh: dict[str, int], long: Path, monkeypatch: pytest.MonkeyPatch
) -> float:
    """Resume after step 8 on another mesh; return the largest error of the next 20 losses.

    Args:
      config: the config of the run.
      run: the run, saved after step 8.
      mesh: the mesh to resume on.
      long: the same run on its own mesh, to compare with.
      monkeypatch: records the restored state.
    """
    saved = leaf_digests(harness.store(run).arrays(8))
    restored = []
    restored_state = checkpointing.restored_state

    def noted(*words):
        state = restored_state(*words)
        restored.append(leaf_digests(tree.leaves(host.fetch(state))))
        return state

    monkeypatch.setattr(checkpointing, "restored_state", noted)
    train_on(mesh, harness.words(config, run, *LONG))
    assert restored == [saved]
    ours, theirs = harness.losses(run), harness.losses(long)
    assert ours.keys() == theirs.keys()
    after = [key for key in theirs if key[1] > 8]
    assert len(after) == 20 + 1, "those of training, and of the evaluation at the end"
    pairs = [(float.fromhex(ours[key]), float.fromhex(theirs[key])) for key in after]
    return max(abs(a / b - 1) for a, b in pairs)


def leaf_digests(leaves: dict[str, Any]) -> dict[str, str]:
    return {
        path: f"{leaf.dtype}{leaf.shape} {hashlib.sha256(leaf.tobytes()).hexdigest()}"
        for path, leaf in ((path, np.asarray(leaf)) for path, leaf in leaves.items())
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MESHES)
def test_b14_a_checkpoint_moves_between_meshes_bit_for_bit(
    config, half, long, tmp_path, monkeypatch, name, record_property
):
    """Saved on eight data-parallel devices."""
    shutil.copytree(half, tmp_path / "run")
    far = moves(config, tmp_path / "run", MESHES[name], long, monkeypatch)
    record_property("B14", f"{name} {far:.1e}")
    assert far <= 1e-6


@pytest.fixture(scope="module")
def split(config, tmp_path_factory):
    """A run of 12 steps with fsdp and tensor."""
    run = tmp_path_factory.mktemp("split") / "run"
    train_on(MESHES["four by both"], harness.words(config, run))
    return run


@pytest.fixture
def half_split(split, tmp_path):
    """The same without what came after step 8."""
    run = tmp_path / "run"
    shutil.copytree(split, run)
    for step in (10, 12):
        shutil.rmtree(run / f"checkpoints/{step}")
    return run


@pytest.mark.slow
def test_b14_a_checkpoint_of_split_parameters_goes_on_bit_for_bit_where_it_was(
    config, split, half_split
):
    train_on(MESHES["four by both"], harness.words(config, half_split))
    assert "restoring step 8:" in (half_split / "log.txt").read_text()
    assert harness.losses(half_split) == harness.losses(split)
    assert harness.state_digest(half_split) == harness.state_digest(split)


@pytest.mark.slow
def test_b14_a_checkpoint_of_split_parameters_moves_back(
    config, half_split, long, monkeypatch, record_property
):
    """The eight steps before it differ in their rounding from those that it is compared with."""
    far = moves(config, half_split, {"data": 8}, long, monkeypatch)
    record_property("B14", f"back to eight {far:.1e}")
    assert far <= 1e-6


@pytest.mark.slow
def test_b14_a_checkpoint_moves_from_fsdp_to_tensor(
    config, long, tmp_path, monkeypatch, record_property
):
    """These eight steps do too."""
    run = tmp_path / "run"
    train_on({"data": 1, "fsdp": 4}, harness.words(config, run, "--stop_at=8"))
    far = moves(config, run, MESHES["two by tensor"], long, monkeypatch)
    record_property("B14", f"fsdp to tensor {far:.1e}")
    assert far <= 1e-6
