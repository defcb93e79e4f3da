"""Mixture of experts: a feed-forward part that multiplies a token with a few of many weights."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.core.mean import Mean
from jaxlm.nn import intermediates
from jaxlm.nn.config import MlpConfig, MoeConfig
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import GroupedLinear, Linear, Product, parameter
from jaxlm.nn.mlp import ACTIVATIONS, Mlp, gated
from jaxlm.ops import routing
from jaxlm.ops.routing import Routes
from jaxlm.parallel import expert

ADDED = "moe_loss"  # the mean of a layer that is added to the objective
# Scale of the bias's gradient: small in the global norm, and the optimizer reads only its sign.
BIAS_GRAD_SCALE = 2.0**-30


class Moe(nnx.Module):
    """y = shared(x) + sum_i shares_i expert_i(x) over the top k experts, each a gated MLP.

    Source: Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088 (experts of
    this form); Dai et al. 2024, arXiv:2401.06066 (shared experts).
    """

    def __init__(self, width: int, config: MoeConfig, *, key: Array, init: Initializer):
        self.config = config
        keys, float32 = jax.random.split(key, 5), jnp.dtype(jnp.float32)
        exact = dataclasses.replace(init.precision.exact, compute=float32)
        self.router = Linear(
            {"embed": width},
            {"routes": config.experts},
            key=keys[0],
            init=dataclasses.replace(init, precision=exact, ends="outside"),
            product=Product(result=float32),
        )
        stream, hidden = {"embed": width}, {"mlp": config.hidden}
        grouped = functools.partial(GroupedLinear, config.experts, init=init)
        self.gate = grouped(stream, hidden, key=keys[1])
        self.up = grouped(stream, hidden, key=keys[2])
        self.down = grouped(hidden, stream, key=keys[3], init=init.residual)
        shared = MlpConfig(hidden=config.shared, activation=config.activation, gated=True)
        mlp = functools.partial(Mlp, width, shared, init=init)
        self.shared = mlp(key=keys[4]) if config.shared else None
        bias = jnp.zeros((config.experts,), jnp.float32)
        self.bias = None if config.bias_rate is None else parameter(bias, "balance")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        counted: Float[Array, "B T"],
        *,
        is_whole: bool = True,
        is_zigzag: bool = False,
    ) -> tuple[Float[Array, "B T D"], dict[str, Mean]]:
        """Return the sum over each token's experts, and means over the counted tokens.

        `moe_balance` and `moe_z` are the unweighted losses. `moe_loss`, their weighted sum, is
        minimized with the objective as a mean over the counted tokens, on whichever of them the
        objective trains. `moe_load_max` is the largest expert's share of a row times E, 1 at best;
        `moe_dropped` is the share of choices without a place.

        6 D F k FLOPs a token, 2 D E for the router, 6 D for each unit of the shared hidden size;
        the routed experts' times the capacity or, without one, times
        `model_cost.expert_flops_ratio`.

        `counted` is 1 for a token and 0 for padding. Decoding passes `is_whole` false, as its rows
        are incomplete, which disables the capacity. `is_zigzag` is the mask's.
        """
        with jax.default_matmul_precision("highest"):
            # Cast here, so that the gradient is cast back to the dtype of activations.
            logits = self.router(x.astype(jnp.float32))
        routes = self.routes(logits)
        y, placed = self._experts(x, routes, counted if is_whole else None, is_zigzag)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, self._means(logits, routes, counted, placed)

    def routes(self, logits: Float[Array, "B T E"]) -> Routes:
        """Return the experts of each token, from the router's outputs."""
        config = self.config
        return routing.route(
            logits,
            None if self.bias is None else jax.lax.stop_gradient(self.bias[...]),
            top_k=config.top_k,
            router=config.router,
            normalized=config.normalize_top_k,
            scale=config.scale,
            groups=config.groups,
            top_groups=config.top_groups,
        )

    def _experts(
        self, x: Array, routes: Routes, counted: Array | None, is_zigzag: bool
    ) -> tuple[Array, Array | None]:
        """Return the experts' sum, and 1 for each choice with a place, None without drops."""
        config, layers = self.config, (self.gate, self.up, self.down)
        weights = tuple(layer.values() for layer in layers)
        experts = expert.ExpertLayer(self._rows, weights, tuple(layer.axes for layer in layers))
        if config.capacity is None or counted is None:
            return expert.dropless(experts, x, routes.choices, routes.shares), None
        places = math.ceil(config.capacity * x.shape[1] * config.top_k / config.experts)
        choices, shares = routes.choices, routes.shares
        return expert.limited(
            experts, x, choices, shares, counted, capacity=places, is_zigzag=is_zigzag
        )

    def _rows(self, x: Array, sizes: Array | None, weights: tuple[Array, ...]) -> Array:
        gate, up, down = weights
        activation = ACTIVATIONS[self.config.activation]
        hidden = gated(activation, self.gate(x, gate, sizes), self.up(x, up, sizes))
        return self.down(hidden, down, sizes)

    def _means(
        self, logits: Array, routes: Routes, counted: Array, placed: Array | None
    ) -> dict[str, Mean]:
        config = self.config
        spread = routing.spread(routes, counted)
        tokens = counted.sum(-1)
        if intermediates.is_captured("activations"):
            intermediates.record_sum("load", spread.loads.sum(0))
        z = Mean.of(jnp.square(jax.nn.logsumexp(logits, axis=-1)), counted)
        balance = Mean.of(spread.balance, tokens)
        added = config.balance * balance.total + config.router_z * z.total
        if self.bias is not None:
            # Zero in value. Its gradient, by which the optimizer moves the bias, is the excess of
            # tokens that chose each expert.
            excess = config.experts * spread.loads - config.top_k * tokens[:, None]
            excess = jax.lax.stop_gradient(excess.sum(0))
            steer = jnp.sum(self.bias[...] * BIAS_GRAD_SCALE * excess)
            added = added + steer - jax.lax.stop_gradient(steer)
        choices = jnp.broadcast_to(counted[..., None], routes.choices.shape)
        dropped = jnp.zeros_like(choices) if placed is None else 1.0 - placed
        return {
            ADDED: Mean(added, balance.weight),
            "moe_balance": balance,
            "moe_z": z,
            "moe_load_max": Mean.of(spread.largest, tokens),
            "moe_dropped": Mean.of(dropped, choices),
        }
