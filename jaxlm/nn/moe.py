"""Mixture of experts: the feed-forward part in which a token is multiplied with a few of many weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.nn import intermediates
from jaxlm.nn.config import MlpConfig, MoeConfig
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import GroupedLinear, Linear, parameter
from jaxlm.nn.mlp import ACTIVATIONS, Mlp, gated
from jaxlm.ops import routing
from jaxlm.ops.routing import Routes
from jaxlm.parallel import expert

ADDED = "moe_loss"  # the one of a layer's means that is minimised with the objective
QUIET = (
    2.0**-30
)  # keeps the bias's gradient, of which only the sign is read, out of the norm of the others


class Moe(nnx.Module):
    """y = shared(x) + sum_i shares_i expert_i(x) over the top k, each expert down(act(gate(x)) * up(x)).

    Source: Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088 (experts of this form); Dai et
    al. 2024, arXiv:2401.06066 (shared experts).
    """

    def __init__(
        self, width: int, config: MoeConfig, *, key: Array, init: Initializer, precision: Precision
    ):
        self.config = config
        keys = jax.random.split(key, 5)
        exact = dataclasses.replace(precision.exact, compute=jnp.dtype(jnp.float32))
        self.router = Linear(
            {"embed": width},
            {"routes": config.experts},
            key=keys[0],
            init=init,
            precision=exact,
            ends_outside=True,
            result=jnp.dtype(jnp.float32),
        )
        stream, hidden = {"embed": width}, {"mlp": config.hidden}

        def grouped(
            key: Array, ins: dict[str, int], outs: dict[str, int], ends: bool = False
        ) -> GroupedLinear:
            return GroupedLinear(
                config.experts,
                ins,
                outs,
                key=key,
                init=init,
                precision=precision,
                ends_on_residual=ends,
            )

        self.gate = grouped(keys[1], stream, hidden)
        self.up = grouped(keys[2], stream, hidden)
        self.down = grouped(keys[3], hidden, stream, True)
        shared = MlpConfig(hidden=config.shared, activation=config.activation, gated=True)
        self.shared = (
            Mlp(width, shared, key=keys[4], init=init, precision=precision)
            if config.shared
            else None
        )
        self.bias = (
            parameter(jnp.zeros((config.experts,), jnp.float32), "balance")
            if config.bias_rate is not None
            else None
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        counted: Float[Array, "B T"],
        *,
        is_whole: bool = True,
        is_dealt: bool = False,
    ) -> tuple[Float[Array, "B T D"], dict[str, Mean]]:
        """The sum of each token's experts, and the layer's means over the tokens that count (1; padding 0).

        `moe_balance` and `moe_z` are the bare losses, `moe_loss` their weighted sum, which is minimised with the objective:
        its mean over the tokens that count, whichever of them the objective trains on; `moe_load_max` is the largest expert's share of a row times E, 1 at best; `moe_dropped` the share of
        choices that found no place. With `is_whole` a row is the whole of what an expert has to take: without it, in
        decoding, there is no capacity. `is_dealt` is the mask's.

        6 D F k FLOPs a token, 2 D E for the router, 6 D for each shared hidden unit; those of the
        routed experts times the capacity or, without one, times `models.routed.multiple`.
        """
        config = self.config
        with jax.default_matmul_precision("highest"):
            # Cast out here, so that its gradient is cast back to the dtype of activations.
            logits = self.router(x.astype(jnp.float32))
        routes = routing.route(
            logits,
            None if self.bias is None else jax.lax.stop_gradient(self.bias[...]),
            top_k=config.top_k,
            router=config.router,
            normalised=config.normalised,
            scale=config.scale,
            groups=config.groups,
            top_groups=config.top_groups,
        )
        y, kept = self._experts(x, routes, counted if is_whole else None, is_dealt)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, self._means(logits, routes, counted, kept)

    def _experts(
        self, x: Array, routes: Routes, counted: Array | None, is_dealt: bool
    ) -> tuple[Array, Array | None]:
        config, layers = self.config, (self.gate, self.up, self.down)
        weights = tuple(layer.weight[...] for layer in layers)
        axes = tuple(layer.axes for layer in layers)
        if config.capacity is None or counted is None:
            y = expert.dropless(self._rows, x, routes.choices, routes.shares, weights, axes)
            return y, None
        places = math.ceil(config.capacity * x.shape[1] * config.top_k / config.experts)
        return expert.limited(
            self._rows,
            x,
            routes.choices,
            routes.shares,
            counted,
            weights,
            axes,
            capacity=places,
            is_dealt=is_dealt,
        )

    def _rows(self, x: Array, sizes: Array | None, weights: tuple[Array, ...]) -> Array:
        gate, up, down = weights
        activation = ACTIVATIONS[self.config.activation]
        hidden = gated(activation, self.gate(x, gate, sizes), self.up(x, up, sizes))
        return self.down(hidden, down, sizes)

    def _means(
        self, logits: Array, routes: Routes, counted: Array, kept: Array | None
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
            # Worth nothing, with the gradient by which the optimizer moves the bias: how much too often e is chosen.
            excess = config.experts * spread.loads - config.top_k * tokens[:, None]
            steer = jnp.sum(self.bias[...] * QUIET * jax.lax.stop_gradient(excess.sum(0)))
            added = added + steer - jax.lax.stop_gradient(steer)
        choices = jnp.broadcast_to(counted[..., None], routes.choices.shape)
        dropped = jnp.zeros_like(choices) if kept is None else 1.0 - kept
        return {
            ADDED: Mean(added, balance.weight),
            "moe_balance": balance,
            "moe_z": z,
            "moe_load_max": Mean.of(spread.largest, tokens),
            "moe_dropped": Mean.of(dropped, choices),
        }
