"""Steps compiled for TPU slices that are not there."""

import importlib.util
import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxlm.cli import check
from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.monitor.chips import SLICES, machine
from jaxlm.parallel import hlo, mesh
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.plan.predict import forecast

HAS_COMPILER = importlib.util.find_spec("libtpu") is not None
WHY = "libtpu (586 MB) is not installed: pip install 'jaxlm[tpu]' in an environment of its own"


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """A program for chips that are not there can be written to the cache, but not be read again."""
    before = jax.config.jax_enable_compilation_cache
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def test_slices_have_the_chips_of_their_shape():
    assert SLICES["v5e-16"].topology == "v5e:4x4"
    assert (SLICES["v5p-128"].topology, SLICES["v5p-128"].devices) == ("v5p:4x4x4", 64)
    assert SLICES["v6e-256"].devices == 256


def test_an_unknown_slice_is_refused_with_those_there_are(capsys):
    assert main(["check", "--config=configs/llama_8b.py:v5e-16", "--topology=v9", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "v5e-16" in error["why"]


def test_a_config_that_does_not_fit_the_slice_is_refused(capsys):
    words = ["check", "--config=configs/llama_8b.py:v5e-16", "--topology=v5p-128", "--json"]
    assert main(words) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "64 are available" in error["why"]


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler is installed")
def test_a_missing_compiler_is_reported(capsys):
    words = ["check", "--config=configs/llama_8b.py:v5e-16", "--topology=v5e-16", "--json"]
    assert main(words) == 2
    assert "compiler for TPUs" in json.loads(capsys.readouterr().out)["error"]["what"]


# Of each chip in a step: scripts/LOG.md, "What do parts of the loss cost on a slice of TPUs?"
SENT_GIB = {
    "gpt2_124m:v5e-16": 0.869,
    "gpt2_1p5b:v5e-16": 175.8,
    "llama_1b:v5e-16": 177.2,
    "llama_1b:v6e-256": 15.65,
    "llama_8b:v5e-16": 8197.0,
    "llama_8b:v5p-128": 287.8,
    "mixtral_8x7b:v5p-128": 1738.0,
    "moe_fine:v5p-128": 597.1,
}
# TFLOP of each chip in a step, and the bound of MFU; kernels of experts are not counted.
FLOPS = {
    "gpt2_124m:v5e-16": (29.39, 0.863),
    "gpt2_1p5b:v5e-16": (835.9, 0.662),
    "llama_1b:v5e-16": (546.4, 0.776),
    "llama_1b:v6e-256": (34.15, 0.440),
    "llama_8b:v5e-16": (16219.0, 0.541),
    "llama_8b:v5p-128": (4123.7, 0.725),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not HAS_COMPILER, reason=WHY)
@pytest.mark.parametrize(
    ("shipped", "name", "axes"),
    [
        ("llama_1b", "v5e-16", {"fsdp"}),
        ("llama_8b", "v5p-128", {"fsdp"}),
        ("llama_1b", "v6e-256", {"fsdp"}),
        ("llama_8b", "v5e-16", {"fsdp", "tensor"}),
        ("moe_fine", "v5p-128", {"fsdp", "expert"}),
        ("gpt2_124m", "v5e-16", {"data"}),
        ("gpt2_1p5b", "v5e-16", {"fsdp"}),
        ("llama_70b", "v5p-128", {"fsdp", "tensor"}),
        ("mixtral_8x7b", "v5p-128", {"fsdp", "expert"}),
    ],
)
def test_a_shipped_config_compiles_for_its_slice_and_fits(capsys, shipped, name, axes):
    words = ["check", f"--config=configs/{shipped}.py:{name}", f"--topology={name}", "--json"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"] == SLICES[name].devices
    assert 0 < plan["bytes_per_device"]["total"] < plan["hbm_bytes"]
    assert {axis for each in plan["collectives"] for axis in each["axes"]} >= axes
    sent = sum(each["sent_bytes"] for each in plan["collectives"])
    assert sent / 2**30 == pytest.approx(SENT_GIB.get(f"{shipped}:{name}", sent / 2**30), rel=0.05)
    assert all(0 <= each["overlapped_bytes"] <= each["sent_bytes"] for each in plan["collectives"])
    assert plan["exposed_seconds"] > 0
    bound = plan["roofline"]
    assert (bound["mfu"] is None) == (bound["unknown_products"] > 0)
    assert bound["mfu"] is None or 0 < bound["mfu"] < 1
    if expected := FLOPS.get(f"{shipped}:{name}"):
        assert (bound["flops_per_device"] / 1e12, bound["mfu"]) == pytest.approx(expected, rel=0.02)
        assert bound["unknown_products"] == 0


def test_the_roofline_is_products_at_the_peak_and_the_communication_that_nothing_hides():
    settings = SMALL | {"mesh.data": "2", "mesh.fsdp": "2", "mesh.tensor": "1"}
    run = config.load(Run, None, list(settings.items())).value
    plan = forecast(run, SLICES["v5e-4"])
    flops = hlo.ProgramFlops(products=1.5e12, attention=0.47e12, unknown=0)
    bound = collectives._roofline(plan, flops, 0.01)
    assert bound["seconds"] == pytest.approx(1.97e12 / 197e12 + 0.01)
    model = plan.flops_per_token * 8 * 512 / 4
    assert bound["mfu"] == pytest.approx(model / (197e12 * 0.02))
    lines = check._roofline(bound)
    assert "1.97 TFLOP a chip" in lines[0]
    assert "20.0ms a step" in lines[1]
    bound = collectives._roofline(plan, flops._replace(unknown=2), 0.01)
    assert bound["mfu"] is None
    assert check._roofline(bound)[1].startswith("  2 products")
    assert len(check._roofline(bound)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_flops_of_a_compiled_step_are_those_of_the_plan(remat):
    """On a CPU, whose products are all in the text; attention multiplies whole rows there."""
    settings = SMALL | {
        "train.attention": "reference",
        "train.remat": remat,
        "precision.compute": "float32",
        "mesh.fsdp": "1",
        "mesh.tensor": "1",
        "data.sequence": "64",
    }
    run = config.load(Run, None, list(settings.items())).value
    grid = mesh.build(run.mesh, jax.devices()[:1])
    flops = hlo.read_flops(collectives.compile_step(run, grid).as_text())
    plan = forecast(run, machine("a100", flag="--on"))
    assert flops.unknown == 0
    assert flops.total / plan.hardware_flops == pytest.approx(1, abs=0.1)


SMALL = {
    "model.vocab": "512",
    "model.depth": "2",
    "model.width": "256",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.head_dim": "64",
    "model.hidden": "512",
    "data.sequence": "512",
    "train.batch": "8",
    "precision.compute": "bfloat16",
    "mesh.data": "1",
    "mesh.fsdp": "2",
    "mesh.tensor": "2",
}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason=WHY)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("v5e-4", "auto"), ("v5p-8", "splash"), ("v6e-4", "splash"), ("v5e-4", "blockwise")],
)
def test_a_step_for_tpus_has_splash_attention_forward_and_back(name, kernel):
    """One kernel forward and two backward, each of a device's rows and heads; others have none."""
    settings = SMALL | {"train.attention": kernel}
    run = config.load(Run, None, list(settings.items())).value
    grid = mesh.build(run.mesh, collectives.devices_of(SLICES[name]))
    text = collectives.compile_step(run, grid).as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(calls) == (0 if kernel == "blockwise" else 3)
    for line in calls:
        assert "bf16[4,2,512,64]" in line, "queries of 4 of 8 rows and 2 of 4 heads"
        assert "bf16[4,1,512,64]" in line, "keys of 1 of 2 heads"
