import json
import os
import platform
import subprocess
import sys

import pytest

# A model whose temporaries are some 140 MB, as `jaxlm train` would take its steps.
STEPS = """
import json, resource
import jax, numpy as np
from jaxlm.core import config
from jaxlm.data.batch import Tokens
from jaxlm.parallel import host
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.programs import without_data

setup.start()
small = {"depth": 2, "width": 64, "heads": 2, "kv_heads": 2, "head_dim": "auto", "hidden": "auto"}
overrides = [(f"model.{name}", str(value)) for name, value in small.items()]
overrides += [("data.sequence", "256"), ("train.batch", "8"), ("train.microbatches", "1")]
overrides += [("train.remat", "none"), ("loss.chunk", "None")]
run = config.load(Run, "configs/quickstart.py", overrides).value
grid = meshes.build(run.mesh)
engine = without_data(run, grid, 8192)
ids = np.zeros((8, 256), np.int32)
with jax.set_mesh(grid):
    state = engine.init_state()
    weights, segments = ids + np.float32(1), ids + 1
    tokens = Tokens(tokens=ids, targets=ids, weights=weights, segments=segments, positions=ids)
    batch = host.put(grid, tokens)
    step = engine.step.lower(state, batch).compile()
    faults = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
size, page = step.memory_analysis().temp_size_in_bytes, resource.getpagesize()
print(json.dumps({"faults": faults, "bytes": size, "page": page}))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_a_step_on_a_cpu_gets_the_memory_of_the_one_before():
    one_device = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=one_device
    )
    report = json.loads(done.stdout)
    pages = report["bytes"] / report["page"]
    assert report["bytes"] > 2**26
    assert sorted(report["faults"])[4] < pages / 10, report
