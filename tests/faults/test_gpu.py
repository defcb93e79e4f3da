"""Line C12: results of one seed on a GPU, with kernels that always add in one order and without.

On a machine with an NVIDIA GPU, if jaxlm and pytest are installed: python -m pytest -m gpu -s
tests/faults/test_gpu.py. `scripts/test --slow` does it in an environment of its own if nvidia-smi
lists one.
"""

import json
from pathlib import Path

import pytest

from tests.faults import harness

pytestmark = pytest.mark.gpu

PLATFORM = "cuda"
# Sums of threads that come in any order, and kernels chosen by who was faster just then, are left
# out.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
# Of the sizes at which a matmul is split over its sum, and with an embedding whose gradient is a
# scatter.
SETTINGS = {
    "data.sequence": 512,
    "model.width": 512,
    "model.depth": 4,
    "model.hidden": 2048,
    "precision.compute": "bfloat16",
    "train.batch": 32,
    "train.steps": 50,
    "checkpoint.every": "100%",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


def trained(config: str, workdir: Path, xla_flags: str, *flags: str) -> tuple[dict, str]:
    """The losses of a run on the GPU, and the digest of its last state."""
    code, output = harness.run(
        harness.words(config, workdir, *flags),
        JAX_PLATFORMS=PLATFORM,
        XLA_FLAGS=xla_flags,
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        JAX_ENABLE_COMPILATION_CACHE="false",  # the second run chooses its kernels again
    )
    assert code == 0, output
    losses = harness.losses(workdir)
    assert len(losses) == SETTINGS["train.steps"] + 1
    return losses, harness.state_digest(workdir)


def test_c12_the_same_seed_is_the_same_run_with_deterministic_kernels(config, tmp_path):
    one, two = (trained(config, tmp_path / name, DETERMINISTIC) for name in ("one", "two"))
    assert one == two
    other, _ = trained(config, tmp_path / "other", DETERMINISTIC, "--config.seed=1")
    assert all(other[key] != loss for key, loss in one[0].items())
    environment = json.loads((tmp_path / "one/environment.json").read_text())
    assert environment["backend"] == {"cuda": "gpu"}.get(PLATFORM, PLATFORM)
    assert environment["variables"]["XLA_FLAGS"] == DETERMINISTIC


def test_c12_without_them_the_difference_is_told(config, tmp_path, record_property):
    """Report the difference; there may be none, so it is not asserted."""
    (one, first), (two, second) = (trained(config, tmp_path / name, "") for name in ("one", "two"))
    assert one.keys() == two.keys()
    pairs = [(key, float.fromhex(one[key]), float.fromhex(two[key])) for key in one]
    other = [step for (_, step), a, b in pairs if a != b]
    far = max(abs(a / b - 1) for _, a, b in pairs)
    record_property(
        "C12",
        "without deterministic kernels "
        + (
            f"losses differ from step {min(other)} on, by at most {far:.1e}"
            if other
            else "each loss is the same"
        )
        + f"; the last states are {'the same' if first == second else 'not the same'}",
    )
