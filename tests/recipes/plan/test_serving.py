"""The plan of a server: its memory is that of the engine's arrays."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.generate import slots
from jaxlm.generate.draft import DraftHeads, DraftModel, Lookup
from jaxlm.models.config import EncoderDecoderConfig
from jaxlm.monitor import chips, host_machine
from jaxlm.parallel import mesh
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.serving import forecast_serving
from tests.models.parameters import draw_params

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = {"model.vocab": 320, "model.width": 64, "model.depth": 2, "model.heads": 4}
SMALL |= {"model.kv_heads": 2, "model.hidden": 128, "data.sequence": 128}


def run_of(**more):
    settings = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    return config.load(Run, None, [(name, str(value)) for name, value in settings.items()]).value


def bytes_of(shapes):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def model_of(run):
    model = setup.build_sharded_model(run, 320, setup.build_mesh_for(run)).blueprint
    return model, draw_params(model)


@pytest.mark.parametrize(("compute", "is_int8"), [("bfloat16", False), ("float32", True)])
@pytest.mark.parametrize("guessing", ["nothing", "lookup", "heads", "run"])
def test_the_bytes_of_the_plan_are_those_of_the_engine(compute, is_int8, guessing):
    """A context of 100 takes two chunks of 64."""
    mtp = {"objective__name": "mtp", "objective__weights": "0.3,0.1"}
    run = run_of(precision__compute=compute, **(mtp if guessing == "heads" else {}))
    smaller = run_of(model__depth=1, model__width=32, model__tied="true")
    planned = {"nothing": None, "run": smaller}.get(guessing, guessing)
    machine = host_machine.this_machine(1, [])
    chosen = {"context": 100, "is_int8": is_int8, "draft": planned}
    plan = forecast_serving(run, machine, slots=4, **chosen)
    model, params = model_of(run)
    guesser = {"nothing": None, "lookup": Lookup(), "heads": DraftHeads(2)}.get(guessing)
    if guessing == "run":
        guesser = DraftModel(*model_of(smaller))
    sizes = {"rows": 4, "length": 128, "chunk": 64, "is_int8": is_int8}
    programs = slots.build(model.merge, params, **sizes, draft=guesser)
    ready = programs.prepare(params)
    assert plan.weights_bytes == pytest.approx(bytes_of(ready[0]), rel=0.02)
    larger = max(bytes_of(params), bytes_of(ready[0]))
    assert larger < plan.start_bytes - plan.draft_bytes < 1.7 * larger
    assert plan.draft_bytes == pytest.approx(bytes_of(ready[1]), rel=0.02)
    assert (plan.draft_bytes > 0) == (guessing == "run")
    logits = 4 * 320 * (3 + {"nothing": 0, "heads": 2}.get(guessing, 4))
    held = bytes_of(programs.empty())
    assert 4 * (plan.slot_bytes - logits) == pytest.approx(held, rel=0.01)
    assert plan.layer_bytes == 0
    expected = plan.weights_bytes + plan.draft_bytes + 4 * plan.slot_bytes
    assert plan.total_bytes == max(plan.start_bytes, expected)
    both = forecast_serving(run, machine, slots=4, **chosen, keeps_params=True)
    assert both.weights_bytes == pytest.approx(bytes_of((params, ready[0])), rel=0.02)
    assert both.total_bytes == both.start_bytes + 4 * both.slot_bytes


@pytest.mark.parametrize(("base", "block"), [("int4", 32), ("w8a8", "all")])
def test_a_quantized_run_has_its_codes_and_what_is_read_of_them(base, block):
    run = run_of(tune__name="quantized", tune__base=base, tune__block=block)
    plan = forecast_serving(run, host_machine.this_machine(1, []), slots=4)
    blueprint = setup.build_sharded_model(run, 320, mesh.build(run.mesh)).blueprint
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blueprint.shapes)
    ready = slots.build(blueprint.merge, params, rows=4, length=128, chunk=64).prepare(params)
    assert plan.weights_bytes == pytest.approx(bytes_of(ready[0]), rel=0.02)
    assert plan.start_bytes > max(bytes_of(params), bytes_of(ready[0]))


EXPERTS = {"model__family": "mixtral", "model__experts": "8"}


@pytest.mark.few(2)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", ["int4", "none"])
@pytest.mark.parametrize("family", [EXPERTS, {}], ids=["mixtral", "llama"])
def test_a_layer_and_its_experts_take_the_bytes_that_a_pass_makes(family, base, compute):
    """Compile for a CPU without `prepare`, as other devices read a model."""
    tune = {"tune__name": "quantized", "tune__base": base, "tune__block": 32}
    more = {"precision__compute": compute, "model__depth": 4, "model__width": 128}
    run = run_of(**family | more | ({} if base == "none" else tune))
    plan = forecast_serving(run, chips.machine("h100", flag="--on"), slots=4)
    model = setup.build_sharded_model(run, 320, mesh.build(run.mesh)).blueprint
    ids = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    whole = jax.jit(lambda params, ids: model.merge(params).hidden(ids, positions=ids).values)
    memory = whole.lower(model.shapes, ids).compile().memory_analysis()
    assert plan.layer_bytes == pytest.approx(memory.temp_size_in_bytes, rel=0.2)
    expected = plan.weights_bytes + plan.layer_bytes + 4 * plan.slot_bytes
    assert plan.total_bytes == expected


def test_experts_are_cast_once_and_no_program_of_the_engine_copies_them():
    run = run_of(**EXPERTS, precision__compute="bfloat16", model__width=128)
    model = setup.build_sharded_model(run, 320, mesh.build(run.mesh)).blueprint
    programs = slots.build(model.merge, model.shapes, rows=4, length=128, chunk=64)
    ready = jax.eval_shape(programs.prepare, model.shapes)
    experts = [leaf for leaf in jax.tree.leaves(ready) if leaf.ndim == 3]
    assert {leaf.dtype.name for leaf in experts} == {"bfloat16"}
    state, one = jax.eval_shape(programs.empty), jax.ShapeDtypeStruct((), jnp.int32)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    lowered = programs.read.lower(ready, state, one, ids, one, one)
    copied = lowered.compile().memory_analysis().temp_size_in_bytes
    assert copied < bytes_of(experts) / 2


def test_windows_have_slots_for_guesses():
    more = {"model__family": "mistral", "model__window": 16}
    run, smaller = run_of(**more), run_of(model__depth=1, **more)
    machine = host_machine.this_machine(1, [])
    plan = forecast_serving(run, machine, slots=4, context=128, chunk=32, draft=smaller)
    model, params = model_of(run)
    sizes = {"rows": 4, "length": 128, "chunk": 32, "draft": DraftModel(*model_of(smaller))}
    held = bytes_of(slots.build(model.merge, params, **sizes).empty())
    assert 4 * (plan.slot_bytes - 7 * 4 * 320) == pytest.approx(held, rel=0.01)


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


def test_no_slot_fits_where_the_start_does_not():
    """A run in float32 that computes in bfloat16 needs more at the start than with a slot."""
    machine = host_machine.this_machine(1, [])
    plan = forecast_serving(run_of(precision__compute="bfloat16"), machine, slots=1)
    assert plan.start_bytes > plan.weights_bytes + plan.slot_bytes
    assert plan.slots_within(plan.start_bytes) > 1
    assert plan.slots_within(plan.start_bytes - 1) == 0


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--config=llama3-8b --slots=4", "--slots=1 {half}"),
        (
            "--config=llama3-8b --config.data.sequence=16384",
            "--slots=1 --kv_cache_dtype=int8 {half}",
        ),
        ("--config=qwen2.5-14b", "--slots=1 --kv_cache_dtype=int8 {half} {codes}=int8"),
        ("--config=llama3-70b", None),
    ],
)
def test_a_server_that_does_not_fit_is_answered_with_the_first_that_does(words, flags, capsys):
    words = ["plan", "--serve", "--on=rtx4090", "--config.data.sequence=8192", *words.split()]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["fits"], answer["most_slots"]) == (False, 0)
    assert main(words) == 0
    *_, text = capsys.readouterr().out.partition("\nnext ")
    if flags is None:
        assert answer["nearest"] is None
        assert text.strip() == "a smaller model"
        return
    half = "--config.precision.params=bfloat16 --config.precision.compute=bfloat16"
    codes = "--config.tune.name=quantized --config.tune.base"
    flags = flags.format(half=half, codes=codes)
    assert answer["nearest"]["flags"] == flags
    line, *more = (each.strip() for each in text.strip().splitlines())
    others = [each for each in words if not each.startswith("--slots")]
    assert line == f"jaxlm {' '.join(others)} {flags}"
    assert main([*line.split()[1:], "--json"]) == 0
    pasted = json.loads(capsys.readouterr().out)
    assert pasted["fits"]
    assert pasted["total_bytes"] == answer["nearest"]["total_bytes"]
    quantize = "jaxlm quantize --workdir=RUN --scheme=int8 --out=RUN-int8"
    assert more == ([quantize] if "quantized" in flags else [])


def test_the_next_server_of_a_plan_that_does_not_fit_has_an_int8_cache(capsys, tmp_path):
    run = run_of(model__family="llama", data__sequence=2**21, model__max_positions=2**21)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json(run)))
    words = ["plan", f"--config={tmp_path}", "--serve", "--on=mygpu", "--memory=1GB"]
    assert main(words) == 0
    line = f"next       jaxlm serve --workdir={tmp_path} --slots=2 --context={2**21} "
    assert f"{line}--kv_cache_dtype=int8\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fix"),
    [("--on=h100x8", "--on=h100"), ("--on=v5e-4", "--on=v5e"), ("--devices=2", "--devices=1")],
)
def test_a_plan_of_a_server_on_several_devices_is_refused_with_one_of_them(words, fix, capsys):
    words = ["plan", "--config=configs/quickstart.py", "--serve", words]
    assert main(words) == 2
    assert f"fix    {fix}\n" in capsys.readouterr().err
    assert main([*words[:3], fix]) == 0


def test_what_no_engine_serves_is_refused():
    settings = [("model.family", "t5"), ("objective.name", "span"), ("model.vocab", "320")]
    t5 = config.load(Run, None, settings).value
    assert isinstance(t5.decoder(320), EncoderDecoderConfig)
    with pytest.raises(ConfigError, match="does not serve"):
        forecast_serving(t5, chips.machine("h100", flag="--on"), slots=8)
    with pytest.raises(ConfigError, match="does not serve") as caught:
        forecast_serving(run_of(), chips.machine("h100", flag="--on"), slots=8, draft=t5)
    assert caught.value.fix.startswith("--draft=lookup")


def test_the_command_prints_slots_memory_and_speed(capsys, tmp_path, monkeypatch):
    words = ["plan", "--config=llama3-8b", "--serve", "--on=h200", "--context=8192"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"]
    assert answer["slot_bytes"] == pytest.approx(2 * 2**30, rel=0.01)  # float32 by default
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"{answer['most_slots']} slots of this context" in text
    assert "jaxlm serve --workdir=RUN --slots=8 --context=8192" in text
    assert "draft" not in text
    labels = [line[:11].strip() for line in text.splitlines()]
    assert labels[:4] == ["on", "slots", "memory", "parts"]
    (tmp_path / "my run").mkdir()
    settings = config.to_json(run_of())
    (tmp_path / "my run/config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--config=my run", *words[2:], "--draft=lookup"]) == 0
    line = "serve '--workdir=my run' --slots=8 --context=8192 --draft=lookup\n"
    assert line in capsys.readouterr().out
    assert main(["plan", "--config=my run", *words[2:], "--kv_cache_dtype=int8"]) == 0
    line = "serve '--workdir=my run' --slots=8 --context=8192 --kv_cache_dtype=int8\n"
    assert line in capsys.readouterr().out
    assert main([*words, "--draft=llama3.2-1b", "--json"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["draft_bytes"] == pytest.approx(4 * 1.24e9, rel=0.01)
    # Its 16 layers have 8 heads of 64, those of the model 32 and of 128; a chunk is added to both.
    cache = drafted["slot_bytes"] / answer["slot_bytes"]
    assert cache == pytest.approx((1 + 16 * 64 / (32 * 128)) * (1 + 64 / 8192), rel=0.01)
    assert main([*words, "--draft=llama3.2-1b"]) == 0
    assert " · draft 4.60 GiB · a layer " in capsys.readouterr().out
    assert main([*words, "--draft=no/such/run"]) == 66
    assert "--draft=no/such/run" in capsys.readouterr().err
