"""Training speed of this machine on standard sizes: the compiled step on random rows."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError
from jaxlm.core.nearest import nearest_word
from jaxlm.data.batch import Tokens
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips
from jaxlm.parallel import host
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.plan import divisibility, oom
from jaxlm.recipes.plan.predict import decoder_tokens
from jaxlm.recipes.train import programs
from jaxlm.recipes.train.programs import compiled_memory
from jaxlm.recipes.train.trainer import flops_per_token

MIN_STEPS = 3

# By parameters: nanoGPT's CPU setting, the quickstart's model, and two published models.
SIZES: dict[str, dict[str, str]] = {
    name: dict(setting.split("=") for setting in settings.split())
    for name, settings in {
        "0.8M": "model.family=gpt2 model.vocab=128 model.depth=4 model.width=128 model.heads=4 "
        "model.max_positions=64 data.sequence=64 train.batch=16",
        "4M": "model.family=llama model.vocab=2048 model.depth=4 model.width=256 model.heads=4 "
        "model.kv_heads=2 data.sequence=256 train.batch=8",
        "124M": "model.family=gpt2 model.vocab=50304 model.depth=12 model.width=768 "
        "model.heads=12 model.max_positions=1024 data.sequence=1024 train.batch=8 loss.chunk=2048",
        "1B": "model.family=llama model.vocab=128256 model.depth=16 model.width=2048 "
        "model.heads=32 model.kv_heads=8 model.hidden=8192 model.tied=True data.sequence=2048 "
        "train.batch=8 train.remat=full loss.chunk=2048",
    }.items()
}
CPU_SIZES, ACCELERATOR_SIZES = ("0.8M", "4M"), ("124M", "1B")


def sizes(text: str | None) -> list[str]:
    """Return the sizes named in `text`, or those for this platform. Raises CommandError."""
    if text is None:
        return list(CPU_SIZES if jax.default_backend() == "cpu" else ACCELERATOR_SIZES)
    names = text.split(",")
    if wrong := [name for name in names if name not in SIZES]:
        suggestions = [nearest_word(name, SIZES) for name in names]
        fix = "name some of these sizes, with commas between"
        fix = f"--sizes={','.join(filter(None, suggestions))}" if all(suggestions) else fix
        what, why = f"size {wrong[0]!r} does not exist", f"the sizes are {', '.join(SIZES)}"
        raise CommandError(what, where=f"--sizes={text}", why=why, fix=fix)
    return names


def measure(
    names: Sequence[str], overrides: Sequence[tuple[str, str]], seconds: float, say: Log
) -> Iterator[dict[str, Any]]:
    """Yield a row per size: at least three steps, or as many as fit in `seconds`.

    `overrides` apply to all sizes. The batch is multiplied by the number of devices. Raises
    ConfigError or OutOfMemory if a size does not fit with these settings.
    """
    setup.start()
    for name in names:
        say(f"{name}: compiling the step")
        settings = SIZES[name] | {"precision.compute": "bfloat16"}
        settings["train.batch"] = str(int(settings["train.batch"]) * jax.device_count())
        run = config.load(Run, None, [*settings.items(), *overrides]).value
        yield {"size": name} | _measured(run, seconds)


def _measured(run: Run, seconds: float) -> dict[str, Any]:
    divisibility.check(run, jax.device_count(), meshes.slices(jax.devices()))
    grid = meshes.build(run.mesh)
    vocab = setup.vocabulary(run, 0)
    engine = programs.without_data(run, grid, vocab)
    model = engine.model
    forecast = oom.forecast_here(run, model.blueprint.config)
    with jax.set_mesh(grid):
        if model.base:
            engine.base = jax.jit(lambda: jax.tree.map(_filled, engine.base))()
        state, batch = engine.init_state(), host.put(grid, _rows(run, vocab))
        frozen = jax.tree.map(jnp.copy, engine.whole(state.params))
        extra = {"teacher": frozen, "base": engine.base}
        extra = {name: extra[name] for name in engine.extra_inputs}
        started = time.perf_counter()
        step = engine.step.lower(state, batch, **extra).compile()
        compiled = time.perf_counter() - started
        held = compiled_memory(step)
        oom.check(run, forecast, held["total"])
        state, metrics = step(state, batch, **extra)
        jax.block_until_ready(state)
        times: list[float] = []
        while len(times) < MIN_STEPS or sum(times) < seconds:
            started = time.perf_counter()
            state, metrics = step(state, batch, **extra)
            jax.block_until_ready(state)
            times.append(time.perf_counter() - started)
    median = statistics.median(times)
    peak = chips.peak_flops(jax.devices()[0].device_kind, jax.device_count())
    flops, _ = flops_per_token(engine, run.data.sequence)
    return {
        "parameters": model_cost.parameters(model.blueprint.config),
        "tokens_per_step": run.tokens_per_step,
        "steps": len(times),
        "step_seconds": [min(times), median, max(times)],
        "tokens_per_second": run.tokens_per_step / median,
        "mfu": None if peak is None else flops * run.tokens_per_step / median / peak,
        "compile_seconds": compiled,
        "bytes_per_device": held["total"],
        "planned_bytes_per_device": forecast and forecast.bytes_per_device["total"],
        "planned_step_seconds": forecast and list(forecast.seconds),
        "precision": dataclasses.asdict(run.precision),
        "loss_nats": float(metrics["loss_nats"]),
    }


def _filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a leaf of an adapter's base: numbers that are not 0, as DoRA divides by their norm."""
    return jnp.full(leaf.shape, 0.01 if jnp.issubdtype(leaf.dtype, jnp.floating) else 1, leaf.dtype)


def _rows(run: Run, vocab: int) -> Tokens:
    """Return a batch of random ids; each predicts the next."""
    read = (run.train.batch, run.data.sequence)
    shape = (run.train.batch, decoder_tokens(run) or run.data.sequence)
    ids = np.random.default_rng(0).integers(0, vocab, shape, np.int32)
    weights, segments = np.ones(shape, np.float32), np.ones(shape, np.int32)
    slots = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    fields: Any = (ids, np.roll(ids, -1, axis=1), weights, segments, slots)
    rows = Tokens(*fields)
    if run.architecture == "encoder-decoder":
        source: Any = np.random.default_rng(1).integers(0, vocab, read, np.int32)
        rows = rows._replace(source=source, source_segments=np.ones_like(source))
    return collectives.with_answers(rows, run)
