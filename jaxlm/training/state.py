"""State of training, which each step updates."""

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
    """All values that an update changes, and therefore the content of a checkpoint.

    `step` counts batches, also those that the guard skipped. Random numbers are functions of (seed,
    step) and the data cursor is the step, so the state contains neither.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    guard: GuardState
    average: Any = None  # of the parameters, in float32; None without an average

    @property
    def applied(self) -> Int[Array, ""]:
        """Number of applied updates: batches without skipped steps and float16 overflows."""
        return self.step - self.guard.skipped - self.guard.scale.overflows


def init_state(
    params: Any, optimizer: optax.GradientTransformation, guard: GuardConfig, average: Any = None
) -> TrainState:
    """Return the state before the first update."""
    return TrainState(
        jnp.zeros((), jnp.int32), params, optimizer.init(params), guards.init_guard(guard), average
    )


def abstract(shapes: Any, shardings: Any) -> Any:
    """Return shapes and dtypes with shardings, the target of a restore."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a scalar."""
    return NamedSharding(mesh, PartitionSpec())
