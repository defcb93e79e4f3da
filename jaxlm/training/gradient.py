"""The mean gradient of a batch, added up over its micro-batches."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.nn import intermediates
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.objectives.loss import Loss
from jaxlm.parallel import logical, pipeline

LossOfParams = Callable[[Any, Tokens, Array], Loss]
Gradient = Callable[[Any, Tokens, Array, Array], tuple[Any, Loss, Intermediates]]
SQUARE = "gradient_square"  # the sum over micro-batches of |their mean gradient|^2


def build_gradient(
    loss: LossOfParams,
    *,
    precision: Precision,
    axes: Any = None,
    shardings: Any = None,
    microbatches: int = 1,
    capture: Collection[Kind] = (),
    squares: bool = False,
    frozen: frozenset[str] = frozenset(),
) -> Gradient:
    """The function (params, batch, key, scale) -> (mean gradient, the batch's loss, what layers note of `kinds`).

    `loss(params, batch, key)` is a sum and a weight. Sums and their gradients are added over the micro-batches and
    divided once by the weight of the whole batch, so k micro-batches give the gradient of one batch however
    unevenly their tokens weigh. What layers add (`Loss.added`) has another weight: it is scaled by the whole batch's weight
    over its number of tokens, which are known before the first micro-batch, and then divided likewise. Gradients are summed
    in the dtypes of `reduced`, for which `axes` are the parameters' logical axis names, or None.

    `shardings` are those of each gradient, which the sums over micro-batches have too; None leaves it to the compiler.
    Leaves at the paths `frozen` have no gradient, and are not in its tree. With `squares` the notes have `SQUARE` too.

    Where gradients pass through float16, what is differentiated is the sum times scale / tokens of the micro-batch: about
    the mean times the scale, so the same scale fits batches of any size. The gradient is divided by it in float32.
    """
    is_scaled = precision.is_scaled
    laid_out = constrain_grads(shardings, frozen)

    def gradient(
        params: Any, batch: Tokens, key: Array, scale: Array, share: Array
    ) -> tuple[Any, tuple[Loss, Intermediates]]:
        def total(thawed: Any) -> tuple[Array, tuple[Loss, Intermediates]]:
            whole = tree.merge_leaves(params, thawed) if frozen else thawed
            with intermediates.capture(capture) as notes:
                part = loss(whole, batch, key)
            total = part.objective.total
            if part.added is not None:
                total = total + share * part.added.total
            return (total * (scale / batch.tokens.size) if is_scaled else total), (part, notes)

        (_, (part, notes)), grads = jax.value_and_grad(total, has_aux=True)(
            tree.drop_leaves(params, frozen)
        )
        grads = laid_out(reduce_dtype_grads(grads, precision, axes))
        if squares:
            unscale = batch.tokens.size / scale if is_scaled else 1.0
            size = jnp.square(tree.norm(grads) * unscale / jnp.maximum(part.objective.weight, 1.0))
            notes = Intermediates(notes.sums | {SQUARE: size}, notes.peaks)
        return grads, (part, notes)

    def summed(
        params: Any, batch: Tokens, key: Array, scale: Array
    ) -> tuple[Any, tuple[Loss, Intermediates]]:
        share = _trained_share(batch)
        if microbatches == 1:
            return gradient(params, batch, key, scale, share)
        parts = jax.tree.map(lambda x: pipeline.split_microbatches(x, microbatches), batch)
        keys = jax.random.split(key, microbatches)

        def add(carry: Any, part: tuple[Tokens, Array]) -> tuple[Any, None]:
            grads, (loss, notes) = gradient(params, *part, scale, share)
            sums, (losses, before) = carry
            together = jax.tree.map(jnp.add, (sums, losses), (grads, loss))
            return (together[0], (together[1], before + notes)), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradient, params, first, key, scale, share)
        grads, (part, notes) = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        notes = notes._replace(peaks=jax.tree.map(lambda x: x - jnp.inf, notes.peaks))
        return jax.lax.scan(add, (laid_out(grads), (part, notes)), (parts, keys))[0]

    def mean(
        params: Any, batch: Tokens, key: Array, scale: Array
    ) -> tuple[Any, Loss, Intermediates]:
        grads, (part, notes) = summed(params, batch, key, scale)
        inverse = 1.0 / jnp.maximum(part.objective.weight, 1.0)
        if is_scaled:
            unscale = batch.tokens.size / microbatches / scale
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) * unscale, grads)
        return jax.tree.map(lambda g: g * inverse.astype(g.dtype), grads), part, notes

    return mean


def _trained_share(batch: Tokens) -> Array:
    """Return the weight of the batch over its number of tokens that are not padding; 1 if it trains on all of them."""
    count = (batch.segments > 0).sum(dtype=jnp.float32)
    return batch.weights.sum(dtype=jnp.float32) / jnp.maximum(count, 1.0)


def reduce_dtype_grads(grads: Any, precision: Precision, axes: Any) -> Any:
    """Return gradients in the dtypes in which they are summed: `precision.reduce`, but float32 for routers' biases.

    The optimizer reads the sign of a router bias's gradient alone (`optim.build`), which is 2^-30 times a difference of
    counts (`nn.moe`). In float16 a difference of some hundreds of tokens becomes 0, and the bias stops.

    Args:
      axes: the parameters' tree of logical axis names, by which those biases are known (`balance`); None knows none.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))

    def leaf(path: str, grad: Array) -> Array:
        is_bias = "balance" in names.get(path, ())
        return grad.astype(jnp.float32 if is_bias else precision.reduce)

    return tree.map_with_path(leaf, grads)


def constrain_grads(shardings: Any, frozen: frozenset[str]) -> Callable[[Any], Any]:
    """The function that gives gradients these `shardings`, which have the leaves at the paths `frozen` too; for None it does nothing."""
    if shardings is None:
        return lambda grads: grads
    own = tree.drop_leaves(shardings, frozen)
    return lambda grads: jax.lax.with_sharding_constraint(grads, own)


def norms_by_layer(values: Any, axes: Any) -> dict[str, Array]:
    """The norm of each leaf by its path, [L] where `axes` says that the first axis is one of layers."""
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
