"""Servers whose weights and KV cache are split over devices, as processes with several devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxlm.cli.main import main
from jaxlm.recipes.use import load
from tests.cli.test_exchange import write
from tests.faults import harness

PROMPTS = ("def main", "a", "one two three")
SETTINGS = {"max_tokens": 12, "temperature": 0, "logprobs": 5, "echo": True}


def imported(source, run, mesh):
    """Return a run of a model in float32, with a mesh."""
    settings = (f"--config.mesh.{mesh}", "--config.precision.compute=float32")
    assert main(["import", f"--from={source}", f"--workdir={run}", *settings, "--quiet"]) == 0
    return run


def answers(run, devices):
    """Return the choice of each prompt, by a server with that number of devices."""
    words = [sys.executable, "-m", "jaxlm", "serve", f"--workdir={run}", "--port=0", "--slots=2"]
    words += [f"--cpu_devices={devices}", "--chunk=4", "--context=32"]
    environment = os.environ | {"XLA_FLAGS": harness.FLAGS}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = next(line for line in process.stdout if line.startswith("serving"))
            url = line.split()[-1]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                return [
                    client.completions.create(
                        model=run.name, prompt=prompt, extra_body={"ignore_eos": True}, **SETTINGS
                    ).choices[0]
                    for prompt in PROMPTS
                ]
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ways"), [("llama", 2), ("deepseek_v3", 4)])
def test_weights_split_over_devices_give_the_texts_of_one_device(
    tmp_path, family, ways, record_property
):
    """A mesh that the devices do not fill would split batches, and be refused."""
    source = write(tmp_path / "source", family)
    one, split = (
        answers(imported(source, tmp_path / str(devices), f"tensor={devices}"), devices)
        for devices in (1, ways)
    )
    opened, differences = load.load_run(tmp_path / "1"), []
    for whole, other in zip(one, split, strict=True):
        assert other.text == whole.text
        assert other.logprobs.tokens == whole.logprobs.tokens
        ids = [*opened.tokenizer.before, *opened.tokenizer.encode(whole.text)]
        with jax.set_mesh(opened.model.mesh):
            logits = opened.model.blueprint.merge(opened.params)(jnp.array([ids] * 8))
        ours, theirs = (np.array(x.logprobs.token_logprobs[1:]) for x in (whole, other))
        differences.append(np.abs(ours - theirs).max() / float(jnp.abs(logits).max()))
    record_property(
        "table", f"{family}, tensor={ways}: {max(differences):.1e} of the largest logit"
    )
    assert max(differences) <= 1e-6


def test_a_mesh_that_splits_batches_is_refused_with_the_devices_that_serve(tmp_path, capsys):
    run = imported(write(tmp_path / "source", "llama"), tmp_path / "run", "data=8")
    assert main(["serve", f"--workdir={run}", "--port=0"]) == 2
    error = capsys.readouterr().err
    assert "the mesh splits them 8 ways" in error
    assert "--cpu_devices=1" in error
