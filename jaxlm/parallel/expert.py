"""Tokens to the devices of their experts, and back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxlm.parallel import rules
from jaxlm.parallel.logical import LogicalAxes

# What experts compute: (rows, sizes of the groups of rows or None for [E, C, D], weights) -> rows. Under a mesh it sees
# a device's own experts, and gives a part of a sum over the tensor axis.
Experts = Callable[[Array, Array | None, tuple[Array, ...]], Array]
TOKENS: LogicalAxes = ("batch", "length", None)


def dropless(
    experts: Experts,
    x: Array,
    choices: Array,
    shares: Array,
    weights: tuple[Array, ...],
    axes: tuple[LogicalAxes, ...],
) -> Array:
    """Every token through all its experts: sum_i shares[b, t, i] expert_{choices[b, t, i]}(x[b, t]).

    Each device sorts its tokens by expert. Over an expert axis of X devices, tokens are gathered, each device takes
    those of its own experts, and the results are scattered as they are summed: 2 (X - 1) / X of the gathered tokens
    pass each link and pass back, whatever k is. A dense all-to-all without drops would have to be prepared for all
    tokens of a device choosing one other, and sends min(k, E / X) as much; a ragged one, which sends k / X, is not
    implemented on CPU. For the same reason there are X n min(k, E / X) rows to be multiplied for n tokens a device, of
    which about k n are real. Only TPUs skip the others (`ops.matmul.grouped_matmul`).
    """
    count = weights[0].shape[0]

    def run(x: Array, choices: Array, shares: Array, *weights: Array) -> Array:
        top_k, held = choices.shape[-1], weights[0].shape[0]
        ways = count // held
        tokens, own, share = (
            _gathered(each.reshape(-1, each.shape[-1]), ways) for each in (x, choices, shares)
        )
        own = (own - _index(ways) * held).reshape(-1)
        own = jnp.where((own >= 0) & (own < held), own, held)  # those of others come last
        order = jnp.argsort(own, stable=True)[: len(tokens) * min(top_k, held)]
        sizes = jnp.sum(own[:, None] == jnp.arange(held)[None], axis=0, dtype=jnp.int32)
        is_own = (jnp.arange(len(order)) < sizes.sum())[:, None]
        # Repeated first, so that each row is read once, and its gradient written once, in a fixed order.
        repeated = jnp.repeat(tokens, top_k, axis=0)
        rows = repeated.at[order].get(unique_indices=True, mode="promise_in_bounds")
        out = experts(jnp.where(is_own, rows, 0), sizes, weights)
        out = jnp.where(is_own, out, 0)
        back = jnp.zeros((len(own), out.shape[-1]), out.dtype)
        back = back.at[order].set(out, unique_indices=True, mode="promise_in_bounds")
        summed = _shared_out(back.reshape(-1, top_k, back.shape[-1]), share)
        if ways > 1:
            summed = lax.psum_scatter(summed, "expert", scatter_dimension=0, tiled=True)
        return _over_tensor(summed).reshape(x.shape)

    return _placed(run, (TOKENS, TOKENS, TOKENS, *axes), TOKENS)(x, choices, shares, *weights)


def limited(
    experts: Experts,
    x: Array,
    choices: Array,
    shares: Array,
    counted: Array,
    weights: tuple[Array, ...],
    axes: tuple[LogicalAxes, ...],
    *,
    capacity: int,
    is_dealt: bool,
) -> tuple[Array, Array]:
    """As `dropless`, but an expert takes the first `capacity` tokens of each row; and which choices were kept, [B, T, k].

    Only tokens that count (1, others 0) take places. Over an expert axis of X devices the places are exchanged by two
    all-to-alls, of (X - 1) / X of B E C D numbers each, for the B rows of a device. Where a row is split over the
    context axis, each device prepares min(C, its tokens) places for every expert, of which its part of the row fills
    some; `is_dealt` says that its part is an early and a late one, see `parallel.context`.
    """
    count = weights[0].shape[0]

    def run(
        x: Array, choices: Array, shares: Array, counted: Array, *weights: Array
    ) -> tuple[Array, Array]:
        (rows, length, width), top_k = x.shape, choices.shape[-1]
        ways = count // weights[0].shape[0]
        chosen = choices.reshape(rows, -1)  # earlier tokens first, each one's best choice first
        hot = jax.nn.one_hot(chosen, count, dtype=jnp.int32)
        hot = hot * jnp.repeat(counted, top_k, axis=1)[..., None]
        place = jnp.sum((jnp.cumsum(hot, axis=1) - hot) * hot, axis=-1)
        parts = 2 if is_dealt else 1
        offsets = _offsets(hot.reshape(rows, parts, -1, count).sum(2))
        earlier = jnp.sum(jnp.repeat(offsets, length * top_k // parts, axis=1) * hot, axis=-1)
        is_kept = (hot.sum(-1) > 0) & (earlier + place < capacity)
        places = min(capacity, length)
        # Tokens that are not kept have places out of bounds, each its own: no two have the same.
        place = jnp.where(is_kept, place, places + jnp.arange(length * top_k)[None])
        row = jnp.arange(rows)[:, None]
        repeated = jnp.repeat(x, top_k, axis=1)
        buffer = jnp.zeros((rows, count, places, width), x.dtype)
        buffer = buffer.at[row, chosen, place].set(repeated, unique_indices=True, mode="drop")
        groups = jnp.swapaxes(buffer, 0, 1).reshape(count, rows * places, width)
        if ways > 1:
            groups = lax.all_to_all(groups, "expert", 0, 1, tiled=True)
        groups = experts(groups, None, weights)
        if ways > 1:
            groups = lax.all_to_all(groups, "expert", 1, 0, tiled=True)
        buffer = jnp.swapaxes(groups.reshape(count, rows, places, width), 0, 1)
        out = buffer.at[row, chosen, place].get(unique_indices=True, mode="fill", fill_value=0)
        summed = _shared_out(out.reshape(rows, length, top_k, width), shares)
        kept = is_kept.reshape(rows, length, top_k).astype(jnp.float32)
        return _over_tensor(summed), kept

    return _placed(run, (TOKENS, TOKENS, TOKENS, TOKENS[:2], *axes), (TOKENS, TOKENS))(
        x, choices, shares, counted.astype(jnp.int32), *weights
    )


@jax.custom_vjp
def _shared_out(parts: Array, shares: Array) -> Array:
    """Return sum_k shares[..., k] parts[..., k, :], in the dtype of `parts`.

    Products and sums are float32, so that a share's gradient, a sum over the width, is too. Kept for the backward pass
    are the arguments alone, as `nn.mlp.gated` does it.
    """
    wide = parts.astype(jnp.float32) * shares[..., None]
    return jnp.sum(wide, axis=-2).astype(parts.dtype)


def _shared_out_forward(parts: Array, shares: Array) -> tuple[Array, tuple[Array, Array]]:
    return _shared_out(parts, shares), (parts, shares)


def _shared_out_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    parts, shares = kept
    wide = grad.astype(jnp.float32)[..., None, :]
    parts_grad = (wide * shares[..., None]).astype(parts.dtype)
    return parts_grad, jnp.sum(wide * parts.astype(jnp.float32), axis=-1).astype(shares.dtype)


_shared_out.defvjp(_shared_out_forward, _shared_out_backward)


def _placed(run: Callable[..., Any], ins: tuple[LogicalAxes, ...], outs: Any) -> Callable[..., Any]:
    """`run` on each device's part of its arguments; on all of them where there is no mesh.

    Weights come whole along fsdp. All axes are manual, as `jax.vmap(..., spmd_axis_name="pipe")` needs it. Numbers are
    marked as differing over every axis that splits any, so that the gradients of the products are sums over a device's
    rows, added up over devices once.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run

    def placed(x: Array, *rest: Array) -> Any:
        is_whole = x.shape[1] % rules.split(mesh, "length")

        def spec(axes: LogicalAxes) -> PartitionSpec:
            whole = {"embed", "length"} if is_whole else {"embed"}
            return rules.spec(tuple(None if axis in whole else axis for axis in axes))

        specs = [spec(axes) for axes in ins]
        split = frozenset().union(*map(_axes, specs))

        def marked(*args: Array) -> Any:
            return run(
                *(_varying(arg, split - _axes(own)) for arg, own in zip(args, specs, strict=True))
            )

        return jax.shard_map(
            marked,
            in_specs=tuple(specs),
            out_specs=spec(outs) if outs is TOKENS else tuple(spec(axes) for axes in outs),
        )(x, *rest)

    return placed


