"""A run while it is trained: what the loop's hooks do, and what they share."""

import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.checkpoint.store import Store
from jaxlm.core import config
from jaxlm.core.errors import Diverged, Preempted, SaveFailed
from jaxlm.models import cost
from jaxlm.monitor import memory, peaks, sinks
from jaxlm.monitor.clock import Clock
from jaxlm.monitor.console import Console
from jaxlm.monitor.profile import Trace
from jaxlm.recipes import forensics, resume
from jaxlm.recipes.crew import Crew
from jaxlm.recipes.engine import Engine
from jaxlm.recipes.resume import Wish
from jaxlm.recipes.rewinding import Rewinds
from jaxlm.recipes.sample import Sampler
from jaxlm.train import guard, loop
from jaxlm.train.cadence import Cadence
from jaxlm.train.loop import BudgetSpent, Hooks, Progress
from jaxlm.train.rundir import RunDir
from jaxlm.train.signals import StopRequest
from jaxlm.train.state import TrainState
from jaxlm.train.step import Metrics, Step


class Session:
    """A run while it is trained: what the loop's hooks do, and what they share."""

    def __init__(
        self,
        engine: Engine,
        crew: Crew,
        directory: RunDir,
        console: Console,
        store: Store,
        rewinds: Rewinds,
        wish: Wish,
        meta: dict[str, Any] | None,
        changes: list[config.Change],
    ):
        self.engine, self.run, self.crew = engine, engine.run, crew
        self.directory, self.console, self.store = directory, console, store
        self.rewinds, self.wish, self.changes = rewinds, wish, changes
        self._take_up(meta)
        run, blueprint = self.run, engine.model.blueprint
        self.sampler = Sampler(run.sample, blueprint, engine.data.tokenizer, run.seed)
        self.trace = Trace(run.profile, directory.path / "profile")  # one for each process
        self._open = contextlib.ExitStack()
        self._step: Step | None = None
        self._failed_saves = 0
        self._is_retry_due = False
        self._saved: tuple[TrainState, int, float | None] | None = None
        flops = functools.partial(cost.flops_per_token, blueprint.config, run.data.sequence)
        kinds = [device.device_kind for device in engine.model.mesh.devices.flat]
        self._clock_of = functools.partial(
            Clock,
            steps=run.train.steps,
            flops_per_step=flops(causal=True) * run.tokens_per_step,
            flops_per_step_full=flops(causal=False) * run.tokens_per_step,
            peak_flops=peaks.peak_flops(kinds[0], len(kinds)),
        )

    def train(self, stop: StopRequest, stop_at: int | None) -> None:
        """Makes or restores the state, and runs the loop; goes back and around what the guard could not get over."""
        with self._open, contextlib.closing(self.trace):
            self._open_sinks()
            while True:
                try:
                    self._loop(self._state(), stop, stop_at)
                    break
                except Preempted:
                    self._finish_saves()  # "saved" must be true before it is said
                    raise
                except BudgetSpent as spent:
                    self._rewind(spent)
            self._finish_saves()
            self.store.close()

    def _take_up(self, meta: dict[str, Any] | None) -> None:
        """What the host knows at the step of a checkpoint; None is the beginning."""
        self.start: int = meta["step"] if meta else 0
        self.progress = Progress(**meta["progress"]) if meta else Progress()
        self.evaluation: dict[str, Any] | None = meta["evaluation"] if meta else None
        self.directory.step = self.start

    def _open_sinks(self) -> None:
        """Opens what is written to; lines and events of later steps than the first go, as those steps come again."""
        through, path = self.start, self.directory.path
        self.metrics: sinks.Sink = sinks.Nowhere()
        self.samples: sinks.Sink = sinks.Nowhere()
        self.spikes: sinks.Sink = sinks.Nowhere()
        self.sinks: list[sinks.Sink] = []
        if not self.directory.is_writer:
            return
        self.metrics = sinks.Jsonl(path / "metrics.jsonl", keep_through=through)
        self.samples = sinks.Jsonl(path / "samples.jsonl", keep_through=through)
        self.spikes = sinks.Jsonl(path / "spikes.jsonl")
        self.sinks = [self.metrics, self.console]
        if "tensorboard" in self.run.log.sinks:
            self.sinks.append(sinks.TensorBoard(path / "events", keep_through=through))
        for sink in (*self.sinks[:1], *self.sinks[2:], self.samples, self.spikes):
            self._open.callback(sink.close)

    def _state(self) -> TrainState:
        """The state before the first step from here on."""
        if not self.start:
            return self.engine.fresh()
        with self.crew.watch.phase("save"), self.console.timer(f"restoring step {self.start}"):
            return resume.state(self.engine, self.store, self.start, self.wish)

    def _loop(self, state: TrainState, stop: StopRequest, stop_at: int | None) -> None:
        run = self.run
        cadence = functools.partial(
            Cadence, total=run.train.steps, tokens_per_step=run.tokens_per_step
        )
        self._is_sample_due = cadence(run.sample.every).is_due
        is_save_due = cadence(run.checkpoint.every).is_due
        has_validation = bool(self.engine.data.validation)
        self.clock = self._clock_of(start=self.start)
        hooks = Hooks(
            is_log_due=cadence(run.log.every).is_due,
            is_eval_due=cadence(run.eval.every).is_due if has_validation else lambda _: False,
            is_save_due=lambda step: is_save_due(step) or self._is_retry_due,
            before=self._before,
            count=lambda tokens, waited: self.clock.add(tokens=tokens, data_wait_seconds=waited),
            log=self._log,
            skipped=self._note_skipped,
            evaluate=self._evaluate,
            save=self._save,
            check_saves=self._check_saves,
            enter=self.crew.watch.enter,
        )
        loop.run(
            self._compiled,
            state,
            self.engine.batches(self.start, self.rewinds.skips),
            start=self.start,
            steps=run.train.steps,
            stop_at=min(stop_at or run.train.steps, run.train.steps),
            progress=self.progress,
            hooks=hooks,
            stop=stop,
            patience=run.train.patience,
            keep_best=run.checkpoint.keep_best > 0,
            budget=run.guard.budget,
        )

    def _compiled(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """The step, compiled at its first call, where a person can see how long that takes.

        Compiled by itself, so that the clock begins before the first step and not in the middle of it.
        """
        if self._step is None:
            with self.crew.watch.phase("compile"), self.console.timer("compiling the step"):
                self._step = self.engine.step.lower(state, batch).compile()
            self.clock = self._clock_of(start=self.start)
        limits, step = self.run.guard, self._completed + 1
        if limits.compare_every and step % limits.compare_every == 0:
            self._compare_replicas(state)
        if limits.repeat_every and step % limits.repeat_every == 0:
            return self._repeated(state, batch)
        return self._step(state, batch)

    def _repeated(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step computed twice from the same state. Raises Diverged where the results are not the same bits.

        A processor that miscalculates now and then leaves no other trace.
        """
        assert self._step is not None
        again, _ = self._step(jax.tree.map(jnp.copy, state), batch)
        moved, metrics = self._step(state, batch)
        if differences := self.engine.replicas.changes(again.params, moved.params):
            raise Diverged(
                f"step {self._completed + 1} came out otherwise when it was computed again, in {len(differences)} leaves",
                where=f"step {self._completed + 1}",
                why="\n".join(differences[:4]),
                fix="the same command again goes on from the last committed step; a device that does this twice is broken",
            )
        return moved, metrics

    def _before(self, completed: int) -> None:
        self._completed = completed
        self.trace.before(completed)

    def _compare_replicas(self, state: TrainState) -> None:
        """Raises Diverged where devices that should hold the same parameters do not."""
        if differences := self.engine.replicas.differences(state.params):
            raise Diverged(
                f"copies of the parameters differ between devices, in {len(differences)} leaves",
                where=f"before step {self._completed + 1}",
                why="\n".join(differences[:4]),
                fix="the same command again goes on from the last committed step; a device that does this twice is broken",
            )

    def _log(self, step: int, values: dict[str, float]) -> None:
        inner = ("verdict", "skipped_in_a_row")
        record: dict[str, Any] = {
            name: value for name, value in values.items() if name not in inner
        }
        record |= self.clock.read(step) | {"tokens": self.progress.tokens}
        record |= {
            "skipped_total": int(values["skipped_total"]),
            "peak_bytes": memory.peak(jax.local_devices()).bytes,
        }
        self._write(step, "train", record)

    def _write(self, step: int, split: str, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write({"step": step, "time_unix": time.time(), "split": split} | record)

    def _note_skipped(self, step: int, values: dict[str, float], layers: dict[str, Any]) -> None:
        """Writes down a step that was not applied, with what it had read, and says so."""
        found = forensics.evidence(self.engine, step, values, layers, self.rewinds.skips)
        self.spikes.write({"time_unix": time.time()} | found)
        self.console.say(
            f"step {step} was not applied: {found['kind']} (loss {values['loss_nats']:.4g}, gradient "
            f"{values['grad_norm']:.4g}); {int(values['skipped_total'])} skipped so far, see spikes.jsonl"
        )

    def _rewind(self, spent: BudgetSpent) -> None:
        """Goes back to a healthy checkpoint and around the batches about the first bad one; ends the run where that was done often enough.

        Raises:
          Diverged: where no rewind is left.
        """
        limits, made = self.run.guard, len(self.rewinds.made)
        if made >= limits.rewinds:
            rate = spent.values["learning_rate"]
            self.store.wait()
            raise Diverged(
                f"training cannot go on after step {spent.first - 1}, and {made} rewinds are used up",
                where=f"steps {spent.first} to {spent.step}; spikes.jsonl names their documents",
                why=f"{guard.words(int(spent.values['verdict']))}: loss {spent.values['loss_nats']:.4g}, "
                f"gradient norm {spent.values['grad_norm']:.4g}, learning rate {rate:.3g}",
                fix=f"--config.optim.lr={rate / 3:.1e} --workdir=runs/another",
            )
        self.store.wait()
        if self.directory.is_writer:
            self.rewinds.add(spent.first, self.store, limits)
        told = self.crew.share(f"rewind/{made}", self.rewinds.as_json()[made:])
        rewind = self.rewinds.made[made] if self.directory.is_writer else self.rewinds.take(told[0])
        self.console.say(
            f"rewind {made + 1} of {limits.rewinds}: steps {spent.first} to {spent.step} could not be applied; going back to "
            f"step {rewind.to}, leaving out batches {rewind.low} to {rewind.high - 1}"
        )
        self._open.close()
        self._take_up(self.store.record(rewind.to).meta if rewind.to else None)
        self._open_sinks()

    def _evaluate(self, state: TrainState, step: int) -> float | None:
        """Every validation set; the loss of the first ranks checkpoints. Samples too, where they are due."""
        run = self.run
        with self.clock.pause(), self.crew.watch.phase("eval"):
            every = None if run.eval.batches == "all" else run.eval.batches
            limit = None if step == run.train.steps else every
            results = self.engine.evaluate(state.params, limit=limit)
            for name, record in results.items():
                self._write(step, name, record)
            if self._is_sample_due(step):
                for prompt, text in self.sampler.draw(state.params):
                    self.samples.write({"step": step, "prompt": prompt, "text": text})
            self.evaluation = next(iter(results.values()))
            return self.evaluation["loss_nats"]

    def _save(self, state: TrainState, step: int, loss_nats: float | None) -> None:
        """Hands the state to the store, once what happened before it is on disk.

        Raises:
          BudgetSpent: where a parameter is not finite: such a state is never committed.
          SaveFailed: where the save before this one failed, and the one before that.
        """
        with self.clock.pause(), self.crew.watch.phase("save"):
            if not self.engine.is_finite((state.params, state.opt_state)):
                values = {
                    "verdict": float(guard.STATE_NOT_FINITE),
                    "learning_rate": self.run.optim.lr,
                }
                raise BudgetSpent(
                    step, step, values | dict.fromkeys(("loss_nats", "grad_norm"), float("nan"))
                )
            for sink in (self.metrics, self.samples, self.spikes):
                sink.flush()
            try:
                self.store.wait()
                self._failed_saves = 0
            except SaveFailed as error:
                self._count_failure(error)
            stopped_early = self.run.train.patience is not None and (
                self.progress.evaluations_without_gain >= self.run.train.patience
            )
            last = self.progress.last_skipped
            meta = {
                "step": step,
                "finished": step == self.run.train.steps or stopped_early,
                "config": config.to_json(self.run),
                "data": self.engine.data.fingerprint,
                "progress": dataclasses.asdict(self.progress),
                "evaluation": self.evaluation,
                "rewinds": self.rewinds.as_json(),
            }
            is_healthy = last is None or step - last > self.run.guard.budget
            self._is_retry_due = False
            self._saved = (state, step, loss_nats)
            self.store.save(step, state, meta, loss_nats=loss_nats, healthy=is_healthy)
            self.directory.step = step

    def _check_saves(self) -> None:
        """Once a step: a save that failed is tried once more, with the state of this step."""
        try:
            self.store.check()
        except SaveFailed as error:
            self._count_failure(error)
            self._is_retry_due = True

    def _count_failure(self, error: SaveFailed) -> None:
        """Frees what a failed save took up; a second one in a row ends the run. So does the first where there are peers:
        one process alone cannot save again, and all can start again.
        """
        self._failed_saves += 1
        if self.directory.is_writer:
            self.store.remove_torn()
        if self._failed_saves > 1 or self.crew.peers.count > 1:
            raise error
        self.console.say(f"{error}\ntrying once more")

    def _finish_saves(self) -> None:
        """Returns when the newest save is committed, tried once more if need be."""
        with self.crew.watch.phase("save"):
            try:
                self.store.wait()
            except SaveFailed as error:
                self._count_failure(error)
                assert self._saved is not None
                self._save(*self._saved)  # no step came after it, so its buffers are still there
                self.store.wait()
