"""Learning-rate range test: a short training whose rate grows at every step."""

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.checkpoint.verify import Verifier
from jaxlm.core.callbacks import Log
from jaxlm.core.config import Loaded
from jaxlm.core.errors import CommandError, Diverged, NotWritable
from jaxlm.data import parts
from jaxlm.data.dataset import Data
from jaxlm.monitor import plots, sinks
from jaxlm.optim.schedules import LearningRate
from jaxlm.parallel import rules
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose.schedule_plot import make_folder
from jaxlm.recipes.setup import ShardedModel
from jaxlm.recipes.train import reference
from jaxlm.recipes.train.checkpointing import state_from
from jaxlm.recipes.train.init_from import RANDOM_WEIGHTS, check_tokenizer, find_init_source
from jaxlm.recipes.train.programs import TrainPrograms, check_has_rows
from jaxlm.recipes.train.teacher import Teacher, find_teacher, load_teacher
from jaxlm.recipes.use.load import InitSource, load_base
from jaxlm.training import epochs
from jaxlm.training.state import TrainState
from jaxlm.tune.config import Full

MIN_STEPS = 10
LIMIT = 1.5  # the test ends if the smoothed loss is this many times its lowest
WINDOW = 0.05  # share of the steps, on each side, over which a loss is smoothed
MIN_FALL = 0.02  # of the first smoothed loss; less may be the difference between batches
# On the quickstart at a reduced size, 60 steps per rate: the best rate of a grid was 0.06, the
# lowest loss at 0.11; the steepest descent and a tenth of the lowest were at 0.011, 5x too low.
SHARE = 1 / 3
RULE = "a third of the rate at the lowest smoothed loss"
RECORD, PLOT = "lr-find.json", "lr-find.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrFindOptions:
    """Range of rates, number of steps, output folder, and RUN[@STEP] of the first weights."""

    low: float
    high: float
    steps: int
    out: Path
    init_from: str | None = None
    cpu_devices: int | None = None


class Point(NamedTuple):
    """A step of the test: rate of its update, loss before it, and smoothed loss."""

    rate: float
    loss_nats: float
    smoothed: float


def lr_find(loaded: Loaded, options: LrFindOptions, say: Log = lambda _: None) -> dict[str, Any]:
    """Train at rising rates; suggest a third of the rate of lowest loss.

    `suggested_lr` is None if the loss does not fall. Step i of n has the rate

        low (high / low)^(i / (n - 1))

    without warm-up or decay; batches, clipping and all else are those of a run that begins, and so
    are the first weights: of `init_from`, or random ones. A reference of preferences scores the
    answers in each step. The guard ignores spikes. The test ends at the first loss or gradient
    that is not finite, or if the loss, smoothed over the last steps, is 1.5 times its lowest.
    Writes only lr-find.json and lr-find.png.

    Raises:
      CommandError: if the rates are not a range, or the steps are too few.
      ConfigError: if the config needs a model to start from, or differs from it.
      NotWritable: if `out` cannot be written, or contains an earlier test.
      Diverged: if the loss is not finite from the start.

    Source: Smith 2017, arXiv:1506.01186, section 3.3, where the rate grows linearly and the reader
    picks a rate from the accuracy.
    """
    run: Run = loaded.value
    _check(options)
    check_has_rows(run)
    parts.check_names(run.data)
    make_folder(options.out, "the folder of the test", fix="--out=lr-find-2")
    if (options.out / RECORD).exists():
        raise NotWritable(
            "the folder contains an earlier test",
            where=str(options.out / RECORD),
            why="a test never overwrites",
            fix=shlex.quote(f"--out={options.out}-2"),
        )
    setup.start(options.cpu_devices)
    run = setup.with_compute(run)
    mesh = setup.build_mesh_for(run)
    source = None
    if options.init_from is not None or not isinstance(run.tune, Full):
        named = options.init_from, options.out, say, Verifier(say=say)
        source = find_init_source(run, *named, is_begun=False)
    elif run.data.kind != "text":
        say(RANDOM_WEIGHTS.format(run.data.kind))
    data = setup.open_data(run, say=say, warn=say)
    if source is not None:
        check_tokenizer(source, data.tokenizer.digest)
    run = _with_batch_of_epochs(run, loaded, data, rules.split(mesh, "batch"), say)
    data.train.check_batch(run.pace)
    model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
    whole = run.at(run.pace.phases[-1])  # the rate is for batches after the warm-up
    bare = dataclasses.replace(whole, guard=dataclasses.replace(run.guard, sigmas=None))
    with jax.set_mesh(mesh):
        teacher = _frozen_model(run, data, model, say)
        base = None
        if model.base:
            assert source is not None  # an adapter has one
            base = load_base(source, model)
        programs = TrainPrograms(bare, data, model, growing(options), teacher, base)
        state = programs.init_state() if source is None else state_from(programs, source)
        _attach_start(programs, state, source)
        say(
            f"compiling, then {options.steps} steps at rates from {options.low:g} to "
            f"{options.high:g}"
        )
        measured, ended = _measure(programs, state, options.steps)
    if not measured:
        raise Diverged(
            "the loss or its gradient is not finite before the first update",
            where="step 1",
            why="no learning rate fixes that",
            fix="inspect the data and model.init: float32 overflows too"
            if run.precision.compute == "float32"
            else "--config.precision.compute=float32",
        )
    curve = smooth(measured, options.steps)
    rate = suggest(curve)
    if lowest(curve) is curve[-1] and len(curve) == options.steps:
        ended = f"the loss still fell at the highest rate: --high={10 * options.high:g} shows more"
    answer = {
        "suggested_lr": rate,
        "flags": [] if rate is None else scaled(run, rate),
        "rule": RULE,
        "ended": ended,
        "steps": len(curve),
        "optimizer": run.optim.name,
        "curve": [point._asdict() for point in curve],
        "plot": str(options.out / PLOT),
    }
    sinks.replace(options.out / PLOT, plots.lr_find_png(curve, rate))
    sinks.replace(
        options.out / RECORD, (json.dumps(answer, indent=1, allow_nan=False) + "\n").encode()
    )
    return answer


