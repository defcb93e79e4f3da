"""The compiled programs of a run: step, observer, gradient, evaluation. No files are written."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.core import backend, faults, random, tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, Diverged
from jaxlm.core.mean import Mean
from jaxlm.data import loader as loaders
from jaxlm.data.batch import Tokens
from jaxlm.data.dataset import Data
from jaxlm.data.loader import Gather, Loader, Piece
from jaxlm.evals import acceptance, means
from jaxlm.evals import loss as evals
from jaxlm.evals.preference import evaluate as evaluate_answers
from jaxlm.models import config as configs
from jaxlm.models.build import Blueprint
from jaxlm.monitor import sinks
from jaxlm.nn.intermediates import Kind
from jaxlm.objectives.build import build as build_objective
from jaxlm.objectives.config import Distill, value_rates
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.policy import PolicyLearning
from jaxlm.optim import average, groups, schedules
from jaxlm.optim import build as optimizers
from jaxlm.optim.average_config import NoAverage
from jaxlm.optim.qk_clip import qk_clip
from jaxlm.optim.schedules import LearningRate
from jaxlm.parallel import host, pipeline, rules
from jaxlm.parallel.replicas import Replicas
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility, oom
from jaxlm.recipes.plan.predict import Forecast
from jaxlm.recipes.setup import ShardedModel
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.layer_stats import LayerStatsCollector
from jaxlm.recipes.train.teacher import Teacher
from jaxlm.rl.rollout import allowed_ids
from jaxlm.training import gradient as gradients
from jaxlm.training import state as states
from jaxlm.training.gradient import Curvature
from jaxlm.training.observe import Observed, build_observer
from jaxlm.training.state import TrainState
from jaxlm.training.step import Metrics, StepSpec, build_step
from jaxlm.tune import surgery
from jaxlm.tune.config import b_rates, kept_leaves

Skips = tuple[tuple[int, int], ...]
RERUN = (
    "the same command again resumes from the last committed step; "
    "a device that does this twice is broken"
)


class TrainPrograms:
    """The state of a run and the functions that change it. Use it under the mesh of its model.

    Args:
      run: the resolved config.
      data: tokenizer and loaders.
      model: the model that is trained, with its shardings.
      schedule: learning rate instead of `run.schedule`, for measurements that are no training run.
      teacher: the frozen model that `run.objective.teacher` names.
      base: parameters of the model without its adapter, see `setup.abstract_base`; None without
        an adapter. They are no part of the state.

    Raises ConfigError if the objective has a teacher and `teacher` is None.
    """

    def __init__(
        self,
        run: Run,
        data: Data,
        model: ShardedModel,
        schedule: LearningRate | None = None,
        teacher: Teacher | None = None,
        base: Any = None,
    ):
        if run.objective.teacher and teacher is None:
            raise ConfigError(
                f"this command does not open the teacher of the objective {run.objective.name}",
                where="objective.teacher",
                why="its step runs without the files of a run",
                fix="--config.objective.name=causal    # the same model on the labels alone",
            )
        assert base is not None or not model.base, "an adapter changes the parameters of a base"
        self.run, self.data, self.model, self.teacher, self.base = run, data, model, teacher, base
        self.reference = ""  # of a preference run, for its header
        self.adapter: Any = None  # of the reference, if it is an adapter that the run began with
        # Figures of (parameters, validation set, most prompts), of a run that samples answers.
        self.held_out: Callable[[Any, Loader, int | None], dict[str, Any]] | None = None
        if backend.name() == "cpu":
            backend.keep_freed_memory()
        self.pace = run.pace
        self._axes = model.own(model.blueprint.axes)
        self._leaf_shapes = model.own(model.blueprint.shapes)
        self._optim = dataclasses.replace(
            run.optim,
            lr_scale=(*run.optim.lr_scale, *b_rates(run.tune), *value_rates(run.objective)),
            freeze=(*run.optim.freeze, *kept_leaves(run.tune)),
        )
        self._frozen = groups.frozen(self._optim, self._axes)
        schedule = schedule or schedules.build(
            run.schedule,
            lr=run.optim.lr,
            average=run.average,
            total=run.train.steps,
            tokens_per_step=self.pace,
        )
        config = model.blueprint.config
        self.optimizer = optimizers.build(
            self._optim,
            schedule,
            self._axes,
            shapes=self._leaf_shapes,
            width_ratio=config.width_ratio,
            balance_rate=configs.balance_rate(config),
            state_dtype=model.precision.moments,
        )
        self.shapes: TrainState = jax.eval_shape(self.abstract_init)  # traces the model: once
        self._layout = self._shardings()
        self.objective = self._build_objective()
        # A pipeline splits the batch into micro-batches itself.
        microbatches = run.train.microbatches if model.blueprint.schedule is None else 1
        self._eval_parts = microbatches if run.eval.batch == "auto" else 1
        self.spec = self._build_spec(schedule, microbatches)
        self._jit_training()
        self._jit_evaluation()
        self._rows = {
            phase.rows: host.host_rows(model.mesh, phase.rows) for phase in self.pace.phases
        }
        self._put = functools.partial(host.put, model.mesh)
        self.replicas = Replicas(model.mesh, model.own(model.shardings))
        self.is_finite: Callable[[Any], jax.Array] = jax.jit(tree.is_finite)

    def _build_objective(self) -> Objective[Any]:
        run = self.run
        objective = build_objective(run.objective, run.loss, run.architecture)
        if not isinstance(objective, PolicyLearning):
            return objective
        return dataclasses.replace(
            objective,
            temperature=run.rl.temperature,
            allowed=allowed_ids(self.data.tokenizer, self.model.blueprint.config.vocab),
            is_corrected=run.rl.correction != "none",
            most=run.rl.turns * run.rl.max_tokens,
        )

    def _build_spec(self, schedule: LearningRate, microbatches: int) -> StepSpec:
        run, model = self.run, self.model
        config, sizes = model.blueprint.config, dict(model.mesh.shape)
        largest = run.regularization.qk_clip  # logit
        captured: tuple[Kind, ...] = () if largest is None else ("logits",)
        return StepSpec(
            loss=self._loss(model.trained),
            optimizer=self.optimizer,
            schedule=schedule,
            key=random.stream(jax.random.key(run.seed), "train"),
            precision=model.precision,
            guard=run.guard,
            is_clipped=run.optim.clip_norm is not None,
            is_sampled=run.objective.samples_answers,
            axes=self._axes,
            shardings=model.own(model.gradients),
            microbatches=microbatches,
            sums_locally=divisibility.sums_locally(run, config, sizes),
            frozen=self._frozen,
            gradient_point=optimizers.gradient_point(self._optim, self._axes),
            curvature=self._curvature(),
            average=average.build(run.average, total=run.train.steps, tokens_per_step=self.pace),
            capture=captured,
            post_update=None
            if largest is None
            else lambda params, captured: qk_clip(params, captured.peaks, largest),
            is_measured=_is_logged(run),
        )

    def _jit_training(self) -> None:
        """Set `step`, `observe`, and `gradient`: the mean that the next step takes, unclipped."""
        run, model, spec = self.run, self.model, self.spec
        observed_model = setup.observer_model(model)
        observed = dataclasses.replace(
            spec,
            microbatches=divisibility.observer_microbatches(run, dict(model.mesh.shape)),
            sums_locally=False,
        )

        def step(
            state: TrainState, batch: Tokens, rate: jax.Array | float = 1.0, **extra: Any
        ) -> tuple[TrainState, Metrics]:
            loss = self._loss(model.trained, **extra)
            return build_step(dataclasses.replace(spec, loss=loss))(state, batch, rate)

        def observe(
            state: TrainState, batch: Tokens, rate: jax.Array | float = 1.0, **extra: Any
        ) -> Observed:
            loss = self._loss(observed_model, **extra)
            observer = build_observer(dataclasses.replace(observed, loss=loss), run.log.layers)
            return observer(state, batch, rate)

        def gradient(state: TrainState, batch: Tokens, **extra: Any) -> Any:
            loss = self._loss(model.trained, **extra)
            mean = gradients.build_gradient(dataclasses.replace(spec, loss=loss))
            key = jax.random.fold_in(spec.key, state.step)
            return mean(spec.point(state), batch, key, state.guard.scale.factor)[0]

        programs: list[Callable[..., Any]] = [step, observe, gradient]
        if run.train.offload:
            layout = self._shardings(is_fetched=True)
            programs = [functools.partial(with_state_on_device, each, layout) for each in programs]
        step_program, observe_program, gradient_program = programs
        self.step = jax.jit(
            step_program,
            donate_argnums=0,
            out_shardings=(self._layout, None),
            compiler_options=rules.compiler_options(model.mesh),
        )
        self.observe = jax.jit(observe_program, out_shardings=states.replicated(model.mesh))
        self.gradient = jax.jit(gradient_program)

    def _jit_evaluation(self) -> None:
        """Set `eval_step`, and `accept_step` in its place for a student: None for others."""
        blueprint, objective = self.model.blueprint, self.run.objective
        token_bytes = setup.token_bytes(self.model, self.data.tokenizer)
        prefix = setup.prefix(self.data.tokenizer)
        parts: dict[str, Any] = {"chunk": self.run.loss.chunk, "microbatches": self._eval_parts}
        self.eval_step = jax.jit(
            self._answer_sums
            if objective.compares_answers
            else evals.build(blueprint.merge, token_bytes, prefix=prefix, **parts)
        )
        self.accept_step = None
        if self.teacher is not None and isinstance(objective, Distill):
            merges = blueprint.merge, self.teacher.blueprint.merge
            accept = acceptance.build(*merges, evals.sums_function(token_bytes, prefix), **parts)
            self.accept_step = jax.jit(accept)

    @property
    def extra_inputs(self) -> dict[str, Any]:
        """Inputs of step and observer after state, batch and rate: frozen parameters.

        They are those of a teacher, of an adapter's base, and of the adapter that it began with.
        """
        teacher = None if self.teacher is None else self.teacher.params
        inputs = {"teacher": teacher, "base": self.base, "adapter": self.adapter}
        return {name: params for name, params in inputs.items() if params is not None}

    def whole(self, params: Any) -> Any:
        """Return parameters of the state with those of the base."""
        return params if self.base is None else tree.merge_leaves(self.base, params)

    @property
    def targets(self) -> int:
        """Slots of the decoder's row of an encoder-decoder; 0 for other models."""
        if self.run.architecture != "encoder-decoder":
            return 0
        return self.run.objective.target_length(self.run.data.sequence)

    def abstract_init(self, base: Any = None) -> TrainState:
        """Return the state before the first update. Trace it, do not call it.

        An adapter begins at the parameters of its base, if they are given.
        """
        key, model = random.key(self.run.seed, "init"), self.model
        if base is None:
            params = model.own(model.blueprint.init(key))
        else:
            change = setup.surgery_of(self.run, self.data.tokenizer.encode)
            assert change is not None
            params = model.own(surgery.adapted_params(model.stored, change, base, key))
        averaged = None if isinstance(self.run.average, NoAverage) else average.init(params)
        return states.init_state(params, self.optimizer, self.run.guard, averaged)

    def init_state(self) -> TrainState:
        """Return the state before the first update, created with its shardings."""
        return jax.jit(self.abstract_init, out_shardings=self._layout)(self.base)

    def averaged(self, state: TrainState) -> Any:
        """Return the average of the parameters, in their dtypes, of a run that keeps one."""
        return jax.tree.map(lambda a, p: a.astype(p.dtype), state.average, state.params)

    def abstract(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state, for a restore."""
        return states.abstract(self.shapes, self._layout)

    def batches(
        self,
        start: int,
        skips: Skips = (),
        warn: Log = lambda _: None,
        lost: list[Piece] | None = None,
        gather: Gather = lambda value: [value],
    ) -> Generator[Tokens, None, None]:
        """Yield the global batches of the steps after `start`, on the devices, without end.

        Raise ConfigError if the rows are samples of the model.

        Args:
          start: completed steps.
          skips: ranges of batches that are left out.
          warn: called with a description of data that cannot be read.
          lost, gather: see `Loader.batches`.
        """
        check_has_rows(self.run)
        stream = self.data.train.batches(
            start,
            batch=self.pace,
            rows=self._rows,
            skips=skips,
            warn=warn,
            lost=lost,
            gather=gather,
        )
        for step, batch in enumerate(stream, start):
            yield self._put(inject_faults(batch, loaders.batch_number(step, skips)))

    def place(self, batch: Tokens, number: int) -> Tokens:
        """Return a whole batch of NumPy arrays on the devices; `number` is that of the batch."""
        rows = self._rows[len(batch.tokens)]
        return self._put(inject_faults(jax.tree.map(lambda x: x[rows], batch), number))

    def lr_scale(self, value: float) -> jax.Array:
        """Return the factor of the learning rate as an input of the step."""
        where = states.replicated(self.model.mesh)
        return jax.make_array_from_callback((), where, lambda _: np.asarray(value, np.float32))

    def evaluate(self, params: Any, *, limit: int | None) -> dict[str, dict[str, Any]]:
        """Return the figures of each validation set, and the `share` of its rows that was read.

        `limit` is a number of batches of randomly chosen rows; None reads the whole set.
        """
        run = self.run
        size = run.evaluated_rows
        rows = host.host_rows(self.model.mesh, size)
        adapter = {} if self.adapter is None else {"adapter": self.adapter}
        eval_step = functools.partial(self.eval_step, self.whole(params), **adapter)
        results: dict[str, dict[str, Any]] = {}
        for name, loader in self.data.validation.items():
            if self.held_out is not None:
                most = None if limit is None else limit * size
                share = min((most or math.inf) / loader.shards.documents, 1.0)
                results[name] = self.held_out(params, loader, most) | {"share": share}
                continue
            batches = loader.evaluation(batch=size, rows=rows, limit=limit)
            sample = evals.EvaluatedRows(
                loader.evaluated(batch=size, limit=limit), loader.plan.rows
            )
            if run.objective.compares_answers:
                record = evaluate_answers(eval_step, batches, self._put)
            elif self.accept_step is not None:
                record = self._accepted(params, batches, sample)
            else:
                record = evals.evaluate(eval_step, batches, self._put, sample).record()
            results[name] = record | {"share": sample.rows / sample.of}
        return results

    def evaluated(self, run: Run) -> dict[str, int]:
        """Return the rows of each set that an evaluation between steps of this run reads.

        `run` has these validation sets. Equal numbers are the same rows.
        """
        size, limit = run.evaluated_rows, run.evaluated_batches
        sets = self.data.validation.items()
        return {name: loader.evaluated(batch=size, limit=limit) for name, loader in sets}

    def evaluates_all(self, name: str) -> bool:
        """Return whether an evaluation between two steps reads all rows of a validation set."""
        return self.evaluated(self.run)[name] == self.data.validation[name].plan.rows

    def _accepted(
        self, params: Any, batches: Iterable[Tokens], sample: evals.EvaluatedRows
    ) -> dict[str, Any]:
        """Return the figures of a set, and the acceptance as a draft of the teacher."""
        assert self.teacher is not None
        assert self.accept_step is not None
        accept = functools.partial(self.accept_step, self.whole(params), self.teacher.params)
        agreements: list[dict[str, Mean]] = []

        def step(batch: Tokens) -> evals.Sums:
            sums, agreement = accept(batch)
            agreements.append(agreement)
            return sums

        record = evals.evaluate(step, batches, self._put, sample).record()
        return record | means.figures(means.added(agreements))

    def bytes_per_device(self) -> dict[str, int]:
        """Return the bytes on each device of parameters, gradients, optimizer state and average.

        Gradients exist only while a step is computed.
        """
        model, state = self.model, self.abstract()

        def size(leaves: Any, layout: Any) -> int:
            parts = jax.tree.map(
                lambda x, where: math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize,
                leaves,
                layout,
            )
            return sum(jax.tree.leaves(parts))

        def trained_grads(params: Any) -> Any:
            return gradients.reduce_dtype_grads(params, model.precision, self._axes)

        sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
        sizes = {
            "parameters": size(state.params, sharding.params),
            "gradients": size(
                jax.eval_shape(trained_grads, tree.drop_leaves(state.params, self._frozen)),
                tree.drop_leaves(model.own(model.gradients), self._frozen),
            ),
            "optimizer": size(state.opt_state, sharding.opt_state),
        }
        if state.average:
            sizes["average"] = size(state.average, sharding.average)
        for name, params in self.extra_inputs.items():
            sizes[name] = size(params, jax.tree.map(lambda leaf: leaf.sharding, params))
        return sizes

    def _loss(
        self, blueprint: Blueprint, teacher: Any = None, base: Any = None, adapter: Any = None
    ) -> gradients.LossOfParams:
        """Return the function (params, batch, key) -> loss of the objective.

        `teacher`, `base` and `adapter` are the `extra_inputs`.
        """

        def loss(params: Any, batch: Tokens, key: jax.Array) -> Any:
            whole = params if base is None else tree.merge_leaves(base, params)
            taught = self.taught(teacher, base, adapter)
            return self.objective.loss(blueprint.merge(whole), batch, key, taught)

        return loss

    def taught(self, teacher: Any = None, base: Any = None, adapter: Any = None) -> Any:
        """Return the frozen model that the objective reads, of the `extra_inputs`; None if none.

        adapter_off is the base, with the adapter that the run began with, if any.
        """
        if self.run.objective.compared_with == "adapter_off":
            if adapter is None:
                return self.model.stored.merge(base)
            return self.model.blueprint.merge(tree.merge_leaves(base, adapter))
        return None if self.teacher is None else self.teacher.blueprint.merge(teacher)

    def _answer_sums(self, params: Any, batch: Tokens, adapter: Any = None) -> dict[str, Mean]:
        """Return the metrics of a batch of answers, without dropout; `params` are all."""
        taught = None
        if self.run.objective.compared_with == "adapter_off":
            leaves = tree.leaves(params)
            base = tree.map_with_path(lambda path, _: leaves[path], self.model.stored.shapes)
            taught = self.taught(None, base, adapter)
        model = self.model.blueprint.merge(params)

        def metrics(part: Tokens) -> dict[str, Mean]:
            return self.objective.loss(model, part, None, taught).metrics

        if self._eval_parts == 1:
            return metrics(batch)
        split = functools.partial(pipeline.split_microbatches, parts=self._eval_parts)
        sums = jax.lax.map(metrics, jax.tree.map(split, batch))
        return jax.tree.map(lambda leaf: leaf.sum(0), sums)

    def _curvature(self) -> Curvature | None:
        every = self.run.optim.curvature_every
        if every is None:
            return None

        def loss(params: Any, batch: Tokens, key: jax.Array) -> Any:
            del key
            return self.objective.curvature_loss(self.model.trained.merge(params), batch)

        return Curvature(loss, every)

    def _shardings(self, *, is_fetched: bool = False) -> Any:
        """Return the sharding of each leaf of the state between steps, or during one if fetched."""
        model, mesh = self.model, self.model.mesh
        shapes: Any = self.shapes
        axes = optimizers.state_axes(
            self._optim, self.optimizer, self._leaf_shapes, self._axes, mesh.shape
        )
        replicated = states.replicated(mesh)
        opt_state = rules.shardings(mesh, axes, shapes.opt_state)
        if "optimizer" in self.run.train.offload and not is_fetched:
            opt_state = jax.tree.map(
                lambda leaf, where: where.with_memory_kind("pinned_host") if leaf.ndim else where,
                shapes.opt_state,
                opt_state,
            )
        return shapes._replace(
            step=replicated,
            params=model.own(model.shardings),
            opt_state=opt_state,
            guard=jax.tree.map(lambda _: replicated, shapes.guard),
            average=None if shapes.average is None else model.own(model.shardings),
        )


def check_has_rows(run: Run) -> None:
    """Raise ConfigError if the rows of a run are samples of its model, and not of its data."""
    if run.objective.samples_answers:
        raise ConfigError(
            f"this command draws no rollouts of the objective {run.objective.name}",
            where="objective.name",
            why="its rows are samples of the model, which only `jaxlm train` draws and rewards",
            fix="name a run of the objective causal, on answers instead of prompts",
        )


def without_data(run: Run, mesh: Mesh, vocab: int) -> TrainPrograms:
    """Return the programs of a run on a mesh, without data, to compile or to time its step.

    A teacher of the objective, and the base of an adapter, are shapes of the run's own model.
    """
    model = setup.build_sharded_model(run, vocab, mesh)
    teacher = None
    if run.objective.teacher:
        teacher = Teacher(model.blueprint, setup.abstract_params(model))
    tokenizer = SimpleNamespace(token_bytes=np.ones(vocab, np.int32), lead="", encode=None, ends=())
    data: Any = SimpleNamespace(tokenizer=tokenizer)
    base = setup.abstract_base(model) if model.base else None
    return TrainPrograms(run, data, model, teacher=teacher, base=base)


def with_state_on_device(
    program: Callable[..., Any], layout: TrainState, state: TrainState, *inputs: Any, **extra: Any
) -> Any:
    """Call a program with a state that is offloaded; `jax.jit` places its outputs."""
    return program(jax.device_put(state, layout), *inputs, **extra)


def _is_logged(run: Run) -> Callable[[jax.Array], jax.Array] | None:
    """Return the function (completed steps) -> whether that step is logged.

    None if all steps are, or if it depends on the time or the size of batches.
    """
    unit = run.log.every.unit
    if unit == "second" or (unit == "token" and run.train.batch_warmup):
        return None
    every = run.log.every.steps(run.train.steps, run.tokens_per_step)
    if every <= 1:
        return None
    return lambda completed: (completed % every == 0) | (completed == run.train.steps)


def inject_faults(batch: Tokens, number: int) -> Tokens:
    """Return a batch with the faults that a test injects: its loss will not be finite."""
    for fault in faults.planned("batch"):
        if fault.is_at(number):
            if (rollout := batch.rollout) is None:
                batch = batch._replace(weights=batch.weights * float("nan"))
            else:
                spoilt = rollout._replace(advantages=rollout.advantages * float("nan"))
                batch = batch._replace(rollout=spoilt)
    return batch


class CompiledStep:
    """The step of a run. It is compiled at the first batch of each phase, with a visible timer.

    Before a step that is due by `guard.compare_every`, the copies of the parameters on several
    devices are compared. A step that is due by `guard.repeat_every` is computed twice. A step
    whose layer statistics are due is observed first.

    Args:
      context: the run around the programs.
      programs: the programs of the run.
      forecast: the plan of the run; None without one.
      on_compiled: called with the step when it is compiled, before it first runs.
      pause: context whose time belongs to no step.
    """

    def __init__(
        self,
        context: RunContext,
        programs: TrainPrograms,
        forecast: Forecast | None,
        on_compiled: Callable[[jax.stages.Compiled], object],
        pause: Callable[[], contextlib.AbstractContextManager[object]],
    ):
        self._context, self._programs, self._forecast = context, programs, forecast
        self._on_compiled, self._pause = on_compiled, pause
        self.layer_stats: LayerStatsCollector | None = None
        self._steps: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._observers: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self.completed = 0  # steps before the next one
        self._scale, self._scale_input = 1.0, programs.lr_scale(1.0)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Compute one step. Raise Diverged if devices disagree."""
        shape = batch.tokens.shape
        if shape not in self._steps:
            if self._steps:  # a pause may not begin while a step is computed
                jax.block_until_ready(state)
            self._compile(shape, state, batch)
        step, guard, number = self._steps[shape], self._programs.run.guard, self.completed + 1
        inputs = (batch, self._scale_input)
        extra = self._programs.extra_inputs
        if self.layer_stats is not None:
            observe = functools.partial(self._observers[shape], state, *inputs, **extra)
            self.layer_stats.observe_if_due(observe, number)
        if guard.compare_every and number % guard.compare_every == 0:
            self._compare_replicas(state)
        if guard.repeat_every and number % guard.repeat_every == 0:
            return self._repeated(step, state, inputs)
        return step(state, *inputs, **extra)

    def set_lr_scale(self, scale: float) -> None:
        """Multiply the learning rate of the schedule by `scale` from the next step on."""
        if scale != self._scale:
            self._scale, self._scale_input = scale, self._programs.lr_scale(scale)

    def _compile(self, shape: tuple[int, ...], state: TrainState, batch: Any) -> None:
        programs, (rows, length) = self._programs, shape
        of = f" for {rows} rows x {length} tokens" if len(programs.pace.phases) > 1 else ""
        inputs = (state, batch, self._scale_input)

        def compiled(program: Any, name: str) -> jax.stages.Compiled:
            with (
                self._pause(),
                self._context.processes.watch.phase("compile"),
                self._context.console.timer(f"compiling the {name}{of}"),
            ):
                if name == "step":
                    faults.point("compile")
                return program.lower(*inputs, **programs.extra_inputs).compile()

        self._steps[shape] = compiled(programs.step, "step")
        if programs.run.log.layers:
            self._observers[shape] = observer = compiled(programs.observe, "observer of layers")
            oom.check(programs.run, self._forecast, compiled_memory(observer)["total"])
            if self.layer_stats is None:
                records = sinks.read(self._context.directory.path / "metrics.jsonl")
                sizes = dict(programs.model.mesh.shape)
                self.layer_stats = LayerStatsCollector(programs.run, sizes, records)
        self._on_compiled(self._steps[shape])

    def _compare_replicas(self, state: TrainState) -> None:
        differences = self._programs.replicas.differences(state.params)
        what = "copies of the parameters differ between devices"
        self._refuse(what, f"before step {self.completed + 1}", differences)

    def _refuse(self, what: str, where: str, differences: Sequence[str]) -> None:
        if differences:
            what, why = f"{what} in {len(differences)} leaves", "\n".join(differences[:4])
            raise Diverged(what, where=where, why=why, fix=RERUN)

    def _repeated(
        self, step: jax.stages.Compiled, state: TrainState, inputs: tuple[Any, ...]
    ) -> tuple[TrainState, Metrics]:
        """Compute one step twice from the same state: rare miscalculations leave no other trace."""
        extra = self._programs.extra_inputs
        second, _ = step(jax.tree.map(jnp.copy, state), *inputs, **extra)
        first, metrics = step(state, *inputs, **extra)
        differences = self._programs.replicas.changes(second.params, first.params)
        number = f"step {self.completed + 1}"
        self._refuse(f"{number} gave another result when it was repeated,", number, differences)
        return first, metrics


def compiled_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes on a device that a program needs, by kind, from the compiler."""
    memory: Any = compiled.memory_analysis()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    return parts | {"total": sum(parts.values())}