def _axes(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(
        axis
        for entry in spec
        if entry is not None
        for axis in ((entry,) if isinstance(entry, str) else entry)
    )


def _varying(x: Array, axes: frozenset[str]) -> Array:
    """Mark numbers as differing over mesh axes; their gradient is the sum over the devices along these.

    The sum of a weight's, over all that share a batch, is float32 whatever the weight is. That of activations over
    `tensor` has their dtype, as in every other layer that is split over it.
    """
    if not axes or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x.astype(jnp.float32) if axes - {"tensor"} else x
    return lax.pcast(wide, tuple(sorted(axes)), to="varying").astype(x.dtype)


def _is_on_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


def _index(ways: int) -> Array | int:
    return lax.axis_index("expert") if ways > 1 else 0


def _gathered(x: Array, ways: int) -> Array:
    return lax.all_gather(x, "expert", tiled=True) if ways > 1 else x


def _over_tensor(x: Array) -> Array:
    return lax.psum(x, "tensor") if _is_on_mesh() else x


def _offsets(totals: Array) -> Array:
    """What to add to counts along a device's tokens to count along the row: [B, parts, E] from the parts' own totals.

    The part of device i of n is the i-th of a row; of two, the second is the last but i.
    """
    if not _is_on_mesh() or lax.axis_size("context") == 1:
        return jnp.zeros_like(totals)
    ways, own = lax.axis_size("context"), lax.axis_index("context")
    parts = jnp.arange(totals.shape[1])[:, None]
    places = jnp.where(parts == 0, jnp.arange(ways), 2 * ways - 1 - jnp.arange(ways))
    mine = jnp.where(parts == 0, own, 2 * ways - 1 - own)
    is_earlier = (places[None] < mine[:, None]).astype(totals.dtype)  # [parts, parts of others, n]
    everyones = lax.all_gather(totals, "context")
    before = jnp.einsum("ijn,nbje->bie", is_earlier, everyones)
    return before - (jnp.cumsum(totals, axis=1) - totals)
