"""What an import needs of host memory beside the arrays that it makes, on a model of 2.2 GB made on the spot."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxlm.checkpoint.hub_folder import write_json, write_tensors
from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.models import cost
from jaxlm.models.families.llama import Llama
from jaxlm.models.tensors import tensors as stacked
from tests.cli.test_exchange import write_tokenizer

ROOT = Path(__file__).parents[2]
FAMILY = Llama(vocab=8192, width=2048, depth=20, heads=16, kv_heads=16, hidden=5632, context=512)
BF16 = np.dtype(ml_dtypes.bfloat16)


def peak(words, folder):
    """Exit code of a command, and the most anonymous memory that it held."""
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxlm", *words],
            cwd=ROOT,
            stdout=said,
            stderr=said,
            env=os.environ | {"XLA_FLAGS": ""},
        )
    most = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if "RssAnon:" in status:
            most = max(most, int(status.split("RssAnon:")[1].split()[0]) * 1024)
        time.sleep(0.01)
    return process.returncode, most


@pytest.mark.slow
def test_an_import_holds_little_beside_the_arrays(tmp_path, record_property):
    source = tmp_path / "source"
    source.mkdir()
    row = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(BF16)
    tensors = layout(FAMILY.build(), FAMILY.HUB)
    write_tensors(source, tensors, lambda each: np.resize(row, each.shape), BF16)
    write_json(
        source / "config.json",
        FAMILY.to_hub() | {"model_type": FAMILY.HUB.model_type, "torch_dtype": "bfloat16"},
    )
    write_tokenizer(source)
    largest = max(each.size for each in stacked(FAMILY.build()))  # all layers of one kind together
    arrays = cost.parameters(FAMILY.build()) * BF16.itemsize
    assert arrays > 2e9
    _, before = peak(["doctor", "--quiet"], tmp_path)
    words = ["import", f"--from={source}", f"--workdir={tmp_path / 'run'}"]
    code, most = peak([*words, "--config.precision.params=bfloat16", "--json"], tmp_path)
    assert code == 0, (tmp_path / "said").read_text()
    beyond, allowed = most - arrays, 1.2 * largest * BF16.itemsize + 1e9
    told = {"arrays": arrays, "beyond": beyond, "allowed": allowed, "of an idle process": before}
    record_property("table", json.dumps({name: f"{n / 1e9:.2f} GB" for name, n in told.items()}))
    assert beyond < allowed, told
