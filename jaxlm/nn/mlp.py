"""The feed-forward part of a block."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.nn import intermediates
from jaxlm.nn.config import Activation, MlpConfig
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear
from jaxlm.nn.remat import recomputed
from jaxlm.parallel.rules import constrain

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # arXiv:2109.08668
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    """Return act(gate) x up, storing only `gate` and `up` for the backward pass.

    `recomputed` cannot do this: jax.checkpoint fails in a shard_map that a pipeline maps over its
    stages, as the one of experts is (jax 0.12).
    """
    return activation(gate) * up


def _gated_backward(
    activation: Callable[[Array], Array], residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    return jax.vjp(lambda gate, up: activation(gate) * up, *residuals)[1](grad)


gated.defvjp(lambda activation, gate, up: (activation(gate) * up, (gate, up)), _gated_backward)


class Mlp(nnx.Module):
    """down(act(up(x))), or if gated down(act(gate(x)) * up(x)) (Shazeer 2020, 2002.05202)."""

    def __init__(self, width: int, config: MlpConfig, *, key: Array, init: Initializer):
        self.config = config
        keys = jax.random.split(key, 3)
        stream, hidden = {"embed": width}, {"mlp": config.hidden}
        linear = functools.partial(Linear, init=init, bias=config.bias)
        self.gate = linear(stream, hidden, key=keys[0]) if config.gated else None
        self.up = linear(stream, hidden, key=keys[1])
        self.down = linear(hidden, stream, key=keys[2], init=init.residual)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Costs two or three products of 2 D F FLOPs a token."""
        activation = ACTIVATIONS[self.config.activation]
        hidden = self.up(x)
        gate = hidden if self.gate is None else self.gate(x)
        if intermediates.is_captured("activations"):
            intermediates.record_sum("active", jnp.sum(gate > 0, (0, 1), dtype=jnp.float32))
        if self.gate is None:
            hidden = recomputed(activation)(hidden)
        else:
            hidden = gated(activation, gate, hidden)
        return self.down(constrain(hidden, "batch", "length", "mlp"))
