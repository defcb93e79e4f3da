"""The mean gradient of a batch by gradient accumulation; estimates of the loss's curvature."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxlm.core import random, tree
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.nn import intermediates
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.objectives.loss import Loss
from jaxlm.optim.sophia import CurvatureEstimate
from jaxlm.parallel import logical, pipeline, rules

LossOfParams = Callable[[Any, Tokens, Array], Loss]
Gradient = Callable[[Any, Tokens, Array, Array], tuple[Any, Loss, Intermediates]]
DATA = "data"  # mesh axis of replicas
SQUARE = "gradient_square"  # the sum over micro-batches of |their mean gradient|^2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """Everything that determines the gradient of a batch."""

    loss: LossOfParams  # the function (params, batch, key) -> `Loss`, a sum and a weight
    precision: Precision  # dtypes; in float16 the loss is scaled
    axes: Any = None  # the parameters' tree of logical axis names; None for no names
    # Shardings of the gradients and of their sums; None leaves them to the compiler.
    shardings: Any = None
    microbatches: int = 1  # parts of the batch, computed one after the other
    # Sum the micro-batches on each device of `data`, and over them once, after the last. The loss
    # must be a sum over rows that draws no random number.
    sums_locally: bool = False
    # Paths of parameters that have no gradient; they are not in the gradient's tree.
    frozen: frozenset[str] = frozenset()


def build_gradient(
    spec: GradientSpec, *, capture: Collection[Kind] = (), squares: bool = False
) -> Gradient:
    """Return the function (params, batch, key, scale) -> (mean gradient, loss, intermediates).

    Sums and their gradients are added over the micro-batches and divided once by the weight of the
    whole batch: k micro-batches give the gradient of one batch however uneven their weights are.
    Auxiliary losses of layers (`Loss.added`) have another weight. They are scaled by the batch's
    weight over its number of tokens, both known before the first micro-batch, and then divided
    likewise. Gradients are summed in the dtypes of `reduce_dtype_grads`.

    Micro-batches of a rollout without a token are not computed, if layers have no auxiliary losses
    and record nothing.

    In float16 the differentiated quantity is the sum times scale / tokens of the micro-batch, about
    the mean times the scale: one scale fits batches of any size. The gradient is divided by it in
    float32.

    `capture` names the kinds of intermediates that layers record; `squares` adds `SQUARE` to them.
    """
    precision, frozen, microbatches = spec.precision, spec.frozen, spec.microbatches
    is_scaled = precision.is_scaled
    constrained = constrain_grads(spec.shardings, frozen)

    def gradient(
        params: Any, batch: Tokens, key: Array, factor: Array, share: Array
    ) -> tuple[Any, tuple[Loss, Intermediates]]:
        def total(trained: Any) -> tuple[Array, tuple[Loss, Intermediates]]:
            whole = tree.merge_leaves(params, trained) if frozen else trained
            with intermediates.capture(capture) as captured:
                part = spec.loss(whole, batch, key)
            total = part.objective.total
            if part.added is not None:
                total = total + share * part.added.total
            return (total * factor if is_scaled else total), (part, captured)

        (_, (part, captured)), grads = jax.value_and_grad(total, has_aux=True)(
            tree.drop_leaves(params, frozen)
        )
        grads = constrained(reduce_dtype_grads(grads, precision, spec.axes))
        if squares:
            unscale = 1 / factor if is_scaled else 1.0
            size = jnp.square(tree.norm(grads) * unscale * _inverse(part.objective.weight))
            captured = Intermediates(captured.sums | {SQUARE: size}, captured.peaks)
        return grads, (part, captured)

    def summed(
        params: Any, batch: Tokens, key: Array, scale: Array
    ) -> tuple[Any, tuple[Loss, Intermediates]]:
        factor = scale / (batch.tokens.size // microbatches)
        inputs = (params, batch, key, factor, _trained_share(batch))
        if microbatches == 1:
            return gradient(*inputs)
        if spec.sums_locally and not squares:
            return sum_over_data(accumulated)(*inputs)
        return accumulated(*inputs)

    def accumulated(
        params: Any, batch: Tokens, key: Array, factor: Array, share: Array
    ) -> tuple[Any, tuple[Loss, Intermediates]]:
        parts = jax.tree.map(lambda x: pipeline.split_microbatches(x, microbatches), batch)
        keys = jax.random.split(key, microbatches)

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradient, params, first, key, factor, share)
        grads, (part, captured) = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        is_skippable = batch.rollout is not None and part.added is None
        is_skippable = is_skippable and not jax.tree.leaves(captured)

        def add(carry: Any, part: tuple[Tokens, Array]) -> tuple[Any, None]:
            def added() -> Any:
                grads, (loss, captured) = gradient(params, *part, factor, share)
                sums, (losses, before) = carry
                grads, loss = jax.tree.map(jnp.add, (sums, losses), (grads, loss))
                return grads, (loss, before + captured)

            if not is_skippable:
                return added(), None
            return jax.lax.cond((part[0].segments > 0).any(), added, lambda: carry), None

        captured = captured._replace(peaks=jax.tree.map(lambda x: x - jnp.inf, captured.peaks))
        return jax.lax.scan(add, (constrained(grads), (part, captured)), (parts, keys))[0]

    def mean(
        params: Any, batch: Tokens, key: Array, scale: Array
    ) -> tuple[Any, Loss, Intermediates]:
        grads, (part, captured) = summed(params, batch, key, scale)
        inverse = _inverse(part.objective.weight)
        if is_scaled:
            unscale = batch.tokens.size / microbatches / scale
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) * unscale, grads)
        return jax.tree.map(lambda g: g * inverse.astype(g.dtype), grads), part, captured

    return mean


def _inverse(weight: Array) -> Array:
    """Return 1 / weight, which tokens of small weights make large; 1 if no token has a weight."""
    return 1.0 / jnp.where(weight > 0, weight, 1.0)


def sum_over_data(accumulated: Callable[..., Any]) -> Callable[..., Any]:
    """Map sums of a batch over the devices of `data`, each with its rows; then add them up.

    Without it the compiler sums the gradients of every micro-batch over `data`, as its loop has no
    value that differs between devices. Other mesh axes are left to the compiler.

    Args:
      accumulated: function (params, batch, key, factor of the loss, share of trained tokens) ->
        (gradients, (loss, intermediates)), all of them sums, of a batch.
    """

    def local(*inputs: Any) -> tuple[Any, tuple[Loss, Intermediates]]:
        grads, (part, captured) = accumulated(*inputs)
        grads, part, sums = jax.lax.psum((grads, part, captured.sums), DATA)
        peaks = jax.lax.pmax(captured.peaks, DATA)
        return grads, (part, Intermediates(sums, peaks))

    whole, rows = PartitionSpec(), PartitionSpec(DATA)
    specs = (whole, rows, whole, whole, whole)
    # The check of varying axes would add up each gradient where it is taken.
    return jax.shard_map(local, in_specs=specs, out_specs=whole, axis_names={DATA}, check_vma=False)


def _trained_share(batch: Tokens) -> Array:
    """Return the weight of the loss over the tokens that are not padding; 1 if all are trained."""
    count = (batch.segments > 0).sum(dtype=jnp.float32)
    weight = batch.weights.sum(dtype=jnp.float32)
    if batch.answers is not None:  # the loss is a mean over them
        weight = (batch.answers.sides != 0).sum(dtype=jnp.float32)
    if batch.rollout is not None:
        weight = batch.rollout.counts.sum(dtype=jnp.float32)
    return weight / jnp.maximum(count, 1.0)


def reduce_dtype_grads(grads: Any, precision: Precision, axes: Any) -> Any:
    """Return gradients in the dtypes of sums: `precision.reduce`, float32 for router biases.

    The optimizer reads only the sign of a router bias's gradient (`optim.build`), which is 2^-30
    times a difference of counts (`nn.moe`). In float16 a difference of some hundreds of tokens
    becomes 0, and the bias stops. In `axes`, the tree of logical axis names or None, router biases
    have `balance`.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def leaf(path: str, grad: Array) -> Array:
        is_bias = "balance" in names.get(path, ())
        return grad.astype(jnp.float32 if is_bias else precision.reduce)

    return tree.map_with_path(leaf, grads)


