"""What computes in a run: data, model, optimizer and the compiled step, with nothing that writes."""

import functools
import math
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.core import allocator, backend, faults, random, tree
from jaxlm.data import loader as loaders
from jaxlm.data.batch import Tokens
from jaxlm.data.dataset import Data
from jaxlm.evals import loss as evals
from jaxlm.models import config as configs
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.objectives.config import mtp_settings
from jaxlm.objectives.loss import sampled_label_nll, token_nll
from jaxlm.optim import average, groups, schedules
from jaxlm.optim import build as optimizers
from jaxlm.optim.average_config import NoAverage
from jaxlm.optim.qk_clip import qk_clip
from jaxlm.optim.schedules import LearningRate
from jaxlm.parallel import compiler, host, rules
from jaxlm.parallel.replicas import Replicas
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from jaxlm.recipes.setup import ShardedModel
from jaxlm.recipes.train import layer_stats
from jaxlm.training import gradient as gradients
from jaxlm.training import observe
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.curvature import Curvature
from jaxlm.training.state import TrainState

Skips = tuple[tuple[int, int], ...]


class TrainPrograms:
    """The state of a run and the functions that move it. Used under its model's mesh.

    Args:
      schedule: what the learning rate follows instead of `run.schedule`, where it is no training run.
    """

    def __init__(
        self, run: Run, data: Data, model: ShardedModel, schedule: LearningRate | None = None
    ):
        self.run, self.data, self.model = run, data, model
        if backend.name() == "cpu":
            allocator.keep_freed()
        blueprint, self.pace = model.blueprint, run.pace
        length: dict[str, Any] = {"total": run.train.steps, "tokens_per_step": self.pace}
        schedule = schedule or schedules.build(
            run.schedule, lr=run.optim.lr, average=run.average, **length
        )
        self.optimizer = optimizers.build(
            run.optim,
            schedule,
            blueprint.axes,
            shapes=blueprint.shapes,
            width_ratio=blueprint.config.width_ratio,
            balance_rate=configs.balance_rate(blueprint.config),
            state_dtype=model.precision.moments,
        )
        self.shapes: TrainState = jax.eval_shape(
            self.abstract_init
        )  # once: that is a trace of the model
        self._layout = self._shardings()
        self._frozen = groups.frozen(run.optim, blueprint.axes)
        self._ahead = optimizers.ahead(run.optim, blueprint.axes)
        clipped: tuple[Kind, ...] = () if run.regularisation.qk_clip is None else ("logits",)
        shared: dict[str, Any] = dict(
            key=random.stream(jax.random.key(run.seed), "train"),
            precision=model.precision,
            axes=blueprint.axes,
            shardings=model.gradients,
            gradient_point=self._ahead,
            frozen=self._frozen,
            curvature=_curvature(run, model.trained.merge),
        )
        further = _further(run)
        loss = functools.partial(_loss, model.trained.merge, run.loss, further)
        # A pipeline deals the batch out itself.
        microbatches = run.train.microbatches if blueprint.schedule is None else 1
        step = steps.build_step(
            loss,
            self.optimizer,
            schedule,
            guard=run.guard,
            microbatches=microbatches,
            is_measured=_is_logged(run),
            average=average.build(run.average, **length),
            capture=clipped,
            post_update=_clipping(run),
            **shared,
        )
        observer = observe.build(
            functools.partial(_loss, setup.observer_model(run, model).merge, run.loss, further),
            self.optimizer,
            capture=run.log.layers,
            microbatches=layer_stats.microbatches_for_noise(run, dict(model.mesh.shape)),
            **shared,
        )
        taken = gradients.build_gradient(
            loss,
            precision=model.precision,
            axes=blueprint.axes,
            shardings=model.gradients,
            frozen=self._frozen,
            microbatches=microbatches,
        )

        def gradient(state: TrainState, batch: Tokens) -> Any:
            own_key = jax.random.fold_in(shared["key"], state.step)
            return taken(self.gradient_point(state), batch, own_key, state.guard.scale.factor)[0]

        if run.train.offload:
            fetched = self._shardings(is_fetched=True)
            step, observer, gradient = (
                functools.partial(with_state_on_device, each, fetched)
                for each in (step, observer, gradient)
            )
        self.gradient = jax.jit(gradient)  # the mean one that the next step takes, before clipping
        self.observe = jax.jit(observer, out_shardings=states.replicated(model.mesh))
        self.step = jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(self._layout, None),
            compiler_options=compiler.options(model.mesh),
        )
        self._eval_step = jax.jit(
            evals.build(
                blueprint.merge,
                setup.token_bytes(model, data.tokenizer),
                chunk=run.loss.chunk,
                prefix=setup.prefix(data.tokenizer),
            )
        )
        self._rows = {
            stage.rows: host.host_rows(model.mesh, stage.rows) for stage in self.pace.phases
        }
        self._put = functools.partial(host.put, model.mesh)
        self.replicas = Replicas(model.mesh, model.shardings)
        self.is_finite: Callable[[Any], jax.Array] = jax.jit(_is_finite)

    @property
    def targets(self) -> int:
        """Slots of a row that a decoder writes beside one that is read; 0 where they are one."""
        return predict.decoder_tokens(self.run)

    def abstract_init(self) -> TrainState:
        """The state before the first update; to be traced, not called."""
        params = self.model.blueprint.init(random.key(self.run.seed, "init"))
        averaged = None if isinstance(self.run.average, NoAverage) else average.first(params)
        return states.fresh(params, self.optimizer, self.run.guard, averaged)

    def init_state(self) -> TrainState:
        """The state before the first update, on the mesh from birth."""
        return jax.jit(self.abstract_init, out_shardings=self._layout)()

    def gradient_point(self, state: TrainState) -> Any:
        """The parameters at which the next step takes its gradient."""
        return self._ahead(state.params, state.opt_state) if self._ahead else state.params

    def averaged(self, state: TrainState) -> Any:
        """The average of the parameters, in their dtypes; the run keeps one."""
        return jax.tree.map(lambda a, p: a.astype(p.dtype), state.average, state.params)

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for a restore."""
        return states.abstract(self.shapes, self._layout)

    def batches(
        self, start: int, skips: Skips = (), warn: Callable[[str], None] = lambda _: None
    ) -> Generator[Tokens, None, None]:
        """The global batches that the steps after `start` read, on the devices; without end. `warn` is told what was lost."""
        stream = self.data.train.batches(
            start, batch=self.pace, rows=self._rows, skips=skips, warn=warn
        )
        for step, batch in enumerate(stream, start):
            yield self._put(inject_faults(batch, loaders.number(step, skips)))

    def lr_scale(self, value: float) -> jax.Array:
        """What the learning rate is multiplied by, as a step takes it."""
        where = states.replicated(self.model.mesh)
        return jax.make_array_from_callback((), where, lambda _: np.asarray(value, np.float32))

    def evaluate(self, params: Any, *, limit: int | None) -> dict[str, dict[str, Any]]:
        """Return the figures of each validation set, and the `share` of its rows they are of.

        `limit` is a number of batches of rows that are drawn, None for the whole set.
        """
        run = self.run
        size = run.train.batch if run.eval.batch == "auto" else run.eval.batch
        rows = host.host_rows(self.model.mesh, size)
        eval_step = functools.partial(self._eval_step, params)
        found = {}
        for name, loader in self.data.validation.items():
            batches = loader.evaluation(batch=size, rows=rows, limit=limit)
            sample = evals.Sample(loader.evaluated(batch=size, limit=limit), loader.plan.rows)
            result = evals.evaluate(eval_step, batches, self._put, sample)
            found[name] = result.record() | {"share": sample.rows / sample.of}
        return found

    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on each device by what they are: parameters, gradients (while a step is computed), optimizer's state, average."""
        model, state = self.model, self.abstract()

        def size(leaves: Any, layout: Any) -> int:
            parts = jax.tree.map(
                lambda x, where: math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize,
                leaves,
                layout,
            )
            return sum(jax.tree.leaves(parts))

        sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
        return {
            "parameters": size(state.params, sharding.params),
            "gradients": size(
                jax.eval_shape(
                    functools.partial(
                        gradients.reduce_dtype_grads,
                        precision=model.precision,
                        axes=model.blueprint.axes,
                    ),
                    tree.drop_leaves(state.params, self._frozen),
                ),
                tree.drop_leaves(model.gradients, self._frozen),
            ),
            "optimizer": size(state.opt_state, sharding.opt_state),
        } | ({"average": size(state.average, sharding.average)} if state.average else {})

    def _shardings(self, *, is_fetched: bool = False) -> Any:
        """Where each leaf of the state lies, between steps or while one `is_fetched` to the devices."""
        blueprint, mesh = self.model.blueprint, self.model.mesh
        shapes: Any = self.shapes
        axes = optimizers.state_axes(
            self.run.optim, self.optimizer, blueprint.shapes, blueprint.axes, mesh.shape
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
            params=self.model.shardings,
            opt_state=opt_state,
            guard=jax.tree.map(lambda _: replicated, shapes.guard),
            average=None if shapes.average is None else self.model.shardings,
        )


