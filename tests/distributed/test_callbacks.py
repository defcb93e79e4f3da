"""Callbacks of a run of several processes: all see each step, and an error in one ends all."""

import os
import subprocess
import sys

import pytest

from jaxlm.training.launch import free_port
from tests.faults import harness

PROGRAM = """
import os, sys
import jax.numpy as jnp
import jaxlm
from jaxlm.parallel import cluster

config, workdir, address, rank, failing = sys.argv[1:]


class Watch(jaxlm.Callback):
    def on_log(self, event):
        print(event.step, float(jnp.linalg.norm(event.params["embedding"]["table"])), flush=True)
        if (rank, event.step) == (failing, 3):
            raise ZeroDivisionError("mine")


process = cluster.process_spec(os.environ, coordinator=address, count=2, rank=int(rank))
jaxlm.train(
    config, workdir=workdir, settings={"mesh.data": 2, "train.steps": 400},
    callbacks=[Watch()], quiet=True, process=process,
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["0", "1"])
def test_an_error_in_one_process_ends_all_with_70_and_the_state_saved(tmp_path, failing):
    config, run = harness.write_config(tmp_path), tmp_path / "run"
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"XLA_FLAGS": harness.FLAGS, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, config, str(run), address, str(rank), failing],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    written = harness.outputs_of(started)
    assert [process.returncode for process in started] == [70, 70], written
    assert "ZeroDivisionError: mine" in written[int(failing)]
    seen = [
        dict(
            line.split()
            for line in text.splitlines()
            if line[:1].isdigit() and len(line.split()) == 2
        )
        for text in written
    ]
    both = seen[0].keys() & seen[1].keys()
    assert {"1", "2", "3"} <= both
    assert {step: seen[0][step] for step in both} == {step: seen[1][step] for step in both}
    last = harness.exit_of(run)
    assert (last["code"], last["cause"]) == (70, "ZeroDivisionError: mine")
    assert harness.steps(run)[-1] == last["step"] >= 4
