"""The plan agrees with the run: bytes, seconds and layout."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.cost import model_cost
from jaxlm.models.cost.tensors import tensors
from jaxlm.monitor import host_machine
from jaxlm.monitor.chips import machine
from jaxlm.ops import matmul
from jaxlm.optim.config import Optimizer
from jaxlm.parallel import mesh
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.plan import device_memory, predict, search
from jaxlm.recipes.train import programs
from jaxlm.recipes.train.programs import TrainPrograms, compiled_memory
from jaxlm.tune import cost

SMALL = {
    "model.vocab": "512",
    "model.depth": "4",
    "model.width": "64",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.hidden": "192",
    "data.sequence": "64",
    "train.batch": "8",
    "mesh.data": "1",
}


PAIRED = {"model.family": "t5", "objective.name": "span"}


def load(settings):
    values = {path: value for path, value in (SMALL | settings).items() if value is not None}
    return config.load(Run, None, list(values.items())).value


def planned(run, devices=1):
    return predict.forecast(run, host_machine.this_machine(devices, []))


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({}, 1),
        ({"mesh.fsdp": "2", "mesh.tensor": "2"}, 4),
        ({"mesh.fsdp": "4", "mesh.zero": "1", "optim.name": "lion"}, 4),
        ({"mesh.fsdp": "4", "mesh.zero": "2", "optim.name": "muon"}, 4),
        (
            {
                "mesh.pipe": "2",
                "mesh.data": "2",
                "optim.name": "adafactor",
                "train.microbatches": "2",
            },
            4,
        ),
        ({"precision.params": "bfloat16", "optim.name": "adafactor", "optim.factor_from": "32"}, 1),
        (
            {
                "mesh.expert": "2",
                "mesh.tensor": "2",
                "model.family": "mixtral",
                "model.hidden": "96",
            },
            4,
        ),
        (
            PAIRED
            | {
                "mesh.fsdp": "2",
                "mesh.tensor": "2",
                "model.decoder_depth": "2",
                "model.kv_heads": None,
            },
            4,
        ),
        (
            {
                "model.family": "deepseek_v3",
                "model.kv_heads": None,
                "model.query_rank": "48",
                "model.kv_rank": "32",
                "model.experts": "8",
                "model.top_k": "2",
                "model.groups": "2",
                "model.top_groups": "1",
                "mesh.expert": "2",
                "mesh.fsdp": "2",
                "mesh.tensor": "2",
                "optim.name": "adamw8bit",
            },
            8,
        ),
        ({"train.offload": "('optimizer',)"}, 1),
        ({"precision.params": "bfloat16", "mesh.fsdp": "4", "average.name": "ema"}, 4),
        ({"precision.params": "bfloat16", "precision.moments": "bfloat16"}, 1),
        ({"precision.moments": "bfloat16", "optim.name": "soap"}, 1),
        *(
            ({"mesh.fsdp": "2", "mesh.tensor": "2", "mesh.zero": "1", "optim.name": arm().name}, 4)
            for arm in typing.get_args(Optimizer)
        ),
    ],
)
def test_the_bytes_of_the_state_are_those_of_the_live_layout(settings, devices):
    run = load(settings)
    grid = mesh.build(run.mesh, jax.devices()[:devices])
    model = setup.build_sharded_model(run, 512, grid)
    data = SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=np.zeros(512, np.int32), lead=""))
    with jax.set_mesh(grid):
        live = TrainPrograms(run, data, model).bytes_per_device()
    output = device_memory.held_bytes(run, planned(run, devices).decoder, run.mesh.sizes(devices))
    if run.train.offload:
        assert output.pop("optimizer") == 0
        live.pop("optimizer")
    scalars = 64  # counters of updates
    assert {name: round(size) for name, size in output.items()} == pytest.approx(live, abs=scalars)


STAGES = {"mesh.pipe": "2", "mesh.data": "2", "train.microbatches": "4"}
CIRCULAR = STAGES | {"train.pipeline": "circular"}
MANY = {"model.experts": "16", "model.top_k": "4"}
SHARED = {"model.experts": "12", "model.top_k": "3", "model.shared": "384"}
# Models of up to 124M parameters; the constants of the plan were chosen on these, ...
CHOSEN_ON = [
    ("q", {}),
    ("q", {"train.remat": "full"}),
    ("q", {"train.remat": "dots"}),
    ("q", {"train.stack": "unroll"}),
    ("q", {"train.microbatches": "4"}),
    ("q", {"mesh.fsdp": "4"}),
    ("q", {"mesh.data": "2", "mesh.tensor": "2"}),
    ("m", {}),
    ("m", {"train.remat": "full"}),
    ("m", {"train.remat": "dots", "loss.chunk": "512"}),
    ("m", {"mesh.fsdp": "2", "mesh.tensor": "2", "train.remat": "full"}),
    ("g", {}),
    ("g", {"train.remat": "full", "train.microbatches": "2"}),
    ("b", {"train.remat": "full", "loss.chunk": "512"}),
    # Experts, for which the padded operands of dropless ones were counted.
    ("e", {}),
    ("e", {"train.remat": "full"}),
    ("e", {"train.remat": "dots"}),
    ("e", {"model.capacity": "1.25"}),
    ("e", {"model.capacity": "1.25", "train.remat": "full"}),
    ("e", {"mesh.expert": "4"}),
    ("e", {"mesh.expert": "4", "model.capacity": "1.25"}),
    ("e", {"mesh.expert": "2", "mesh.tensor": "2", "train.remat": "full"}),
    ("f", MANY | {"train.remat": "full", "loss.chunk": "512"}),
    ("f", MANY | {"precision.compute": "bfloat16"}),
    ("f", MANY | {"model.capacity": "2.0"}),
    ("f", MANY | {"train.microbatches": "2", "train.remat": "full"}),
]
# ... and never seen these.
NEVER_SEEN = [
    ("h", {}),
    ("h", {"train.remat": "dots"}),
    ("h", {"train.remat": "full/none"}),
    ("h", {"train.microbatches": "2", "loss.chunk": "256"}),
    ("h", {"mesh.data": "2", "mesh.fsdp": "2"}),
    ("k", {"precision.compute": "bfloat16"}),
    ("k", {"train.remat": "save:attention_out,mlp_out"}),
    ("k", {"optim.name": "adafactor", "train.remat": "full"}),
    ("k", {"optim.name": "schedule_free", "train.remat": "full"}),
    ("k", {"mesh.tensor": "2", "mesh.fsdp": "2"}),
    ("w", {"train.attention": "reference"}),
    ("w", {"train.remat": "full", "loss.chunk": "1024", "optim.name": "muon"}),
    ("w", {"mesh.fsdp": "4", "train.remat": "dots"}),
    ("z", {"train.remat": "full", "loss.chunk": "512"}),
    ("z", {"train.remat": "dots"}),
    ("q", STAGES),
    ("q", CIRCULAR),
    ("q", CIRCULAR | {"train.remat": "full"}),
    # The gradient of sampled labels comes after the other one, and has its memory.
    ("m", {"optim.name": "sophia"}),
    ("g", {"optim.name": "sophia", "mesh.tensor": "4"}),
    ("g", {"optim.name": "sophia", "mesh.tensor": "4", "loss.chunk": "512"}),
    ("m", {"optim.name": "adamw8bit", "mesh.tensor": "2", "mesh.fsdp": "2"}),
    ("s", SHARED | {"train.remat": "full"}),
    ("s", SHARED | {"mesh.expert": "2", "mesh.fsdp": "2"}),
    ("s", SHARED | {"model.capacity": "1.5"}),
    # Encoders with decoders, for which no constant was chosen.
    ("t", PAIRED),
    ("t", PAIRED | {"objective.name": "ul2"}),
    ("t", PAIRED | {"train.remat": "full"}),
    ("t", PAIRED | {"train.remat": "dots", "objective.rate": "0.5"}),
    ("t", PAIRED | {"mesh.fsdp": "2", "mesh.tensor": "2", "model.decoder_depth": "2"}),
    ("u", PAIRED | {"model.gated": "True", "model.tied": "False", "train.remat": "full"}),
    ("u", PAIRED | {"precision.compute": "bfloat16", "train.microbatches": "2"}),
]
PAIRS = {"data.kind": "pairs", "data.train": "pairs.jsonl", "objective.name": "preference"}
REWARD = PAIRS | {"objective.name": "reward"}
STEPS = PAIRS | {"data.kind": "steps", "objective.name": "process"}
STORED = {"objective.name": "distill", "objective.stored": "stored"}
TAUGHT = {"objective.name": "distill", "objective.teacher": "teacher"}
CHOSEN_LATER = [
    ("b", STORED),
    ("q", STORED | {"loss.chunk": "256"}),
    ("b", STORED | {"mesh.fsdp": "2", "mesh.tensor": "2"}),
    ("b", TAUGHT),
    ("q", PAIRS),
    ("q", PAIRS | {"loss.chunk": "256"}),
    ("m", PAIRS | {"mesh.fsdp": "2", "mesh.tensor": "2", "train.remat": "full"}),
    ("w", PAIRS | {"loss.chunk": "512", "objective.loss": "orpo"}),
    ("m", PAIRS | {"tune.name": "lora", "objective.reference": "adapter_off", "loss.chunk": "512"}),
    ("q", REWARD),
    ("m", REWARD | {"train.remat": "full"}),
    ("q", STEPS),
    ("b", REWARD | {"train.remat": "full"}),
    ("z", STEPS | {"train.remat": "full"}),
]
FAST = (("q", {"train.remat": "full"}), ("e", {"train.remat": "full"}))
FIELDS = ("family", "vocab", "depth", "width", "heads", "kv_heads", "hidden", "sequence", "batch")
MODELS = {
    "q": ("llama", 2048, 4, 256, 4, 2, 704, 256, 8),
    "m": ("llama", 4096, 6, 384, 6, 6, 1024, 512, 8),
    "g": ("gpt2", 8192, 6, 256, 4, None, None, 256, 16),
    "b": ("llama", 16384, 4, 512, 8, 8, 1408, 1024, 4),
    "h": ("llama", 3072, 8, 320, 5, 5, 896, 384, 4),
    "k": ("gpt2", 4096, 4, 384, 6, None, None, 512, 8),
    "w": ("llama", 6144, 3, 512, 8, 2, 1536, 768, 8),
    "l": ("llama", 4096, 6, 512, 8, 4, 1408, 256, 8),
    "z": ("gpt2", 50304, 12, 768, 12, None, None, 512, 4),
    "e": ("mixtral", 2048, 4, 256, 4, 2, 512, 256, 8),
    "f": ("mixtral", 4096, 6, 384, 6, 6, 256, 512, 4),
    "s": ("mixtral", 3072, 5, 320, 5, 5, 192, 384, 4),
    "t": ("t5", 2048, 4, 256, 4, None, None, 256, 8),
    "u": ("t5", 4096, 6, 384, 6, None, None, 512, 4),
}


def sized(name, settings):
    sizes = {
        (
            "data.sequence"
            if field == "sequence"
            else "train.batch"
            if field == "batch"
            else f"model.{field}"
        ): str(value)
        for field, value in zip(FIELDS, MODELS[name], strict=True)
        if value is not None
    }
    context = {"model.max_positions": sizes["data.sequence"]}
    return config.load(
        Run, None, list((sizes | context | {"mesh.data": "1"} | settings).items())
    ).value


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            *case,
            id=f"{case[0]} {' '.join(map('='.join, case[1].items()))}",
            marks=() if case in FAST else pytest.mark.slow,
        )
        for case in itertools.chain(CHOSEN_ON, NEVER_SEEN, CHOSEN_LATER)
    ],
)
def test_the_bytes_of_a_step_are_those_of_the_compiler_within_a_fifth(name, settings):
    run = sized(name, settings)
    devices = 4 if any(path.startswith("mesh.") for path in settings) else 1
    exact = compiled_memory(
        collectives.compile_step(run, mesh.build(run.mesh, jax.devices()[:devices]))
    )
    output = planned(run, devices).bytes_per_device
    assert output["total"] == pytest.approx(exact["total"], rel=0.2)


ON_H200 = {
    "gpt2 124M": (
        dict(family="gpt2", depth=12, width=768, heads=12, kv_heads=12, hidden=3072, vocab=50_304),
        16,
        19.19 + 1.40,
    ),
    "llama 1B": (
        dict(
            family="llama", depth=16, width=2048, heads=32, kv_heads=8, hidden=8192, vocab=128_256
        ),
        8,
        32.58 + 13.81,
    ),
}


@pytest.mark.parametrize("name", ON_H200)
def test_the_bytes_of_a_step_on_a_gpu_are_those_of_its_compiler_within_a_twentieth(name):
    """Temporary buffers and state in GiB: scripts/LOG.md, "First figures of a GPU"."""
    shape, rows, gib = ON_H200[name]
    settings = {f"model.{field}": str(value) for field, value in shape.items()} | {
        "model.max_positions": "2048",
        "model.tied": "True",
        "data.sequence": "2048",
        "train.batch": str(rows),
        "train.remat": "none",
        "loss.chunk": "None",
        "precision.compute": "bfloat16",
    }
    output = predict.forecast(load(settings), machine("h200", flag="--on=h200")).bytes_per_device
    assert output["total"] / 2**30 == pytest.approx(gib, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"train.microbatches": "4", "train.remat": "full"}, id="micro-batches"),
        *(
            pytest.param(each, marks=pytest.mark.slow, id=name)
            for name, each in {
                "one batch": {},
                "chunks": {"train.remat": "full", "loss.chunk": "64", "train.microbatches": "2"},
                "mesh": {"mesh.fsdp": "2", "mesh.tensor": "2", "train.microbatches": "2"},
                "own batch": {"eval.batch": "16"},
            }.items()
        ),
    ],
)
def test_an_evaluation_has_the_memory_that_the_plan_names_and_no_more_than_a_step(settings):
    """The vocabulary of 49,152 ids dwarfs the model, as in a small model that is fine-tuned."""
    small = {"model.vocab": "49152", "model.tied": "True", "train.batch": "16", "model.depth": "2"}
    run = load(small | settings)
    devices = 4 if "mesh.fsdp" in settings else 1
    grid = mesh.build(run.mesh, jax.devices()[:devices])
    engine = programs.without_data(run, grid, 49152)
    with jax.set_mesh(grid):
        batch = collectives.abstract_batch(run, grid)
        evaluated = engine.eval_step.lower(engine.abstract().params, batch).compile()
    forecast = planned(run, devices)
    step, state = forecast.bytes_per_device, compiled_memory(evaluated)
    exact = state["total"] + step["optimizer"]
    assert forecast.evaluation_bytes == pytest.approx(exact, rel=0.2)
    assert forecast.evaluation_bytes <= step["total"]
    compiled = compiled_memory(collectives.compile_step(run, grid))
    assert exact <= compiled["total"]


def test_a_stored_teacher_is_in_no_memory_and_costs_no_products():
    plain, stored, taught = (
        planned(sized("q", {"loss.chunk": "256"} | each)) for each in ({}, STORED, TAUGHT)
    )
    assert stored.hardware_flops == plain.hardware_flops < taught.hardware_flops
    assert stored.flops_per_token == plain.flops_per_token
    assert "teacher" not in stored.bytes_per_device
    assert not any("teacher" in line for line in stored.assumed)
    for name, size in plain.bytes_per_device.items():
        if name not in ("logits", "activations", "total"):
            assert stored.bytes_per_device[name] == size, name
    totals = [each.bytes_per_device["total"] for each in (plain, stored, taught)]
    assert totals[0] <= totals[1] < totals[2]


def test_a_reference_costs_a_pass_of_each_step_or_one_before_them():
    adapter = PAIRS | {"tune.name": "lora"}
    cached, live = (
        planned(load(adapter | {"objective.reference": each})) for each in ("start", "adapter_off")
    )
    forward = model_cost.flops_per_token(cached.decoder, 64, causal=True) / 3
    assert live.hardware_flops - cached.hardware_flops == pytest.approx(
        forward * live.run.tokens_per_step, rel=1e-9
    )
    (line,) = (each for each in cached.assumed if "reference start is not in the times" in each)
    low, high = re.search(r"(\d+\.?\d*)s to (\d+\.?\d*)s per million tokens", line).groups()
    # A forward pass costs less than a third of steps of as many tokens, and no update.
    steps = [1e6 / cached.run.tokens_per_step * each for each in cached.seconds]
    assert 0 < float(low) <= steps[0]
    assert float(low) < float(high) <= steps[1]


def test_the_mfu_of_an_adapter_leaves_out_gradients_that_its_step_does_not_compute(capsys):
    words = ["--config.model=llama3.2-1b", "--config.train.remat=none", "--on=a100"]
    words += ["--config.data.train=chat.jsonl"]
    for name in ("sft", "lora", "qlora"):
        code, answer = ask(capsys, f"--config=finetune/{name}", *words)
        assert code == 0
        low, high = answer["mfu"]
        assert 0.2 < low <= 0.25
        assert 0.5 < high <= 0.6


def test_the_flops_of_an_adapter_are_four_per_weight_of_the_base_and_six_of_its_own():
    plain, lora = planned(load({})), planned(load({"tune.name": "lora", "tune.rank": "4"}))
    leaves = list(tensors(plain.decoder))
    multiplied = model_cost.matmul_parameters(plain.decoder)
    trained, _ = cost.split(lora.run.tune, leaves)
    its = sum(each.size for each in trained)
    expected = plain.flops_per_token - 2 * multiplied + 6 * its
    assert lora.flops_per_token == pytest.approx(expected, rel=1e-12)
    head = {"tune.also": "('unembedding/weight', 'embedding/table')"}
    also = planned(load({"tune.name": "lora", "tune.rank": "4"} | head))
    table = plain.decoder.vocab * plain.decoder.width
    assert also.flops_per_token - lora.flops_per_token == pytest.approx(2 * table)


def test_an_adapter_of_experts_multiplies_a_token_in_those_that_it_chooses():
    experts = {"model.family": "mixtral", "model.experts": "8", "model.depth": "1"}
    plain, lora = planned(load(experts)), planned(load(experts | {"tune.name": "lora"}))
    (mlp,) = {block.mlp for block in plain.decoder.layers}
    trained, _ = cost.split(lora.run.tune, tensors(plain.decoder))
    its = sum(
        each.size * (mlp.top_k / mlp.experts if "experts" in each.axes else 1) for each in trained
    )
    assert its < sum(each.size for each in trained) / 2
    multiplied = model_cost.matmul_parameters(plain.decoder)
    expected = plain.flops_per_token - 2 * multiplied + 6 * its
    assert lora.flops_per_token == pytest.approx(expected, rel=1e-12)


def test_a_text_that_is_scored_has_no_logits():
    rows = {"model.vocab": "49152", "train.remat": "none"}
    scored, predicted = planned(load(rows | REWARD)), planned(load(rows))
    table = 49152 * scored.decoder.width
    assert predicted.flops_per_token - scored.flops_per_token == 6 * table
    assert predicted.hardware_flops - scored.hardware_flops == pytest.approx(
        6 * table * scored.run.tokens_per_step, rel=1e-6
    )
    assert scored.bytes_per_device["logits"] < 1e-3 * predicted.bytes_per_device["logits"]


def test_an_evaluation_of_more_rows_than_a_step_is_a_risk_with_both_sizes():
    rows = {"model.vocab": "49152", "train.microbatches": "8", "train.remat": "full"}
    plan = planned(load(rows | {"eval.batch": "64"}))
    assert plan.evaluation_bytes > plan.bytes_per_device["total"]
    assert plan.risks[0].startswith("an evaluation needs")
    assert not any("evaluation" in risk for risk in planned(load(rows)).risks)


ATTENTION = {"tune.at": "('*/attention/*',)", "train.remat": "full"}
# Of width 512 and 6 layers. With one row a layer's dequantized weights show.
QLORA = [
    {"train.remat": "full", "train.batch": "1"},
    {"train.remat": "full", "tune.base": "int8"},
    {"train.remat": "full", "precision.compute": "bfloat16"},
    {"precision.compute": "bfloat16"},
    {"train.remat": "dots"},
    {"train.remat": "full", "train.microbatches": "4"},
    {"train.remat": "full", "train.stack": "unroll"},
    {"data.sequence": "1024", "model.max_positions": "1024", "train.batch": "2"},
    {"train.remat": "full", "train.batch": "1", "model.width": "1024", "model.hidden": "2816"},
    {"train.remat": "full", "mesh.fsdp": "4"},
    {"train.remat": "full", "mesh.fsdp": "4", "tune.name": "lora"},
    {"train.remat": "dots", "tune.name": "lora"},
    {"train.remat": "dots", "precision.compute": "bfloat16"},
    {"train.remat": "dots", "tune.at": "('*/attention/*',)"},
    {"tune.name": "lora", "tune.at": "('*/attention/*',)"},
    ATTENTION,
    ATTENTION | {"tune.name": "lora"},
    ATTENTION | {"tune.name": "lora", "mesh.fsdp": "4"},
    ATTENTION | {"tune.name": "lora", "precision.compute": "bfloat16"},
    ATTENTION | {"data.sequence": "1024", "model.max_positions": "1024", "train.batch": "2"},
    {"tune.name": "lora", "model.width": "1024", "model.hidden": "2816", "train.batch": "2"},
    {"tune.name": "lora", "mesh.fsdp": "4"},
    *({"tune.name": arm, "train.remat": "full"} for arm in ("dora", "ia3", "bottleneck")),
    {
        "tune.name": "prefix",
        "train.remat": "full",
        "data.sequence": "240",
        "model.max_positions": "256",
    },
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [pytest.param(each, marks=pytest.mark.slow if each != QLORA[0] else ()) for each in QLORA],
    ids=lambda each: " ".join(map("=".join, each.items())),
)
def test_the_bytes_of_an_adapters_step_are_those_of_the_compiler_within_a_tenth(settings):
    run = sized("l", {"tune.name": "qlora"} | settings)
    devices = 4 if "mesh.fsdp" in settings else 1
    exact = compiled_memory(
        collectives.compile_step(run, mesh.build(run.mesh, jax.devices()[:devices]))
    )
    output = planned(run, devices).bytes_per_device
    held = sum(output.get(name, 0) for name in ("parameters", "optimizer", "base"))
    assert exact["arguments"] == pytest.approx(held, rel=0.005)
    assert output["total"] == pytest.approx(exact["total"], rel=0.1)


EXPERTS = {"model.family": "mixtral", "model.experts": "8", "train.stack": "unroll"}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("settings", "most"), [({}, 8.0), ({"model.capacity": "1.25"}, 1.25)], ids=["dropless", "1.25"]
)
def test_the_flops_of_experts_are_those_of_the_compiler(settings, most, monkeypatch):
    """Without tiles, as on a GPU, a dropless expert multiplies the rows of all the others."""
    monkeypatch.setattr(matmul, "FEWEST_TILED", 2**30)
    monkeypatch.setattr(model_cost, "is_dense_ragged", lambda platform: True)
    run = load(EXPERTS | {"model.depth": "1", "model.hidden": "256"} | settings)
    compiled = collectives.compile_step(run, mesh.build(run.mesh, jax.devices()[:1]))
    forecast = planned(run)
    exact, output = compiled.cost_analysis()["flops"], forecast.hardware_flops
    assert output == pytest.approx(exact, rel=0.2)
    (mlp,) = {block.mlp for block in forecast.decoder.layers}
    sizes, length = forecast.sizes, run.data.sequence
    assert model_cost.expert_flops_ratio(mlp, length, sizes, is_dense=True) == pytest.approx(
        most, rel=0.02
    )
    assert model_cost.expert_flops_ratio(mlp, length, sizes, is_dense=False) == pytest.approx(
        1.0 if mlp.capacity is None else most, rel=0.02
    )


@pytest.mark.slow
def test_dropless_experts_on_gpus_are_a_risk_with_its_numbers_and_none_on_tpus(capsys):
    """8,192 tokens of a device, gathered from 8, choose up to 6 of its 8 experts: 393,216 rows."""
    words = ("--config=configs/moe_fine.py:8gpu", "--config.model.capacity=None")
    mesh_of_8 = ("--config.mesh.expert=8", "--config.mesh.fsdp=1")
    _, on_gpus = ask(capsys, *words, *mesh_of_8, "--on=h100x8")
    (risk,) = [risk for risk in on_gpus["risks"] if "model.capacity" in risk]
    assert "all 8 experts of a device: 64 times the FLOPs" in risk
    assert 393_216 * 8 * 2048 * 2 == 12_884_901_888
    assert "12 GiB for one padded operand" in risk
    assert "--config.model.capacity=1.25" in risk
    assert on_gpus["bytes_per_device"]["activations"] > 5 * 12.9e9
    _, limited = ask(capsys, words[0], *mesh_of_8, "--on=h100x8")
    assert on_gpus["step_seconds"][0] > 20 * limited["step_seconds"][0]
    _, on_tpus = ask(capsys, *words, *mesh_of_8, "--on=v5p-16")
    assert not any("model.capacity" in risk for risk in on_tpus["risks"])
    assert on_tpus["bytes_per_device"]["activations"] < 12.9e9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "copies"),
    [
        ({}, predict.CPU_COPIES),
        pytest.param(
            {"precision.params": "bfloat16"}, 2 * predict.CPU_COPIES, marks=pytest.mark.slow
        ),
        pytest.param(
            {"precision.params": "bfloat16", "precision.moments": "bfloat16"},
            2 * (predict.CPU_COPIES + 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["float32", "bfloat16", "bfloat16, moments too"],
)
def test_a_step_overwrites_its_state_and_copies_none_of_it(dtypes, copies):
    """For a model that dwarfs its one row, only gradient, direction and update are written out.

    In float32, moments that are kept in bfloat16 are written out too.
    """
    small = {"model.width": "256", "model.hidden": "768", "model.vocab": "4096"}
    rows = {"data.sequence": "16", "train.batch": "1", "log.every": "10"}
    run = load(small | rows | dtypes)
    exact = compiled_memory(collectives.compile_step(run, mesh.build(run.mesh, jax.devices()[:1])))
    output = planned(run).bytes_per_device
    assert exact["temporary"] == pytest.approx(copies * output["parameters"], rel=0.03)
    assert exact["total"] == pytest.approx(output["total"], rel=0.03)


def test_the_plan_answers_in_two_seconds_without_jax(tmp_path):
    code = (
        "import sys\nfrom jaxlm.cli.main import main\n"
        "assert main(['plan', '--config=configs/llama_8b.py:v5p-128', '--on=v5p-128', '--json']) "
        "== 0\n"
        "print('jax' in sys.modules, file=sys.stderr)"
    )
    begun = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["False"]
    answer = json.loads(done.stdout)
    assert answer["fits"] is True
    assert answer["devices"] == 64
    assert answer["parameters"] == 8_030_261_248
    assert set(answer["bytes_per_device"]) >= {"parameters", "optimizer", "activations", "total"}
    low, high = answer["step_seconds"]
    assert 0 < low < high
    assert answer["tokens_per_second"][0] < answer["tokens_per_second"][1]
    assert 0 < answer["mfu"][0] < answer["mfu"][1] < 1
    assert answer["flops_per_token"] > 6 * 7.5e9
    ended = os.times()
    assert (
        ended.children_user + ended.children_system
        < 2 + begun.children_user + begun.children_system
    )


def ask(capsys, *words):
    code = main(["plan", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_an_encoder_decoder_is_planned_by_its_published_parameters_and_all_that_it_computes(capsys):
    words = (
        "--config=configs/quickstart.py",
        "--config.model=t5-v1.1-base",
        "--config.objective.name=span",
        "--config.train.batch=64",
    )
    flags = (*words, "--config.data.sequence=512", "--config.train.remat=full", "--on=h100x8")
    code, answer = ask(capsys, *flags)
    assert (code, answer["fits"], answer["devices"]) == (0, True, 8)
    assert answer["parameters"] == 247_577_856
    # 512 tokens are read for 120 or so that are written, and only those meet the unembedding.
    sides = 2 * 12 * (4 * 768**2 + 3 * 768 * 2048)
    assert 6 * sides / 2 < answer["flops_per_token"] < 6 * sides
    # Of UL2's denoisers one writes half of a row in spans of three: 352 slots, where those of T5
    # are 112.
    code, denoised = ask(capsys, *flags, "--config.objective.name=ul2")
    assert code == 0
    logits = [each["bytes_per_device"]["logits"] for each in (answer, denoised)]
    assert logits[1] / logits[0] == pytest.approx(352 / 112)
    mesh = ("--config.mesh.data=1", "--config.mesh.tensor=2", "--config.mesh.fsdp=4")
    code, split = ask(capsys, *flags, *mesh)
    assert code == 0
    assert set(split["sent_bytes_per_device"]) == {"tensor", "fsdp"}
    assert split["bytes_per_device"]["parameters"] < answer["bytes_per_device"]["parameters"] / 7


def test_a_gpu_that_is_not_in_the_table_is_planned_by_its_memory_without_times(capsys):
    words = ("--config=configs/gpt2_124m.py", "--on=rtx4080", "--price=1")
    assert main(["plan", *words]) == 2
    fix = capsys.readouterr().err.partition("fix")[2]
    pasted = shlex.split(fix, comments=True)
    assert pasted == ["--on=rtx4080", "--memory=24GB"]
    for memory, fits in (("16GB", False), ("80GB", True)):
        code, answer = ask(capsys, *words, f"--memory={memory}")
        assert (code, answer["fits"], answer["on"]) == (0, fits, "rtx4080")
        assert answer["memory_bytes"] == 0.75e9 * int(memory[:2])
        assert {
            answer[name] for name in ("step_seconds", "tokens_per_second", "mfu", "hours", "cost")
        } == {None}
        # The same bytes as on a known GPU without a fused attention kernel.
        assert (
            answer["bytes_per_device"] == ask(capsys, *words[:1], "--on=t4")[1]["bytes_per_device"]
        )
        assert main(["plan", *words, f"--memory={memory}"]) == 0
        assert "no figures for this chip" in capsys.readouterr().out
    code, plan = ask(capsys, *words, "--memory=16GB", "--fit")
    assert plan["fits"]
    assert plan["step_seconds"] is None


def test_a_budget_has_no_days_on_a_gpu_of_unknown_speed(capsys):
    assert main(["scale", "--budget=1e20", "--on=rtx4080", "--memory=16GB"]) == 0
    assert "rtx4080: days unknown" in capsys.readouterr().out


def test_what_fsdp_sends_is_by_what_it_splits(capsys):
    """Four micro-batches send weights once under ZeRO 1 and 2, and gradients twice and once."""
    words = ("--config=configs/quickstart.py", "--on=h100x8", "--config.train.microbatches=4")
    words += ("--config.train.batch=64", "--config.mesh.data=1", "--config.mesh.fsdp=8")
    sent = {}
    for zero in (1, 2, 3):
        code, answer = ask(capsys, *words, f"--config.mesh.zero={zero}")
        assert code == 0
        sent[zero] = answer["sent_bytes_per_device"]["fsdp"]
    assert sent[1] / sent[2] == pytest.approx((1 + 2 * 4) / (1 + 4))
    assert sent[3] > 2 * sent[2]


def test_the_fastest_that_fits_is_found_and_fits(capsys):
    words = ["--config=configs/llama_1b.py", "--on=h100x8"]
    code, plain = ask(capsys, *words)
    assert code == 0
    code, plan = ask(capsys, *words, "--fit")
    assert code == 0
    assert plan["fits"]
    assert plan["fit"]["tried"] > plan["fit"]["fitting"] > 0
    assert not plain["fits"] or sum(plan["step_seconds"]) <= sum(plain["step_seconds"])
    code, pasted = ask(capsys, *words, *plan["fit"]["flags"].split())
    assert pasted["bytes_per_device"] == plan["bytes_per_device"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "words", "flags"),
    [
        # What this machine takes with other settings, more of the chips, chips in place of a CPU, a
        # smaller model.
        ("llama_1b.py", "--on=h100", r"--config\.mesh\.fsdp=1 --config\.train\.microbatches="),
        ("llama_70b.py", "--on=t4 --fit", r"--on=t4x\d+ --config\.mesh\."),
        ("finetune/qlora.py", "--on=rtx4090 --config.model=llama3-8b", r"--config\.mesh\.data=1 "),
        ("finetune/lora.py", "--on=rtx4090 --config.model=llama3-8b", r"--on=rtx4090x\d+ "),
        ("llama_70b.py", "--on=v5e-64", r"--on=v5e-\d+ "),
        ("llama_8b.py", "--on=v4", r"--on=v5p-\d+ "),
        ("llama_8b.py", "--on=cpu", r"--on=h100x\d+ "),
        ("llama_8b.py", "--on=l4 --config.model.width=65536", r"--config\.model\.\w+=\d+ "),
    ],
)
def test_what_does_not_fit_is_answered_with_the_nearest_that_does(config, words, flags, capsys):
    asked = [f"--config=configs/{config}", *words.split()]
    asked += ["--config.data.train=chat.jsonl"] if config.startswith("finetune") else []
    code, answer = ask(capsys, *asked)
    assert code == 0
    assert answer["fits"] is False
    assert answer.get("fit", {"fitting": 0})["fitting"] == 0
    nearest = answer["nearest"]
    assert re.match(flags, nearest["flags"])
    plain = [word for word in asked if word != "--fit"]
    code, pasted = ask(capsys, *plain, *nearest["flags"].split())
    assert code == 0
    assert pasted["fits"]
    assert "nearest" not in pasted
    assert pasted["bytes_per_device"]["total"] == nearest["bytes_per_device"]
    assert pasted["step_seconds"] == nearest["step_seconds"]


def test_a_search_without_a_fit_is_reported(capsys):
    words = ["--config=configs/llama_8b.py", "--on=t4", f"--config.model.vocab={2**40}"]
    assert main(["plan", *words]) == 0
    assert "nearest    none: no share of depth" in capsys.readouterr().out


def test_each_row_of_a_plan_has_a_label_of_its_own(capsys):
    assert main(["plan", "--config=configs/gpt2_124m.py", "--on=h200"]) == 0
    labels = [line[:11].strip() for line in capsys.readouterr().out.splitlines()]
    assert labels[:5] == ["on", "model", "memory", "parts", "evaluation"]
    named = [label for label in labels if label]
    assert len(named) == len(set(named))


def test_few_tokens_per_parameter_are_a_risk_of_pretraining_alone(capsys, tmp_path):
    def has_risk(*words):
        _, answer = ask(capsys, "--on=h100", "--config.train.steps=500", *words)
        return any("per parameter" in each for each in answer["risks"])

    (tmp_path / "config.json").write_text(json.dumps(config.to_json(load({}))))
    (tmp_path / "checkpoints").mkdir()
    pretraining = "--config=configs/llama_1b.py"
    assert has_risk(pretraining)
    assert not has_risk(pretraining, f"--init_from={tmp_path}")
    assert not has_risk(pretraining, "--config.tune.name=lora")
    for name in ("finetune/sft", "finetune/lora", "preference/dpo", "preference/reward"):
        words = [f"--config={name}", "--config.model=llama3.2-1b"]
        assert not has_risk(*words, "--config.data.train=chat.jsonl"), name


@pytest.mark.parametrize("words", ["--serve --workdir={}", "--init_from={}", "--init_from={}@5"])
def test_a_plan_that_names_a_run_without_a_config_proposes_that_run(words, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config.to_json(load({}))))
    (tmp_path / "checkpoints").mkdir()
    words = ["plan", "--on=cpu", *words.format(tmp_path).split()]
    assert main(words) == 2
    fix = f"--config={tmp_path}"
    assert capsys.readouterr().err.endswith(f"  fix    {fix}\n")
    has_step = words[-1].endswith("@5")
    assert main([*words, fix]) == (66 if has_step else 0)
    assert ("the run has no checkpoint of step 5" in capsys.readouterr().err) == has_step


def test_the_cost_of_a_small_run_is_not_rounded_to_nothing(capsys):
    assert main(["plan", "--config=quickstart", "--on=h100", "--price=2.5"]) == 0
    (line,) = re.findall(r"^cost +(\S+) to (\S+)$", capsys.readouterr().out, re.MULTILINE)
    low, high = map(float, line)
    assert 0 < low < high < 1


def test_a_price_makes_a_cost_and_a_cpu_has_no_mfu(capsys):
    _, answer = ask(capsys, "--config=configs/gpt2_124m.py", "--on=h200", "--price=3")
    assert answer["cost"] == pytest.approx([3 * hours for hours in answer["hours"]])
    _, answer = ask(capsys, "--config=configs/quickstart.py", "--on=cpu")
    assert answer["cost"] is None
    assert answer["mfu"] is None
    assert any("this CPU measured" in line for line in answer["assumed"])
    assert any("vocabulary of 2,048" in line for line in answer["assumed"])


def test_the_ids_of_a_tokenizer_that_is_there_are_counted_and_not_assumed(tmp_path, capsys):
    (tmp_path / "tokenizer").write_bytes(Bytes().serialize())
    words = ["--config=configs/quickstart.py", "--on=cpu", "--config.data.tokenizer"]
    plans = [
        ask(capsys, *words[:2], f"{words[2]}={each}")[1]
        for each in ("bytes", f"{tmp_path}/tokenizer")
    ]
    assert plans[0]["parameters"] == plans[1]["parameters"]
    assert [any("a vocabulary of" in line for line in each["assumed"]) for each in plans] == [
        True,
        False,
    ]


def test_rounded_products_take_less_time_where_the_chip_has_a_unit_for_them_and_a_risk_where_not():
    settings = {
        "model.width": "2048",
        "model.hidden": "8192",
        "model.depth": "16",
        "train.batch": "256",
        "precision.compute": "bfloat16",
    }
    whole, rounded = (
        predict.forecast(
            load(settings | {"precision.products": products}), machine("h100", flag="--on")
        )
        for products in ("compute", "fp8")
    )
    # Almost all of its products are of projections, at twice the peak.
    assert 0.5 < rounded.seconds[1] / whole.seconds[1] < 0.65
    assert not any("fp8" in risk for risk in rounded.risks)
    assert rounded.peak_flops == whole.peak_flops, "MFU keeps its peak"
    old = predict.forecast(
        load(settings | {"precision.products": "fp8"}), machine("a100", flag="--on")
    )
    assert any("a100 has no unit for fp8" in risk for risk in old.risks)
    turing = predict.forecast(load(settings | {"mesh.data": "16"}), machine("t4x16", flag="--on"))
    assert "t4 has no bfloat16: --config.precision.compute=float16" in turing.risks
    assert "links between hosts are as fast as those within a host of 8" in turing.assumed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on=h101x8"], "no machine 'h101x8'"),
        (["--on=cpu", "--price=0"], "a price of 0"),
        (["--on=h100x8", "--devices=8"], "contains the number of devices"),
        (["--on=h200", "--exact"], "GPU of another machine"),
    ],
)
def test_words_that_make_no_sense_are_refused_with_a_fix(words, message, capsys):
    assert main(["plan", "--config=configs/quickstart.py", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_is_refused_with_those_that_do(capsys):
    words = ["--config=configs/quickstart.py", "--config.mesh.tensor=3"]
    assert main(["plan", *words, "--on=h100x8"]) == 2
    assert "--config.mesh.tensor=" in capsys.readouterr().err


@pytest.mark.slow
def test_the_compiler_s_account_is_shown_beside_the_plan():
    overrides = [f"--config.{path}={value}" for path, value in (SMALL | {"mesh.data": "2"}).items()]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxlm",
            "plan",
            "--config=configs/quickstart.py",
            *overrides,
            "--devices=2",
            "--exact",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    exact, output = answer["compiled_bytes_per_device"], answer["bytes_per_device"]
    assert exact["arguments"] == pytest.approx(output["parameters"] + output["optimizer"], rel=0.05)


@pytest.mark.slow
def test_every_candidate_of_a_search_can_be_laid_out():
    run = load({"mesh.data": "auto", "train.batch": "16"})
    on = machine("h100x8", flag="--on")
    candidates = search.search(run, on, [])
    assert candidates.best
    assert candidates.best.sizes == candidates.best.run.mesh.sizes(8)
    with pytest.raises(ConfigError):
        search.search(load({"train.batch": "7"}), on, [])


def test_a_step_of_a_small_model_takes_as_long_as_its_kernels_and_not_as_its_products(capsys):
    words = ("--config=quickstart", "--config.model.depth=8", "--on=h100")
    _, small = ask(capsys, *words)
    low, high = small["step_seconds"]
    assert low >= 8 * 100 * 2e-6  # kernels of its layers
    assert high < 0.02
    assert any("kernels a step" in each for each in small["assumed"])
    _, large = ask(capsys, "--config=llama_8b:8gpu", "--on=h100x8")
    assert not any("kernels a step" in each for each in large["assumed"])