def without_data(run: Run, grid: Mesh, vocab: int) -> TrainPrograms:
    """The engine of a run's sizes on a mesh, without data: to compile or to time its step."""
    model = setup.build_sharded_model(run, vocab, grid)
    tokenizer = SimpleNamespace(token_bytes=np.zeros(vocab, np.int32), lead="")
    return TrainPrograms(run, SimpleNamespace(tokenizer=tokenizer), model)  # type: ignore[arg-type]


def with_state_on_device(
    step: Callable[..., Any], layout: TrainState, state: TrainState, batch: Tokens, *rate: jax.Array
) -> Any:
    """A step of a state that may lie elsewhere. Where it comes out again is for `jax.jit` to say."""
    return step(jax.device_put(state, layout), batch, *rate)


def _loss(
    merge: Callable[[Any], Any],
    settings: Any,
    further: tuple[float, ...],
    params: Any,
    batch: Any,
    key: jax.Array,
) -> Any:
    return token_nll(merge(params), batch, key, settings, further)


def _curvature(run: Run, merge: Callable[[Any], Any]) -> Curvature | None:
    every = optimizers.estimated_every(run.optim)
    if every is None:
        return None

    def loss(params: Any, batch: Tokens, key: jax.Array) -> Any:
        del key
        return sampled_label_nll(merge(params), batch, run.loss)

    return Curvature(loss, every)


