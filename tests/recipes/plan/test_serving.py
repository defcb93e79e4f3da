"""The plan of a server: its memory is that of the engine's arrays."""

import json

import jax
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.generate import slots
from jaxlm.models.config import EncoderDecoderConfig
from jaxlm.monitor import chips, host_machine
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.serving import forecast_serving

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = {"model.vocab": 320, "model.width": 64, "model.depth": 2, "model.heads": 4}
SMALL |= {"model.kv_heads": 2, "model.hidden": 128, "data.sequence": 128}


def run_of(**more):
    settings = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    return config.load(Run, None, [(name, str(value)) for name, value in settings.items()]).value


def bytes_of(shapes):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(("compute", "is_int8"), [("bfloat16", False), ("float32", True)])
def test_the_bytes_of_the_plan_are_those_of_the_engine(compute, is_int8):
    run = run_of(precision__compute=compute)
    machine = host_machine.this_machine(1, [])
    plan = forecast_serving(run, machine, slots=4, context=128, is_int8=is_int8)
    model = setup.build_sharded_model(run, 320, setup.build_mesh_for(run)).blueprint
    params = jax.jit(model.init)(jax.random.key(0))
    sizes = {"rows": 4, "length": 128, "chunk": 64, "is_int8": is_int8}
    programs = slots.build(model.merge, params, **sizes)
    weights = bytes_of(params) + bytes_of(jax.eval_shape(programs.prepare, params))
    assert plan.weights_bytes == pytest.approx(weights, rel=0.02)
    logits = 3 * 4 * 320
    held = bytes_of(programs.empty())
    assert 4 * (plan.slot_bytes - logits) == pytest.approx(held, rel=0.01)
    assert plan.total_bytes == plan.weights_bytes + 4 * plan.slot_bytes


def test_the_most_slots_fit_and_one_more_does_not():
    run, machine = run_of(precision__compute="bfloat16"), chips.machine("t4", flag="--on")
    most = forecast_serving(run, machine, slots=1, context=4096).most_slots
    assert most > 1000
    assert forecast_serving(run, machine, slots=most, context=4096).fits
    assert not forecast_serving(run, machine, slots=most + 1, context=4096).fits
    longer = forecast_serving(run, machine, slots=1, context=8192).most_slots
    assert longer == pytest.approx(most / 2, rel=0.05)
    half = forecast_serving(run, machine, slots=1, context=4096, is_int8=True)
    assert half.most_slots > 1.4 * most


def test_what_no_engine_serves_is_refused():
    with pytest.raises(ConfigError, match="one device") as caught:
        forecast_serving(run_of(), chips.machine("h100x8", flag="--on"), slots=8)
    assert caught.value.fix == "--on=h100"
    settings = [("model.family", "t5"), ("objective.name", "span"), ("model.vocab", "320")]
    t5 = config.load(Run, None, settings).value
    assert isinstance(t5.decoder(320), EncoderDecoderConfig)
    with pytest.raises(ConfigError, match="does not serve"):
        forecast_serving(t5, chips.machine("h100", flag="--on"), slots=8)


def test_the_command_prints_slots_memory_and_speed(capsys):
    words = ["plan", "--config=llama3-8b", "--serve", "--on=h200", "--context=8192"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"]
    assert answer["slot_bytes"] == pytest.approx(2 * 2**30, rel=0.01)  # float32 by default
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"{answer['most_slots']} slots of this context" in text
    assert "jaxlm serve --workdir=RUN --slots=8 --context=8192" in text