def constrain_grads(shardings: Any, frozen: frozenset[str]) -> Callable[[Any], Any]:
    """Return the function that constrains gradients to `shardings`, which has frozen leaves too.

    For None it returns gradients unchanged.
    """
    if shardings is None:
        return lambda grads: grads
    trained = tree.drop_leaves(shardings, frozen)

    def constrain(grads: Any) -> Any:
        placed = trained
        if rules.mapped():  # of the mesh that a `shard_map` leaves
            placed = jax.tree.map(lambda sharding: sharding.spec, trained)
        return jax.lax.with_sharding_constraint(grads, placed)

    return constrain


def norms_by_layer(values: Any, axes: Any) -> dict[str, Array]:
    """Return the norm of each leaf by its path, [L] if its first axis is one of layers."""
    if axes is None:
        axes = jax.tree.map(lambda _: (), values)
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def rest(path: str, x: Array) -> tuple[int, ...]:
        is_stacked = names[path] and names[path][0] in logical.LAYERS
        return tuple(range(1 if is_stacked else 0, x.ndim))

    return {
        path: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), rest(path, x)))
        for path, x in tree.leaves(values).items()
    }


class Curvature(NamedTuple):
    """The loss of sampled labels, and the number of updates between two estimates."""

    loss: LossOfParams
    every: int


Estimator = Callable[[Any, Any, Tokens, Array, Array, Array], dict[str, CurvatureEstimate]]


def build_estimator(curvature: Curvature | None, spec: GradientSpec) -> Estimator:
    """Return the function (params, grads, batch, key, scale, updates) -> {"curvature": estimate}.

    The optimizer gets it with the gradient. Without a `curvature` the dictionary is empty. Every
    `every` updates the estimate is B g^2, with the mean gradient g of labels that the model samples
    and their number B.

    Source: Liu et al. 2023, arXiv:2305.14342, algorithm 2 (Gauss-Newton-Bartlett).
    """
    if curvature is None:
        return lambda *_: {}
    every = curvature.every
    gradient = build_gradient(dataclasses.replace(spec, loss=curvature.loss))
    constrained = constrain_grads(spec.shardings, spec.frozen)

    def estimator(
        params: Any, grads: Any, batch: Tokens, key: Array, scale: Array, updates: Array
    ) -> dict[str, CurvatureEstimate]:
        # After the gradient: else XLA starts before it is done and holds the activations of both.
        params, _ = jax.lax.optimization_barrier((params, grads))
        is_due = updates % every == 0

        def estimate() -> Any:
            draws = jax.random.bits(random.stream(key, "curvature"), batch.targets.shape) >> 1
            sampled = batch._replace(targets=draws.astype(jnp.int32))
            grads, part, _ = gradient(params, sampled, key, scale)
            weight = part.objective.weight
            return jax.tree.map(lambda g: weight.astype(g.dtype) * jnp.square(g), grads)

        shapes = jax.eval_shape(estimate)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        diagonal = jax.lax.cond(is_due, estimate, lambda: constrained(zeros))
        return {"curvature": CurvatureEstimate(is_due, constrained(diagonal))}

    return estimator
