"""Context parallelism: the chosen kernels, refusals, and equality with a run of whole rows."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxlm.cli.main import main
from jaxlm.core import backend
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.data.config import DataConfig
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.monitor.chips import machine
from jaxlm.objectives.config import Causal, Prefix
from jaxlm.ops.kernels import Target
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels, predict
from jaxlm.recipes.use import load
from jaxlm.training.config import TrainConfig
from tests.faults import harness

GRID = MeshConfig(data=1, context=4).sizes(4)
WHOLE = MeshConfig(data=4).sizes(4)
CPU, TPU, H100 = Target("cpu"), Target("tpu"), Target("gpu", 9.0)
SIZES = dict(vocab=64, width=32, depth=2, heads=4)


def run_of(model, sequence=64, **settings):
    return Run(
        model=model,
        data=DataConfig(sequence=sequence),
        train=TrainConfig(batch=8),
        mesh=MeshConfig(data=1, context=4, **settings),
    )


def test_the_exchange_of_keys_is_chosen_set_and_reported():
    model = Llama(**SIZES, kv_heads=4)
    small = run_of(model)
    assert not attention_kernels.with_kernels(small, model.build(), GRID, CPU).has_ring
    assert attention_kernels.describe_kernels(small, model.build(), GRID, CPU).startswith(
        "keys gathered from 4 devices: "
    )
    large = run_of(model, sequence=8192)
    assert attention_kernels.with_kernels(large, model.build(), GRID, CPU).has_ring
    output = attention_kernels.describe_kernels(large, model.build(), GRID, CPU)
    assert output.startswith("keys in a ring of 4 devices, zigzag over 8 chunks: ")
    assert "MiB a device, above 256\nsamples: reference" in output
    forced = run_of(model, context_keys="ring")
    assert attention_kernels.with_kernels(forced, model.build(), GRID, CPU).has_ring
    assert attention_kernels.describe_kernels(forced, model.build(), WHOLE, CPU).startswith(
        "reference: rows of 64 tokens"
    )
    assert attention_kernels.with_kernels(forced, model.build(), WHOLE, CPU) == model.build()


def test_a_ring_with_attention_dropout_is_refused_and_auto_gathers():
    model = GPT2(**SIZES, dropout=0.1)
    assert not attention_kernels.with_kernels(
        run_of(model, sequence=8192), model.build(), GRID, CPU
    ).has_ring
    run = run_of(model, context_keys="ring")
    with pytest.raises(ConfigError, match="does not support attention dropout") as caught:
        attention_kernels.check(run, model.build(), GRID, CPU)
    for line in caught.value.fix.splitlines():
        path, _, value = line.removeprefix("--config.").partition("=")
        fixed = (
            run_of(model, context_keys=value)
            if path == "mesh.context_keys"
            else dataclasses.replace(run, model=dataclasses.replace(model, dropout=float(value)))
        )
        attention_kernels.check(fixed, fixed.model.build(), GRID, CPU)


def test_blocks_are_chosen_for_long_rows_and_refused_where_they_cannot_be():
    model = Llama(**SIZES, kv_heads=4)
    run = run_of(model, sequence=1024)
    for sizes, kernel in ((WHOLE, "blockwise"), (GRID, "reference")):
        layers = attention_kernels.with_kernels(run, model.build(), sizes, CPU).layers
        assert {layer.attention.kernel for layer in layers} == {kernel}
    assert attention_kernels.describe_kernels(run, model.build(), WHOLE, CPU).startswith(
        "blockwise: rows of 1024 tokens"
    )
    named = dataclasses.replace(run, train=TrainConfig(batch=8, attention="blockwise"))
    attention_kernels.check(named, model.build(), WHOLE, CPU)
    with pytest.raises(ConfigError, match="needs whole rows"):
        attention_kernels.check(named, model.build(), GRID, CPU)
    dropping = GPT2(**SIZES, max_positions=1024, dropout=0.1)
    assert attention_kernels.describe_kernels(run, dropping.build(), WHOLE, CPU).startswith(
        "reference: no other kernel has"
    )
    with pytest.raises(ConfigError, match="blockwise attention cannot compute this run"):
        attention_kernels.check(named, dropping.build(), WHOLE, CPU)


def test_each_platform_has_its_kernel_and_says_why_not():
    model = Llama(**SIZES, kv_heads=4)
    run = dataclasses.replace(
        run_of(model, sequence=1024), precision=PrecisionConfig(compute="bfloat16")
    )
    for target, kernel in ((TPU, "splash"), (H100, "cudnn"), (CPU, "blockwise")):
        layers = attention_kernels.with_kernels(run, model.build(), WHOLE, target).layers
        assert {layer.attention.kernel for layer in layers} == {kernel}
        assert attention_kernels.describe_kernels(run, model.build(), WHOLE, target).startswith(
            f"{kernel}: "
        )
        assert attention_kernels.with_kernels(run, model.build(), GRID, target).layers[
            0
        ].attention.kernel == ("reference")
    short = dataclasses.replace(run, data=DataConfig(sequence=1000))
    output = attention_kernels.describe_kernels(short, model.build(), WHOLE, TPU)
    assert output.startswith("blockwise: rows of 1000 tokens")
    assert "; splash not: rows of 1000 tokens are not a multiple of 128\n" in output


@pytest.mark.parametrize(
    ("name", "target", "changed", "why"),
    [
        ("splash", CPU, {}, "it is for a tpu, and this is a cpu"),
        ("splash", H100, {}, "it is for a tpu, and this is a gpu"),
        ("cudnn", TPU, {}, "it is for a gpu, and this is a tpu"),
        ("splash", TPU, {"data.sequence": 1000}, "not a multiple of 128"),
        ("splash", TPU, {"regularization.attention_dropout": 0.1}, "it has no attention dropout"),
        ("splash", TPU, {"objective": Prefix()}, "these have bidirectional parts"),
        ("cudnn", H100, {"precision.compute": "float32"}, "it does not compute in float32"),
        (
            "cudnn",
            H100,
            {"regularization.attention_dropout": 0.1, "data.sequence": 999},
            "tokens are odd",
        ),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_what_would(name, target, changed, why):
    model = GPT2(**SIZES, max_positions=1024)
    settings = {
        "data.sequence": 512,
        "precision.compute": "bfloat16",
        "train.attention": name,
        **changed,
    }
    objective = settings.pop("objective", Causal())
    run = dataclasses.replace(run_of(model).changed(settings), objective=objective)
    with pytest.raises(ConfigError, match=f"{name} attention cannot compute this run") as caught:
        attention_kernels.check(run, run.decoder(64), WHOLE, target)
    assert caught.value.where == f"train.attention={name}"
    assert why in caught.value.why
    for line in caught.value.fix.splitlines():
        path, _, value = line.removeprefix("--config.").partition("=")
        kind = type(settings.get(path, value))
        mended = run.changed({path: kind(float(value)) if kind is not str else value})
        attention_kernels.check(mended, mended.decoder(64), WHOLE, target)
    with pytest.raises(ConfigError, match=f"{name} attention needs whole rows"):
        attention_kernels.check(run, run.decoder(64), GRID, target)


def test_the_target_of_a_mesh_is_its_devices():
    def device(**facts):
        return SimpleNamespace(devices=np.array([SimpleNamespace(**facts)]))

    assert setup.target(device(platform="tpu")) == TPU
    assert setup.target(device(platform="gpu", compute_capability="9.0")) == H100
    assert setup.target(device(platform="gpu", compute_capability="gfx942")) == Target("gpu")
    assert setup.target(mesh.build(MeshConfig(), jax.devices())) == CPU
    sizes = AbstractMesh((2,), ("data",))
    with backend.compiling_for("tpu"):
        assert setup.target(sizes) == TPU


@pytest.mark.parametrize(
    ("on", "kernel"), [("v5e-4", "splash"), ("h100x4", "cudnn"), ("t4x4", "blockwise")]
)
def test_a_plan_knows_the_kernel_of_its_machine(on, kernel):
    run = run_of(Llama(**SIZES, kv_heads=4), sequence=1024).changed(
        {"precision.compute": "bfloat16", "mesh.data": 4, "mesh.context": 1}
    )
    planned = predict.forecast(run, machine(on, flag="--on"))
    assert {layer.attention.kernel for layer in planned.decoder.layers} == {kernel}
    named = run.changed({"train.attention": "splash"})
    if kernel == "splash":
        assert predict.forecast(named, machine(on, flag="--on")).decoder == planned.decoder
    else:
        with pytest.raises(ConfigError, match="splash attention cannot compute this run"):
            predict.forecast(named, machine(on, flag="--on"))


def test_a_run_of_another_platform_is_used_here_with_another_kernel_that_is_logged():
    output = []
    grid = mesh.build(MeshConfig(), jax.devices())
    for name, sequence, kernel in (
        ("splash", None, "auto"),
        ("blockwise", None, "blockwise"),
        ("auto", 64, "auto"),
    ):
        run = run_of(Llama(**SIZES, kv_heads=4), sequence=1024).changed(
            {"train.attention": name, "mesh.context": 1, "mesh.data": "auto"}
        )
        used = load._adapted_to_mesh(run, 64, grid, sequence, output.append)
        assert used.train.attention == kernel
        assert used.data.sequence == (sequence or 1024)
    assert output == [
        "splash attention cannot compute this run here: blockwise: rows of 1024 tokens, 256 "
        "queries and keys at a time\n"
        "samples: reference, as the other kernels have no KV cache"
    ]


def test_rows_of_another_length_are_refused_with_the_nearest_that_divide():
    model = Llama(**SIZES, kv_heads=4)
    ring = attention_kernels.with_kernels(
        run_of(model, context_keys="ring"), model.build(), GRID, CPU
    )
    attention_kernels.check_length(GRID, model.build(), 36, flag="--sequence")
    for length, fixes in ((36, [32, 40]), (5, [8])):
        with pytest.raises(ConfigError, match=f"rows of {length} tokens") as caught:
            attention_kernels.check_length(GRID, ring, length, flag="--sequence")
        assert caught.value.fix.splitlines() == [f"--sequence={fix}" for fix in fixes]
    learned = GPT2(**SIZES, max_positions=38).build()
    with pytest.raises(ConfigError) as caught:
        attention_kernels.check_length(GRID, learned, 38, flag="--sequence")
    assert caught.value.fix == "--sequence=36"


SETTINGS = {
    "model.dropout": 0.0,
    "loss.chunk": 64,
    "train.steps": 4,
    "eval.every": 2,
    "sample.every": "50%",
    "sample.prompts": ("one", "two three"),
    "sample.max_tokens": 8,
    "mesh.data": 8,
}


@pytest.mark.slow
def test_runs_by_blocks_and_in_a_ring_learn_sample_and_are_evaluated_as_one_of_all_scores(
    tmp_path, capsys
):
    config = harness.write_config(tmp_path, SETTINGS)
    results = {}
    split = ["--config.mesh.data=2", "--config.mesh.context=4", "--config.mesh.context_keys=ring"]
    blocks = ["--config.train.attention=blockwise"]
    for name, flags in {"whole": [], "blocks": blocks, "split": split}.items():
        workdir = tmp_path / name
        assert main(harness.words(config, workdir, *flags)) == 0
        capsys.readouterr()
        assert main(["eval", f"--workdir={workdir}", "--json"]) == 0
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss_nats"] for line in lines]
        losses.append(json.loads(capsys.readouterr().out)["loss_nats"])
        samples = (workdir / "samples.jsonl").read_text().splitlines()
        results[name] = losses, [json.loads(line)["text"] for line in samples]
    assert len(results["whole"][0]) == 4 + 2 + 1
    assert len(results["whole"][1]) == 4
    for name, words in {
        "whole": "reference: rows of 32 tokens",
        "blocks": "blockwise: set by train.attention",
        "split": "keys in a ring of 4 devices",
    }.items():
        np.testing.assert_allclose(results[name][0], results["whole"][0], rtol=1e-5)
        assert results[name][1] == results["whole"][1]
        environment = json.loads((tmp_path / name / "environment.json").read_text())
        assert environment["attention"].startswith(words)
    capsys.readouterr()
    assert main(["eval", f"--workdir={tmp_path}/split", "--sequence=20"]) == 2
    assert "--sequence=24" in capsys.readouterr().err
