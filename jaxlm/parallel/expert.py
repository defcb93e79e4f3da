"""Expert parallelism: tokens to the devices of their experts, and back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxlm.parallel import rules
from jaxlm.parallel.logical import LogicalAxes

TOKENS: LogicalAxes = ("batch", "length", None)


class ExpertLayer(NamedTuple):
    """A function of (rows, sizes of the groups of rows or None for [E, C, D], weights).

    `weights` are those of all experts, stacked, and `axes` their logical axes. Under a mesh the
    function gets a device's own experts, and returns a part of a sum over the tensor axis.
    """

    run: Callable[[Array, Array | None, tuple[Array, ...]], Array]
    weights: tuple[Array, ...]
    axes: tuple[LogicalAxes, ...]


def dropless(experts: ExpertLayer, x: Array, choices: Array, shares: Array) -> Array:
    """Return sum_i shares[b, t, i] expert_{choices[b, t, i]}(x[b, t]): no token is dropped.

    Each device sorts its tokens by expert. Over an expert axis of X devices, tokens are gathered,
    each device takes those of its own experts, and the results are reduce-scattered: 2 (X - 1) / X
    of the gathered tokens pass each link each way, for any k. A dense all-to-all without drops
    must have room for all tokens of a device choosing one other, and sends min(k, E / X) as much;
    a ragged one, which sends k / X, is not implemented on CPU. For the same reason X n
    min(k, E / X) rows are multiplied for n tokens a device, about k n of them real; only TPUs skip
    the others (`ops.matmul.grouped_matmul`).
    """
    count = experts.weights[0].shape[0]

    def run(x: Array, choices: Array, shares: Array, *weights: Array) -> Array:
        top_k, local = choices.shape[-1], weights[0].shape[0]
        ways = count // local
        flat = [each.reshape(-1, each.shape[-1]) for each in (x, choices, shares)]
        first: Array | int = 0
        if ways > 1:
            flat = [lax.all_gather(each, "expert", tiled=True) for each in flat]
            first = lax.axis_index("expert")
        tokens, expert, share = flat
        expert = (expert - first * local).reshape(-1)
        # Choices of other devices' experts come last.
        expert = jnp.where((expert >= 0) & (expert < local), expert, local)
        order = jnp.argsort(expert, stable=True)[: len(tokens) * min(top_k, local)]
        sizes = jnp.sum(expert[:, None] == jnp.arange(local)[None], axis=0, dtype=jnp.int32)
        is_real = (jnp.arange(len(order)) < sizes.sum())[:, None]
        # Repeated first: each row is read once, and its gradient written once, in a fixed order.
        repeated = jnp.repeat(tokens, top_k, axis=0)
        rows = repeated.at[order].get(unique_indices=True, mode="promise_in_bounds")
        out = experts.run(jnp.where(is_real, rows, 0), sizes, weights)
        out = jnp.where(is_real, out, 0)
        back = jnp.zeros((len(expert), out.shape[-1]), out.dtype)
        back = back.at[order].set(out, unique_indices=True, mode="promise_in_bounds")
        summed = _weighted_sum(back.reshape(-1, top_k, back.shape[-1]), share)
        if ways > 1:
            summed = lax.psum_scatter(summed, "expert", scatter_dimension=0, tiled=True)
        return _sum_over_tensor(summed).reshape(x.shape)

    ins = (TOKENS, TOKENS, TOKENS, *experts.axes)
    return _mapped(run, ins, TOKENS)(x, choices, shares, *experts.weights)


def limited(
    experts: ExpertLayer,
    x: Array,
    choices: Array,
    shares: Array,
    counted: Array,
    *,
    capacity: int,
    is_zigzag: bool,
) -> tuple[Array, Array]:
    """Like `dropless` with a capacity; also return 1 for each choice with a place [B, T, k].

    An expert takes the first `capacity` tokens of each row. Over an expert axis of X devices two
    all-to-alls exchange the places, (X - 1) / X of B E C D numbers each for the B rows of a
    device. If context splits a row, each device has min(C, its tokens) places for every expert, of
    which its part of the row fills some.

    Args: as in `dropless`, and
      counted: 1 for tokens that take places, else 0.
      capacity: places of an expert in each row.
      is_zigzag: a device's part of a row is an early and a late chunk, see `parallel.context`.
    """
    count = experts.weights[0].shape[0]

    def run(x: Array, choices: Array, shares: Array, counted: Array, *weights: Array) -> Any:
        (rows, length, width), top_k = x.shape, choices.shape[-1]
        ways = count // weights[0].shape[0]
        chosen = choices.reshape(rows, -1)  # earlier tokens first, each one's best choice first
        hot = jax.nn.one_hot(chosen, count, dtype=jnp.int32)
        hot = hot * jnp.repeat(counted, top_k, axis=1)[..., None]
        place = jnp.sum((jnp.cumsum(hot, axis=1) - hot) * hot, axis=-1)
        parts = 2 if is_zigzag else 1
        offsets = _offsets(hot.reshape(rows, parts, -1, count).sum(2))
        earlier = jnp.sum(jnp.repeat(offsets, length * top_k // parts, axis=1) * hot, axis=-1)
        has_place = (hot.sum(-1) > 0) & (earlier + place < capacity)
        places = min(capacity, length)
        # Dropped choices have distinct places out of bounds: no two indices are equal.
        place = jnp.where(has_place, place, places + jnp.arange(length * top_k)[None])
        row = jnp.arange(rows)[:, None]
        repeated = jnp.repeat(x, top_k, axis=1)
        buffer = jnp.zeros((rows, count, places, width), x.dtype)
        buffer = buffer.at[row, chosen, place].set(repeated, unique_indices=True, mode="drop")
        groups = jnp.swapaxes(buffer, 0, 1).reshape(count, rows * places, width)
        if ways > 1:
            groups = lax.all_to_all(groups, "expert", 0, 1, tiled=True)
        groups = experts.run(groups, None, weights)
        if ways > 1:
            groups = lax.all_to_all(groups, "expert", 1, 0, tiled=True)
        buffer = jnp.swapaxes(groups.reshape(count, rows, places, width), 0, 1)
        out = buffer.at[row, chosen, place].get(unique_indices=True, mode="fill", fill_value=0)
        summed = _weighted_sum(out.reshape(rows, length, top_k, width), shares)
        placed = has_place.reshape(rows, length, top_k).astype(jnp.float32)
        return _sum_over_tensor(summed), placed

    ins = (TOKENS, TOKENS, TOKENS, TOKENS[:2], *experts.axes)
    inputs = (x, choices, shares, counted.astype(jnp.int32), *experts.weights)
    return _mapped(run, ins, (TOKENS, TOKENS))(*inputs)


@jax.custom_vjp
def _weighted_sum(parts: Array, shares: Array) -> Array:
    """Return sum_k shares[..., k] parts[..., k, :] in the dtype of `parts`, summed in float32.

    So a share's gradient, a sum over the width, is float32 too. Only the arguments are stored.
    """
    wide = parts.astype(jnp.float32) * shares[..., None]
    return jnp.sum(wide, axis=-2).astype(parts.dtype)


def _weighted_sum_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    parts, shares = residuals
    wide = grad.astype(jnp.float32)[..., None, :]
    parts_grad = (wide * shares[..., None]).astype(parts.dtype)
    return parts_grad, jnp.sum(wide * parts.astype(jnp.float32), axis=-1).astype(shares.dtype)


_weighted_sum.defvjp(lambda *inputs: (_weighted_sum(*inputs), inputs), _weighted_sum_backward)


def _mapped(run: Callable[..., Any], ins: tuple[LogicalAxes, ...], outs: Any) -> Callable[..., Any]:
    """Map `run` over each device's part of its arguments; without a mesh, return `run`.

    fsdp gathers the weights. All axes are manual, as `jax.vmap(..., spmd_axis_name="pipe")` needs.
    Arrays are marked as varying over every axis that splits any, so that gradients of the products
    are sums over a device's rows, and added up over devices once.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run

    def mapped(x: Array, *rest: Array) -> Any:
        whole = {"embed", "length"} if x.shape[1] % rules.split(mesh, "length") else {"embed"}

        def spec(axes: LogicalAxes) -> PartitionSpec:
            return rules.spec(tuple(None if axis in whole else axis for axis in axes))

        specs = tuple(map(spec, ins))
        split = frozenset().union(*map(_mesh_axes, specs))

        def marked(*args: Array) -> Any:
            pairs = zip(args, specs, strict=True)
            return run(*(_varying(arg, split - _mesh_axes(spec)) for arg, spec in pairs))

        out_specs = spec(outs) if outs is TOKENS else tuple(map(spec, outs))
        return jax.shard_map(marked, in_specs=specs, out_specs=out_specs)(x, *rest)

    return mapped


