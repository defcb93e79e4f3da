"""Training, from a config to a run directory: the story in the order you would tell it."""

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint.store import Store
from jaxlm.core import config, random, tree
from jaxlm.core.config import Loaded
from jaxlm.core.errors import ConfigError
from jaxlm.data import baselines, peek, prepare
from jaxlm.data.prepare import Data
from jaxlm.evals import loss as evals
from jaxlm.models import cost
from jaxlm.monitor import environment, memory, peaks, plots, report, sinks, words
from jaxlm.monitor.clock import Clock
from jaxlm.monitor.console import Console
from jaxlm.monitor.profile import Trace
from jaxlm.objectives.token_nll import token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim import schedules
from jaxlm.parallel import host, rules
from jaxlm.recipes import assembly, devices, resume
from jaxlm.recipes.assembly import Assembly
from jaxlm.recipes.config import Run
from jaxlm.recipes.sample import Sampler
from jaxlm.train import loop
from jaxlm.train import state as states
from jaxlm.train import step as steps
from jaxlm.train.cadence import Cadence
from jaxlm.train.loop import Hooks, Progress
from jaxlm.train.rundir import RunDir, read_json
from jaxlm.train.signals import StopRequest
from jaxlm.train.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says beside the config."""

    workdir: Path
    arguments: list[str]  # the words after `jaxlm`, for command.sh
    stop_at: int | None = None
    allow_change: tuple[str, ...] = ()
    cpu_devices: int | None = None
    quiet: bool = False


def pretrain(loaded: Loaded, options: Options) -> dict[str, Any]:
    """Trains, or goes on training, in a run directory; returns the last evaluation and where things are.

    Raises:
      JaxlmError: for whatever a user can cause, before anything is compiled where it can be known.
    """
    run: Run = loaded.value
    # What costs nothing to find out comes first: a wrong setting must not cost a minute.
    prepare.find(run.data)
    with RunDir(options.workdir) as directory, contextlib.ExitStack() as stack:
        devices.start(options.cpu_devices)
        store = Store(directory.checkpoints, run.checkpoint)
        stack.callback(store.release)
        meta = _latest_meta(store, directory)
        start = meta["step"] if meta else 0
        directory.step = start
        changes = []
        if meta:
            changes = resume.check(
                config.from_json(Run, meta["config"]), run, options.allow_change, start
            )
            if start >= run.train.steps or (meta["finished"] and not changes):
                return {
                    "step": start,
                    "complete": True,
                    "workdir": str(options.workdir),
                    **(meta["evaluation"] or {}),
                }
        mesh = devices.build_mesh(run.mesh)
        host.check_rows(mesh, run.train.batch, run.train.microbatches)
        assembly.check_fit(run, mesh)
        directory.begin()

        log = stack.enter_context(open(directory.path / "log.txt", "a", encoding="utf-8"))
        screen = None if options.quiet or "console" not in run.log.sinks else sys.stderr
        console = stack.enter_context(Console(screen, log=log, total=run.train.steps))
        data = prepare.open_data(run.data, seed=run.seed, say=console.say)
        if meta:
            resume.check_data(meta["data"], data.fingerprint, options.allow_change)
        model = assembly.assemble(run, assembly.vocabulary(run, data.tokenizer.size), mesh)
        _check_vocabulary(run, data)
        _describe(directory, loaded, options, data)
        stop = stack.enter_context(StopRequest())
        with jax.set_mesh(mesh):
            session = _Session(run, directory, console, store, data, model, start, meta, stack)
            _header(session, changes)
            session.train(stop, options.stop_at)
        return _finish(session)


class _Session:
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
        loop.run(
            step,
            state,
            map(
                self.put, self.data.train.batches(self.start, batch=run.train.batch, rows=self.rows)
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
        self.store.close()

    def _state(self) -> TrainState:
        """The state before the first step of this process, on the mesh from birth."""
        blueprint, mesh = self.model.blueprint, self.model.mesh
        fresh = functools.partial(_fresh, blueprint, self.optimizer, self.run.seed)
        shapes = jax.eval_shape(fresh)
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
        return jax.jit(fresh, out_shardings=shardings)()

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


def _fresh(blueprint: Any, optimizer: Any, seed: int) -> TrainState:
    return states.fresh(blueprint.init(random.key(seed, "init")), optimizer)


def _latest_meta(store: Store, directory: RunDir) -> dict[str, Any] | None:
    """The JSON of the newest committed step; None in a new directory."""
    committed = store.steps()
    return store.meta(committed[-1]) if committed else None


def _check_vocabulary(run: Run, data: Data) -> None:
    if run.model.vocab != "auto" and run.model.vocab < data.tokenizer.size:
        raise ConfigError(
            f"the tokenizer has {data.tokenizer.size} ids and the model only {run.model.vocab}",
            where="model.vocab",
            why=f"id {data.tokenizer.size - 1} would be past the embedding's last row",
            fix="--config.model.vocab=auto",
        )


def _padded_bytes(data: Data, model: Assembly) -> np.ndarray:
    """Bytes that each id of the model stands for; none for ids that only fill the vocabulary up."""
    known = data.tokenizer.token_bytes
    return np.pad(known, (0, model.blueprint.config.vocab - len(known)))


def _describe(directory: RunDir, loaded: Loaded, options: Options, data: Data) -> None:
    """Writes what the run was started with. A config that replaces another leaves the old one beside it, by its step."""
    path = directory.path / "config.json"
    wanted = config.to_json(loaded.value)
    if path.exists() and (before := read_json(directory.path, "config.json")) != wanted:
        directory.write_json(f"config.{directory.step}.json", before)
    directory.write_json("config.json", wanted)
    directory.write_json(
        "provenance.json", {name: str(origin) for name, origin in loaded.provenance.items()}
    )
    directory.write_json("environment.json", environment.facts())
    directory.write_command(options.arguments)
    directory.write_bytes("tokenizer", data.tokenizer.serialise())


def _header(session: _Session, changes: list[config.Change]) -> None:
    run, data, mesh = session.run, session.data, session.model.mesh
    decoder = session.model.blueprint.config
    train = data.train.shards.manifest
    kind = mesh.devices.flat[0].device_kind
    shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    state_bytes = tree.size_bytes(
        jax.eval_shape(functools.partial(_fresh, session.model.blueprint, session.optimizer, 0))
    )
    facts = [
        ("devices", f"{mesh.devices.size} x {kind}, mesh {shape}"),
        (
            "model",
            f"{run.model.family}, {words.count(cost.parameters(decoder))} parameters: {decoder.depth} layers, "
            f"{decoder.width} wide, {decoder.vocab} ids ({data.tokenizer.size} in use)",
        ),
        (
            "data",
            f"{words.count(train.documents)} documents, {words.count(train.tokens)} tokens, {words.size(train.bytes)}; "
            f"{data.train.epochs(run.train.steps, run.train.batch):.2f} epochs",
        ),
        ("", _example(session)),
        ("memory", f"{words.size(state_bytes)} of weights and optimizer state over all devices"),
        (
            "run",
            f"{run.train.steps} steps of {run.train.batch} rows x {run.data.sequence} tokens, "
            f"{run.optim.name} at {run.optim.lr:g}, {run.schedule.name}, {run.precision.compute}",
        ),
    ]
    if session.start:
        facts.append(("resumed", f"after step {session.start}"))
    facts += [("changed", str(change)) for change in changes]
    session.console.block(f"jaxlm train, {session.directory.path}", facts)


def _example(session: _Session) -> str:
    """The start of one row, its trained tokens marked."""
    first = session.data.train.at(session.start, batch=session.run.train.batch, rows=slice(0, 1))
    text = peek.rendered(first, session.data.tokenizer, 0)[0].replace("\n", "\\n")
    return text[:150] + (" ..." if len(text) > 150 else "")


def _finish(session: _Session) -> dict[str, Any]:
    """The yardsticks, the plots, the report, and the closing block."""
    path, progress = session.directory.path, session.progress
    last = session.directory.step
    answer = {
        "step": last,
        "complete": last >= session.run.train.steps,
        "workdir": str(path),
        **(session.evaluation or {}),
    }
    if session.data.validation and session.evaluation:
        text = baselines.stored_text(next(iter(session.data.validation.values())).shards)
        known = baselines.bits_per_byte(text)
        session.directory.write_json("baselines.json", known)
        ours = session.evaluation["bits_per_byte"]
        table = sorted([*known.items(), ("this run", ours or math.nan)], key=lambda row: -row[1])
        session.console.block(
            "validation set, bits per byte",
            [(name, f"{bits:.4f}" + (" <" if name == "this run" else "")) for name, bits in table],
        )
        answer["baselines"] = known
    for sink in (*session.sinks, session.samples):
        sink.close()
    plots.draw(path)
    answer["report"] = str(report.write(path))
    session.console.block(
        f"done at step {last}, {words.count(progress.tokens)} tokens",
        [
            (
                "best",
                f"step {progress.best_step}, {progress.best_loss:.4f} nats"
                if progress.best_loss is not None
                else "no evaluation",
            ),
            ("report", str(path / "report.html")),
            (
                "next",
                f"jaxlm eval --workdir={path}\njaxlm generate --workdir={path} --prompt='...'",
            ),
        ],
    )
    return answer
