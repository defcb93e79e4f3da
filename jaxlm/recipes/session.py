"""A run while it is trained: the pieces that the loop's hooks share."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint.store import Store
from jaxlm.core import config, random
from jaxlm.core.errors import Preempted
from jaxlm.data.prepare import Data
from jaxlm.evals import loss as evals
from jaxlm.models import cost
from jaxlm.monitor import memory, peaks, sinks
from jaxlm.monitor.clock import Clock
from jaxlm.monitor.console import Console
from jaxlm.monitor.profile import Trace
from jaxlm.objectives.token_nll import token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim import schedules
from jaxlm.parallel import host, rules
from jaxlm.recipes.assembly import Assembly
from jaxlm.recipes.config import Run
from jaxlm.recipes.sample import Sampler
from jaxlm.train import loop
from jaxlm.train import state as states
from jaxlm.train import step as steps
from jaxlm.train.cadence import Cadence
from jaxlm.train.loop import Hooks, Progress
from jaxlm.train.rundir import RunDir
from jaxlm.train.signals import StopRequest
from jaxlm.train.state import TrainState


class Session:
    """A run while it is trained: the pieces that the loop's hooks share."""

    def __init__(
        self,
        run: Run,
        directory: RunDir,
        console: Console,
        store: Store,
        data: Data,
        model: Assembly,
        start: int,
        meta: dict[str, Any] | None,
        stack: contextlib.ExitStack,
    ):
        self.run, self.directory, self.console = run, directory, console
        self.store, self.data, self.model, self.start = store, data, model, start
        self.progress = Progress(**meta["progress"]) if meta else Progress()
        self.evaluation: dict[str, Any] | None = meta["evaluation"] if meta else None
        self.rows = host.host_rows(model.mesh, run.train.batch)

        schedule = schedules.build(
            run.schedule,
            lr=run.optim.lr,
            total=run.train.steps,
            tokens_per_step=run.tokens_per_step,
        )
        blueprint = model.blueprint
        self.optimizer = optimizers.build(run.optim, schedule, blueprint.axes)
        loss = functools.partial(_loss, blueprint.merge, run.loss)
        step = steps.build(
            loss,
            self.optimizer,
            schedule,
            key=random.stream(jax.random.key(run.seed), "train"),
            precision=model.precision,
            microbatches=run.train.microbatches,
            is_measured=_is_logged(run),
        )
        self.step = jax.jit(step, donate_argnums=0)
        self.eval_step = jax.jit(
            evals.build(blueprint.merge, _padded_bytes(data, model), chunk=run.loss.chunk)
        )
        self.put = functools.partial(host.put, model.mesh)
        self.sampler = Sampler(run.sample, blueprint, data.tokenizer, run.seed)

        through = start if meta else None
        self.metrics = sinks.Jsonl(directory.path / "metrics.jsonl", keep_through=through)
        self.samples = sinks.Jsonl(directory.path / "samples.jsonl", keep_through=through)
        self.sinks: list[sinks.Sink] = [self.metrics, console]
        if "tensorboard" in run.log.sinks:
            self.sinks.append(sinks.TensorBoard(directory.path / "events", keep_through=through))
        for sink in (*self.sinks, self.samples):
            stack.callback(sink.close)
        self.trace = Trace(run.profile, directory.path / "profile")
        stack.callback(self.trace.close)
        flops = functools.partial(cost.flops_per_token, blueprint.config, run.data.sequence)
        kinds = [device.device_kind for device in model.mesh.devices.flat]
        self.clock_of = functools.partial(
            Clock,
            start=start,
            steps=run.train.steps,
            flops_per_step=flops(causal=True) * run.tokens_per_step,
            flops_per_step_full=flops(causal=False) * run.tokens_per_step,
            peak_flops=peaks.peak_flops(kinds[0], len(kinds)),
        )

    def train(self, stop: StopRequest, stop_at: int | None) -> None:
        """Makes or restores the state, and runs the loop."""
        run = self.run
        cadence = functools.partial(
            Cadence, total=run.train.steps, tokens_per_step=run.tokens_per_step
        )
        self.is_sample_due = cadence(run.sample.every).is_due
        state = self._state()
        step = self._first_step_announced()
        self.clock = self.clock_of()
        hooks = Hooks(
            is_log_due=cadence(run.log.every).is_due,
            is_eval_due=cadence(run.eval.every).is_due if self.data.validation else lambda _: False,
            is_save_due=cadence(run.checkpoint.every).is_due,
            before=self.trace.before,
            count=lambda tokens, waited: self.clock.add(tokens=tokens, data_wait_seconds=waited),
            log=self._log,
            evaluate=self._evaluate,
            save=self._save,
            check_saves=self.store.check,
        )
        try:
            loop.run(
                step,
                state,
                map(
                    self.put,
                    self.data.train.batches(self.start, batch=run.train.batch, rows=self.rows),
                ),
                start=self.start,
                steps=run.train.steps,
                stop_at=min(stop_at or run.train.steps, run.train.steps),
                progress=self.progress,
                hooks=hooks,
                stop=stop,
                patience=run.train.patience,
                keep_best=run.checkpoint.keep_best > 0,
            )
        except Preempted:
            self.store.wait()  # "saved" must be true before it is said
            raise
        self.store.close()

    def fresh(self) -> TrainState:
        """The state before the first update; to be traced, not called."""
        params = self.model.blueprint.init(random.key(self.run.seed, "init"))
        return states.fresh(params, self.optimizer)

    def _state(self) -> TrainState:
        """The state before the first step of this process, on the mesh from birth."""
        blueprint, mesh = self.model.blueprint, self.model.mesh
        shapes = jax.eval_shape(self.fresh)
        axes = optimizers.state_axes(
            self.run.optim, self.optimizer, blueprint.shapes, blueprint.axes
        )
        opt_shardings = rules.shardings(mesh, axes, shapes.opt_state)
        shardings = shapes._replace(
            step=states.replicated(mesh), params=self.model.shardings, opt_state=opt_shardings
        )
        if self.start:
            with self.console.timer(f"restoring step {self.start}"):
                return self.store.restore(self.start, states.abstract(shapes, shardings))
        return jax.jit(self.fresh, out_shardings=shardings)()

    def _first_step_announced(self) -> steps.Step:
        """The step, compiled at its first call, where a person can see how long that takes.

        Compiled by itself, so that the clock begins before the first step and not in the middle of it.
        """
        compiled: steps.Step | None = None

        def step(state: TrainState, batch: Any) -> tuple[TrainState, steps.Metrics]:
            nonlocal compiled
            if compiled is None:
                with self.console.timer("compiling the step"):
                    compiled = self.step.lower(state, batch).compile()
                self.clock = self.clock_of()
            return compiled(state, batch)

        return step

    def _log(self, step: int, values: dict[str, float]) -> None:
        record = self.clock.read(step) | values | {"tokens": self.progress.tokens}
        # A step that is not finite ends the run, so none is skipped.
        record |= {"skipped_total": 0, "peak_bytes": memory.peak(jax.local_devices()).bytes}
        self._write(step, "train", record)

    def _write(self, step: int, split: str, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write({"step": step, "time_unix": time.time(), "split": split} | record)

    def _evaluate(self, state: TrainState, step: int) -> float | None:
        """Every validation set; the loss of the first ranks checkpoints. Samples too, where they are due."""
        run = self.run
        with self.clock.pause():
            whole = step == run.train.steps
            limit = None if whole or run.eval.batches == "all" else run.eval.batches
            size = run.train.batch if run.eval.batch == "auto" else run.eval.batch
            results = {}
            for name, loader in self.data.validation.items():
                rows = host.host_rows(self.model.mesh, size)
                batches = loader.evaluation(batch=size, rows=rows, limit=limit)
                eval_step = functools.partial(self.eval_step, state.params)
                results[name] = evals.evaluate(eval_step, batches, self.put).record()
                self._write(step, name, results[name])
            if self.is_sample_due(step):
                for prompt, text in self.sampler.draw(state.params):
                    self.samples.write({"step": step, "prompt": prompt, "text": text})
            self.evaluation = next(iter(results.values()))
            return self.evaluation["loss_nats"]

    def _save(self, state: TrainState, step: int, loss_nats: float | None) -> None:
        """Hands the state to the store, once what happened before it is on disk."""
        with self.clock.pause():
            for sink in (self.metrics, self.samples):
                sink.flush()
            stopped_early = self.run.train.patience is not None and (
                self.progress.evaluations_without_gain >= self.run.train.patience
            )
            meta = {
                "step": step,
                "finished": step == self.run.train.steps or stopped_early,
                "config": config.to_json(self.run),
                "data": self.data.fingerprint,
                "progress": dataclasses.asdict(self.progress),
                "evaluation": self.evaluation,
            }
            self.store.save(step, state, meta, loss_nats)
            self.directory.step = step


def _loss(
    merge: Callable[[Any], Any], settings: Any, params: Any, batch: Any, key: jax.Array
) -> Any:
    return token_nll(merge(params), batch, key, settings)


def _is_logged(run: Run) -> Callable[[jax.Array], jax.Array] | None:
    """Whether the metrics of a step will be logged, by the number of completed steps; None where only a clock knows."""
    if run.log.every.unit == "second":
        return None
    every = max(run.log.every.steps(run.train.steps, run.tokens_per_step), 1)
    return lambda completed: (completed % every == 0) | (completed == run.train.steps)


def _padded_bytes(data: Data, model: Assembly) -> np.ndarray:
    """Bytes that each id of the model stands for; none for ids that only fill the vocabulary up."""
    known = data.tokenizer.token_bytes
    return np.pad(known, (0, model.blueprint.config.vocab - len(known)))
