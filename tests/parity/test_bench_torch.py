"""scripts/bench_torch.py runs on a CPU, with the models that it names."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/bench_torch.py"

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", autouse=True)
def compiled_by_torch(tmp_path_factory):
    """Keep the results of torch.compile with those of XLA, and its headers with temporary files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache/inductor"))
        folder = str(tmp_path_factory.mktemp("torch"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="module")
def scripts():
    """The modules of the scripts' folder, by the names under which they know each other."""
    modules = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bench_sizes", "torch_arms"):
            spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
            modules[name] = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, modules[name])
            spec.loader.exec_module(modules[name])
        yield modules


def fused(family, theirs):
    """Hugging Face's weights under the minimal model's names."""
    import torch

    weights = {}
    for name, value in theirs.items():
        if family == "gpt2" and name.endswith("weight") and (".c_" in name):
            value = value.T  # theirs are [in, out]
        weights[name] = value
    if family == "gpt2":
        names = {
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
        }
        layer, parts = (
            "transformer.h.{i}",
            {
                "norm": ("ln_1",),
                "attention.qkv": ("attn.c_attn",),
                "attention.out": ("attn.c_proj",),
                "mlp_norm": ("ln_2",),
                "up": ("mlp.c_fc",),
                "down": ("mlp.c_proj",),
            },
        )
    else:
        names = {"embedding": "model.embed_tokens", "norm": "model.norm"}
        layer, parts = (
            "model.layers.{i}",
            {
                "norm": ("input_layernorm",),
                "attention.qkv": tuple(f"self_attn.{each}_proj" for each in "qkv"),
                "attention.out": ("self_attn.o_proj",),
                "mlp_norm": ("post_attention_layernorm",),
                "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
                "down": ("mlp.down_proj",),
            },
        )

    def of(kind, *prefixes):
        return torch.cat([weights[f"{prefix}.{kind}"] for prefix in prefixes])

    def told(ours):
        path, _, kind = ours.rpartition(".")
        if path in names:
            return of(kind, names[path])
        _, number, part = path.split(".", 2)
        return of(kind, *(f"{layer.format(i=number)}.{each}" for each in parts[part]))

    return told


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_the_minimal_model_is_that_of_hugging_face(scripts, name):
    import torch

    sizes, arms = scripts["bench_sizes"], scripts["torch_arms"]
    size = sizes.SIZES[name]
    torch.manual_seed(0)
    theirs, ours = arms.HuggingFace(size).double(), arms.minimal(size).double()
    for parameter in theirs.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.3)
    loaded = fused(size.family, dict(theirs.model.state_dict()))
    ours.load_state_dict({key: loaded(key) for key in ours.state_dict()})
    ids = torch.from_numpy(sizes.batch(size)[0]).long()
    # Hugging Face's norms compute in float32 for every input.
    torch.testing.assert_close(ours(ids), theirs(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["124M", "gpt2-124M@2048", "llama-1B@2048", "llama-1B@8192"])
def test_all_sides_have_the_same_number_of_parameters(scripts, name):
    import torch

    sizes, arms = scripts["bench_sizes"], scripts["torch_arms"]
    size = sizes.SIZES[name]
    parameters, _ = sizes.costs(size)
    with torch.device("meta"):
        models = arms.minimal(size), arms.HuggingFace(size)
    assert {sum(p.numel() for p in model.parameters()) for model in models} == {parameters}
    if name.startswith("llama"):
        assert parameters == 1_235_814_400  # that of the published checkpoint


def bench(*words, **variables):
    clean = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    quick = {"JAX_NUMPY_RANK_PROMOTION": "allow", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        env=clean | quick | variables,
        timeout=1190,
    )


@pytest.mark.timeout(1200)  # torch.compile calls a C++ compiler for every kernel
@pytest.mark.parametrize("rival", ["torch", "transformers"])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_all_arms_start_at_the_same_loss_and_are_told(scripts, tmp_path, name, rival):
    arms = [f"{side} bfloat16" for side in ("jaxlm", f"{rival} eager", f"{rival} compiled")]
    out = tmp_path / "out.json"
    words = (f"--size={name}", f"--arms={','.join(arms)}", "--alone", f"--out={out}")
    done = bench(*words, "--rounds=1", "--steps=2", "--config.train.remat=dots")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["settings"]["train.remat"] == "dots"
    assert (row["parameters"], row["flops_per_token"]) == scripts["bench_sizes"].costs(
        scripts["bench_sizes"].SIZES[name]
    )
    assert list(row["arms"]) == arms
    best = 0.0
    for arm, result in row["arms"].items():
        assert result["loss_nats"] == pytest.approx(math.log(128), abs=0.1)
        speed = result["tokens_per_second"]
        assert 0 < speed["least"] <= speed["median"] <= speed["most"]
        assert result["windows"] == 3
        assert (result["mfu"], result["peak_bytes"], result["error"]) == (None, None, None)
        assert result["library"].startswith("jax " if arm.startswith("jaxlm") else "torch ")
        best = max(best, 0.0 if arm.startswith("jaxlm") else speed["median"])
    assert row["ratio"] == row["arms"]["jaxlm bfloat16"]["tokens_per_second"]["median"] / best
    head, rule, *cells = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in (head, rule, *cells)} == {8}
    assert [line.split(" | ")[1] for line in cells] == arms


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "words",
    [
        ("--size=0.8M", "--rounds=3", "--seconds=2"),
        ("--size=124M", "--rounds=2", "--steps=2", "--config.train.stack=unroll"),
    ],
)
def test_a_step_on_a_cpu_is_as_fast_as_the_best_of_pytorch(words):
    """The better dtype of each side, at real size; on an idle machine, as tests run in turn."""
    done = bench(*words, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert len(row["arms"]) == 8
    assert row["ratio"] >= 1, row["arms"]


def test_arms_live_together_and_one_that_cannot_start_does_not_end_the_others():
    arms = "jaxlm float32,torch eager float32"
    words = ("--size=gpt2-tiny", f"--arms={arms}", "--rounds=2", "--steps=2", "--json")
    done = bench(*words, XLA_FLAGS="--no_such_flag")
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    ours, theirs = row["arms"].values()
    assert ours["error"].startswith("exit code ")
    assert (ours["tokens_per_second"], row["ratio"]) == (None, None)
    assert (theirs["error"], theirs["windows"], theirs["ratio"]) == (None, 2, 1.0)


def test_a_wrong_setting_is_said_before_anything_starts():
    done = bench("--size=gpt2-tiny", "--config.train.microbatches=3")
    assert done.returncode == 2
    assert "batch = 4 rows does not divide by 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_does_not_fit_the_time_is_said():
    arms = "torch eager float32,torch eager bfloat16"
    words = ("--size=gpt2-tiny", f"--arms={arms}", "--alone", "--json")
    done = bench(*words, "--minutes=0.001")
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    errors = {result["error"] for result in row["arms"].values()}
    assert errors == {"not measured: the time was up"}


def test_the_steps_of_jaxlm_are_traced(tmp_path):
    done = bench("--size=llama-tiny", f"--profile={tmp_path}", "--steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama-tiny: 2 steps, ")
    assert "% matmul" in done.stdout
    assert list((tmp_path / "llama-tiny").rglob("*.trace.json.gz"))


@pytest.mark.timeout(600)
def test_whole_runs_of_both_sides_are_timed_on_the_same_text(tmp_path):
    """Both commands of scripts/bench_runs.py train, log, save and end."""
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(SCRIPT.read_text() * 4)
    words = [f"--text={text}", "--size=gpt2-tiny", "--steps=30", "--rounds=1", f"--out={out}"]
    arms = ["jaxlm float32", "torch eager float32"]
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT.with_name("bench_runs.py")),
            *words,
            f"--arms={','.join(arms)}",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(out.read_text())
    assert list(answer["arms"]) == arms
    for figures in answer["arms"].values():
        assert figures["command"]["rounds"] == figures["loop"]["rounds"] == 1
        assert 0 < figures["command"]["median"] < figures["loop"]["median"]
        assert 3 < figures["loss_nats"] < math.log(128)
    assert {each["verdict"] for each in answer["verdicts"]} == {"undecided"}
    assert done.stdout.startswith("| arm |")