def growing(options: LrFindOptions) -> LearningRate:
    """Return the rate as a function of completed steps."""
    ratio = math.log(options.high / options.low) / (options.steps - 1)
    return lambda step: options.low * jnp.exp(jnp.asarray(step, jnp.float32) * ratio)


def _with_batch_of_epochs(run: Run, loaded: Loaded, data: Data, ways: int, say: Log) -> Run:
    """Return the run with the batch that `train.epochs` gives it on `ways` devices."""
    rows, unit = data.train.plan.rows, ways * run.train.microbatches
    typed = epochs.typed_names(loaded)
    batch = epochs.fewer_steps(run.train, rows=rows, unit=unit, typed=typed).get("train.batch")
    if batch in (None, run.train.batch):
        return run
    say(f"train.batch = {batch}, as in a run: the training set has {rows} rows")
    return run.changed({"train.batch": batch})


def _frozen_model(run: Run, data: Data, model: ShardedModel, say: Log) -> Teacher | None:
    """Return the teacher of the objective, or the run that answers are compared with, if any."""
    named = run.objective.compared_with
    if named in (None, reference.START, reference.ADAPTER_OFF):
        frozen = find_teacher(run, data, say)
    else:
        frozen = reference.find_named(named, data.tokenizer.digest, say)
    return load_teacher(run, frozen, model) if frozen else None


def _attach_start(programs: TrainPrograms, state: TrainState, source: InitSource | None) -> None:
    """Keep the weights before the first update, if answers are compared with them."""
    compared = programs.run.objective.compared_with
    # A step donates its state, and so its parameters.
    if compared == reference.START:
        params = jax.tree.map(jnp.copy, programs.whole(state.params))
        programs.teacher = Teacher(programs.model.blueprint, params)
    elif compared == reference.ADAPTER_OFF and source is not None and source.adapter is not None:
        programs.adapter = jax.tree.map(jnp.copy, state.params)


def _measure(
    programs: TrainPrograms, state: TrainState, steps: int
) -> tuple[list[tuple[float, float]], str]:
    """Return (rate, loss) of each step, and why the test ended."""
    batches = programs.batches(0)
    measured: list[tuple[float, float]] = []
    lowest = running = math.inf
    for _ in range(steps):
        state, metrics = programs.step(state, next(batches), **programs.extra_inputs)
        rate, loss = float(metrics["learning_rate"]), float(metrics["loss_nats"])
        if metrics["verdict"]:  # the guard did not apply the update
            return measured, f"the loss or its gradient was not finite at {rate:.3g}"
        measured.append((rate, loss))
        width = _width(steps)
        running = sum(loss for _, loss in measured[-width:]) / len(measured[-width:])
        lowest = min(lowest, running)
        if running > LIMIT * lowest:
            return measured, f"the smoothed loss was {LIMIT:g} times its lowest at {rate:.3g}"
    return measured, "every rate of the range was tried"


def smooth(measured: Sequence[tuple[float, float]], steps: int) -> list[Point]:
    """Return each loss with the mean of those around it, which does not lag."""
    width, losses = _width(steps), [loss for _, loss in measured]
    around = [losses[max(0, index - width) : index + width + 1] for index in range(len(losses))]
    return [
        Point(rate, loss, sum(near) / len(near))
        for (rate, loss), near in zip(measured, around, strict=True)
    ]


def suggest(curve: Sequence[Point]) -> float | None:
    """Return a third of the rate of lowest smoothed loss; None unless that is clearly a fall."""
    if not curve or lowest(curve).smoothed > (1 - MIN_FALL) * curve[0].smoothed:
        return None
    return lowest(curve).rate * SHARE


def lowest(curve: Sequence[Point]) -> Point:
    """Return the point of lowest smoothed loss."""
    return min(curve, key=lambda point: point.smoothed)


def scaled(run: Run, rate: float) -> list[str]:
    """Return the flags that set a rate, and with it all rates of the optimizer."""
    optim = run.optim
    rates = {name: rate * getattr(optim, name) / optim.lr for name in optim.further_rates}
    return [f"--config.optim.{name}={value:.2g}" for name, value in ({"lr": rate} | rates).items()]


def _width(steps: int) -> int:
    return max(1, round(steps * WINDOW))


def _check(options: LrFindOptions) -> None:
    low, high, steps = options.low, options.high, options.steps
    if not 0 < low < high < math.inf:
        raise CommandError(
            "the rates are not a range",
            where=f"--low={low:g} --high={high:g}",
            why="--low is above zero and below --high",
            fix="jaxlm lr-find --help",
        )
    if steps < MIN_STEPS:
        raise CommandError(
            "the steps are too few for a curve",
            where=f"--steps={steps}",
            why=f"a test needs at least {MIN_STEPS}",
            fix="jaxlm lr-find --help",
        )