def _mesh_axes(spec: PartitionSpec) -> frozenset[str]:
    entries = ((entry,) if isinstance(entry, str) else entry for entry in spec if entry is not None)
    return frozenset(axis for entry in entries for axis in entry)


def _varying(x: Array, axes: frozenset[str]) -> Array:
    """Mark an array as varying over mesh axes; its gradient is summed over their devices.

    The sum for a weight, over all devices that share a batch, is float32 for any dtype. The sum
    for activations over `tensor` has their dtype, as in every other layer split over it.
    """
    if not axes or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x.astype(jnp.float32) if axes - {"tensor"} else x
    return lax.pcast(wide, tuple(sorted(axes)), to="varying").astype(x.dtype)


def _sum_over_tensor(x: Array) -> Array:
    return x if jax.sharding.get_abstract_mesh().empty else lax.psum(x, "tensor")


def _offsets(totals: Array) -> Array:
    """Return the offsets [B, parts, E] from counts on a device to counts along the row.

    `totals` are those of the device's parts. The first part of device i of n is the i-th of a row,
    the second the i-th from its end.
    """
    if jax.sharding.get_abstract_mesh().empty or lax.axis_size("context") == 1:
        return jnp.zeros_like(totals)
    ways, index = lax.axis_size("context"), lax.axis_index("context")
    is_first = jnp.arange(totals.shape[1])[:, None] == 0
    orders = jnp.where(is_first, jnp.arange(ways), 2 * ways - 1 - jnp.arange(ways))
    own_order = jnp.where(is_first, index, 2 * ways - 1 - index)
    # [parts, parts of others, n]
    is_earlier = (orders[None] < own_order[:, None]).astype(totals.dtype)
    before = jnp.einsum("ijn,nbje->bie", is_earlier, lax.all_gather(totals, "context"))
    return before - (jnp.cumsum(totals, axis=1) - totals)
