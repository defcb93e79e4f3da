"""What a step reads and writes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxlm.training import guard as guards
from jaxlm.training.config import GuardConfig
from jaxlm.training.guard import GuardState


class TrainState(NamedTuple):
    """Everything that an update changes, and so everything that a checkpoint holds.

    `step` counts batches, also those that the guard did not apply. Random numbers are functions of (seed, step) and the
    data cursor is the step, so neither is here.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    guard: GuardState
    average: Any = None  # of the parameters, in float32; None where the run keeps none

    @property
    def applied(self) -> Int[Array, ""]:
        """Updates that were applied: the batches but those that the guard did not, and overflows of float16."""
        return self.step - self.guard.skipped - self.guard.scale.overflows


def fresh(
    params: Any,
    optimizer: optax.GradientTransformation,
    guard: GuardConfig,
    average: Any = None,
) -> TrainState:
    """The state before the first update."""
    return TrainState(
        jnp.zeros((), jnp.int32), params, optimizer.init(params), guards.fresh(guard), average
    )


def abstract(shapes: TrainState, shardings: TrainState) -> TrainState:
    """Shapes and dtypes with the shardings that they shall have, for a restore."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a scalar."""
    return NamedSharding(mesh, PartitionSpec())
