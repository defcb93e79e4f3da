"""Optimizers as Optax chains, and how their state is sharded."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.optim import groups
from jaxlm.optim.config import Adafactor, AdamW, Lion, Optimizer


def build(config: Optimizer, schedule: Callable[[Array], Array], shapes: Any) -> optax.GradientTransformation:
    """The chain: cut by value, clip by norm, the rule itself, decay, group factors, learning rate.

    Decay is decoupled and multiplied by the learning rate, as in arXiv:1711.05101 with Optax's convention.

    Raises:
      ConfigError: where a group's pattern does not fit the parameters in `shapes`.
    """
    assigned = groups.assign(config, tree.leaves(shapes))
    decays = tree.map_with_path(lambda path, _: assigned[path].decays, shapes)
    links = [
        optax.clip(config.clip_value) if config.clip_value is not None else None,
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm is not None else None,
        _rule(config),
        optax.add_decayed_weights(config.weight_decay, mask=decays) if config.weight_decay else None,
        _scale_by_path({path: group.lr_scale for path, group in assigned.items()}) if config.lr_scale else None,
        optax.scale_by_learning_rate(schedule),
    ]
    return optax.chain(*(link for link in links if link is not None))


def _rule(config: Optimizer) -> optax.GradientTransformation:
    match config:
        case AdamW():
            return optax.scale_by_adam(config.b1, config.b2, config.eps)
        case Lion():
            return optax.scale_by_lion(config.b1, config.b2)
        case Adafactor():
            return optax.chain(
                optax.scale_by_factored_rms(decay_rate=config.decay_rate, min_dim_size_to_factor=config.factor_from),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(),
            )


def _scale_by_path(factors: dict[str, float]) -> optax.GradientTransformation:
    def update(updates: Any, params: Any) -> Any:
        return tree.map_with_path(lambda path, leaf: leaf * factors[path], updates)

    return optax.stateless(update)


def state_axes(optimizer: optax.GradientTransformation, shapes: Any, axes: Any) -> Any:
    """Logical axes for every leaf of the optimizer's state: those of its parameter, where it is shaped like one.

    A factored moment has its parameter's axes without the one that was averaged away. Where two axes of one size could
    have been, and for scalars, the leaf is replicated.
    """
    state = jax.eval_shape(optimizer.init, shapes)
    by_path = {path: (leaf.shape, names) for (path, leaf), names in zip(tree.leaves(shapes).items(), _tuples(axes), strict=True)}

    def place(path: str, leaf: Any) -> tuple[str | None, ...]:
        owner = next((key for key in by_path if path == key or path.endswith("/" + key)), None)
        if owner is None:
            return (None,) * len(leaf.shape)
        shape, names = by_path[owner]
        if leaf.shape == shape:
            return names
        fits = {names[:i] + names[i + 1 :] for i in range(len(shape)) if shape[:i] + shape[i + 1 :] == leaf.shape}
        return fits.pop() if len(fits) == 1 else (None,) * len(leaf.shape)

    return tree.map_with_path(place, state)


def _tuples(axes: Any) -> list[tuple[str | None, ...]]:
    return jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
