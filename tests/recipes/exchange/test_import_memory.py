"""Host memory of an import besides its arrays, on a generated model of 2.2 GB."""

import collections
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxlm.checkpoint.hub_folder import write_json, write_tensors
from jaxlm.checkpoint.hub_tensors import Reader, layout
from jaxlm.cli.main import main
from jaxlm.models.cost import model_cost
from jaxlm.models.cost.tensors import tensors as stacked
from jaxlm.models.families.llama import Llama
from tests.cli.test_exchange import SIZES, write, write_tokenizer

ROOT = Path(__file__).parents[3]
FAMILY = Llama(
    vocab=8192, width=2048, depth=20, heads=16, kv_heads=16, hidden=5632, max_positions=512
)
BF16 = np.dtype(ml_dtypes.bfloat16)


def peak(words, folder):
    """Exit code of a command, and the most anonymous memory that it held."""
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxlm", *words],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env=os.environ | {"XLA_FLAGS": ""},
        )
    most = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if "RssAnon:" in status:
            most = max(most, int(status.split("RssAnon:")[1].split()[0]) * 1024)
        time.sleep(0.01)
    return process.returncode, most


def test_a_part_of_a_leaf_is_on_its_devices_before_the_next_is_read(tmp_path, monkeypatch):
    """Each device has an eighth of a matrix, and the host never more; a norm is read once."""
    read, seen = Reader.leaf, collections.defaultdict(list)
    others = (
        jax.live_arrays()
    )  # of tests before this one; held, so that none of them ends meanwhile

    def leaf(self, path, shape, within, dtype):
        block = read(self, path, shape, within, dtype)
        live = [each for each in jax.live_arrays() if each.shape == block.shape]
        seen[path].append(
            (block.size, len(live) - sum(block.shape == each.shape for each in others))
        )
        return block

    monkeypatch.setattr(Reader, "leaf", leaf)
    mesh = [f"--config.mesh.{axis}={ways}" for axis, ways in dict(data=1, fsdp=4, tensor=2).items()]
    words = ["import", f"--from={write(tmp_path / 'source')}", f"--workdir={tmp_path / 'run'}"]
    assert main([*words, *mesh, "--quiet"]) == 0
    part = SIZES["depth"] * SIZES["width"] * SIZES["hidden"] // 8
    assert seen["stack/0/mlp/up/weight"] == [(part, number) for number in range(8)]
    assert seen["final_norm/scale"] == [(SIZES["width"] // 4, number) for number in range(0, 8, 2)]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder of 2.1 GB in bfloat16, and the bytes of its largest leaf, which has all layers."""
    source = tmp_path_factory.mktemp("large")
    row = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(BF16)
    tensors = layout(FAMILY.build(), FAMILY.HUB)
    write_tensors(source, tensors, lambda each: np.resize(row, each.shape), BF16)
    write_json(
        source / "config.json",
        FAMILY.to_hub() | {"model_type": FAMILY.HUB.model_type, "torch_dtype": "bfloat16"},
    )
    write_tokenizer(source)
    yield source, max(each.size for each in stacked(FAMILY.build())) * BF16.itemsize
    shutil.rmtree(source)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_an_import_holds_little_beside_the_arrays(large, devices, tmp_path, record_property):
    source, largest = large
    arrays = model_cost.parameters(FAMILY.build()) * BF16.itemsize
    assert arrays > 2e9
    _, before = peak(["doctor", "--quiet"], tmp_path)
    words = ["import", f"--from={source}", f"--workdir={tmp_path / 'run'}", "--json"]
    words += [f"--cpu_devices={devices}", "--config.mesh.data=1", f"--config.mesh.fsdp={devices}"]
    code, most = peak([*words, "--config.precision.params=bfloat16"], tmp_path)
    assert code == 0, (tmp_path / "output").read_text()
    shutil.rmtree(tmp_path / "run")
    beyond, allowed = most - arrays, 1.2 * largest / devices + 1e9
    sizes = {"arrays": arrays, "beyond": beyond, "allowed": allowed, "of an idle process": before}
    figures = {name: f"{n / 1e9:.2f} GB" for name, n in sizes.items()}
    record_property("table", json.dumps({"devices": devices} | figures))
    assert beyond < allowed, sizes