def _further(run: Run) -> tuple[float, ...]:
    """The weights of the losses of tokens beyond the next."""
    found = mtp_settings(run.objective)
    return () if found is None else found.weights


def _clipping(run: Run) -> Callable[[Any, Intermediates], tuple[Any, dict[str, jax.Array]]] | None:
    largest = run.regularisation.qk_clip
    if largest is None:
        return None
    return lambda params, notes: qk_clip(params, notes.peaks, largest)


def _is_logged(run: Run) -> Callable[[jax.Array], jax.Array] | None:
    """Whether the metrics of a step will be logged, by the number of completed steps; None where all are or it takes more to know."""
    unit = run.log.every.unit
    if unit == "second" or (unit == "token" and run.train.batch_warmup):
        return None
    every = run.log.every.steps(run.train.steps, run.tokens_per_step)
    if every <= 1:
        return None
    return lambda completed: (completed % every == 0) | (completed == run.train.steps)


def _is_finite(values: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(values)]).all()


def inject_faults(batch: Tokens, number: int) -> Tokens:
    """The batch with the faults that a test asked for: its loss will not be finite. Untouched without any."""
    for fault in faults.planned("batch"):
        if fault.is_at(number):
            batch = batch._replace(weights=batch.weights * float("nan"))
    return batch
