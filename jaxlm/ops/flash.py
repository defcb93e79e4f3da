"""Flash attention: an online softmax over blocks of keys, and its gradients block by block.

Two loops share it: `blockwise` over the blocks of whole rows, `ring_attention` over the devices
among which the `context` axis splits rows. Neither stores the scores; the backward pass computes
them again from the saved log normalizers.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlm.core import backend
from jaxlm.ops.kernels import BLOCK
from jaxlm.ops.masks import HIDDEN, Mask
from jaxlm.ops.row_product import of_used_rows
from jaxlm.parallel import context

Tree = TypeVar("Tree")
Bound = Array | int
T_AXIS, S_AXIS = 3, 1  # of every array of queries, and of keys


class StaticArgs(NamedTuple):
    """Arguments that are fixed when the program is compiled."""

    causal: bool
    window: int | None
    is_zigzag: bool
    compute: jnp.dtype  # of the products' operands
    scale: float
    softcap: float | None
    block: int = 0  # tokens of a block; 0 runs the ring
    leading: int = 0  # keys before the row, of a blockwise loop
    ahead: int = 0  # those of them that are no queries


class Queries(NamedTuple):
    """Scaled queries in the compute dtype; each of K key heads serves G query heads."""

    q: Float[Array, "B K G T H"]
    indices: Int[Array, "B 1 1 T"]
    segments: Int[Array, "B 1 1 T"] | None
    visible_until: Int[Array, "B 1 1 T"] | None
    prefix_segments: Int[Array, "B 1 1 T"] | None


class Keys(NamedTuple):
    """Keys and values in the compute dtype."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K U"]
    indices: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None


class OnlineSoftmax(NamedTuple):
    """State of the online softmax after some keys, in float32."""

    out: Float[Array, "B K G T U"]  # sum of exp(score - peak) x value
    peak: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]  # sum of exp(score - peak)

    @classmethod
    def empty(cls, queries: Queries, size: int) -> "OnlineSoftmax":
        """Return the state before the first key, for values of this size."""
        shape = queries.q.shape[:-1]
        out, total = jnp.zeros((*shape, size), jnp.float32), jnp.zeros(shape, jnp.float32)
        return cls(out, jnp.full(shape, HIDDEN, jnp.float32), total)

    def finish(self) -> tuple[Array, Array]:
        """Return the normalized output and the log normalizer."""
        return self.out / self.total[..., None], self.peak + jnp.log(self.total)


class Residuals(NamedTuple):
    """Inputs of the backward pass for each query."""

    grad: Float[Array, "B K G T U"]
    log_normalizer: Float[Array, "B K G T"]
    mean: Float[Array, "B K G T"]  # weighted mean of the weights' gradients: sum_h grad x out

    @classmethod
    def of(cls, static: StaticArgs, key: Array, *outputs: Array) -> "Residuals":
        """Return them from the output, the log normalizer and the output's gradient."""
        out, log_normalizer, grad = outputs
        wide = by_head(grad.astype(jnp.float32), key)
        mean = (wide * by_head(out.astype(jnp.float32), key)).sum(-1)
        return cls(wide.astype(static.compute), log_normalizer, mean)


class Slice(NamedTuple):
    """`size` slots from `start` on, along one axis of every array of a tree."""

    axis: int
    start: Any
    size: int

    def of(self, tree: Tree) -> Tree:
        """Return the slice of every array."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, self.start, self.size, self.axis), tree
        )

    def into(self, tree: Tree, part: Tree) -> Tree:
        """Return the arrays with this slice replaced."""
        return jax.tree.map(
            lambda x, y: lax.dynamic_update_slice_in_dim(x, y, self.start, self.axis), tree, part
        )


def by_head(x: Array, key: Array) -> Array:
    """Return [B, T, N, H] as [B, K, G, T, H]."""
    grouped = x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[3])
    return grouped.transpose(0, 2, 3, 1, 4)


def by_token(x: Array, like: Array) -> Array:
    """Return [B, K, G, T, H] as [B, T, N, H], in the dtype of `like`."""
    batch, kv_heads, groups, length, size = x.shape
    tokens = x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, size)
    return tokens.astype(like.dtype)


def _operands(
    static: StaticArgs, query: Array, key: Array, value: Array, query_meta: Any, key_meta: Any
) -> tuple[Queries, Keys]:
    """Group queries by key head, and cast; see `_flash` for the metadata."""
    scaled = by_head((query * static.scale).astype(static.compute), key)
    return Queries(scaled, *jax.tree.map(lambda x: x[:, None, None], query_meta)), Keys(
        key.astype(static.compute), value.astype(static.compute), *(key_meta or query_meta[:2])
    )


def online_softmax_update(
    static: StaticArgs, queries: Queries, keys: Keys, state: OnlineSoftmax
) -> OnlineSoftmax:
    """Return the state of the softmax after more keys."""
    scores, _ = _scores(static, queries, keys)
    peak = jnp.maximum(state.peak, scores.max(-1))
    weights = jnp.exp(scores - peak[..., None])
    decay = jnp.exp(state.peak - peak)
    added = product("bkgts,bskh->bkgth", weights.astype(static.compute), keys.v)
    return OnlineSoftmax(
        state.out * decay[..., None] + added, peak, state.total * decay + weights.sum(-1)
    )


def _block_gradients(
    static: StaticArgs, queries: Queries, keys: Keys, residuals: Residuals
) -> tuple[Array, Array, Array]:
    """Return what these queries and keys add to the gradients of q, k and v."""
    scores, slope = _scores(static, queries, keys)
    weights = jnp.exp(scores - residuals.log_normalizer[..., None])
    v_grad = product("bkgts,bkgth->bskh", weights.astype(static.compute), residuals.grad)
    weights_grad = product("bkgth,bskh->bkgts", residuals.grad, keys.v)
    scores_grad = weights * (weights_grad - residuals.mean[..., None]) * slope
    low = scores_grad.astype(static.compute)
    q_grad = product("bkgts,bskh->bkgth", low, keys.k)
    return q_grad, product("bkgts,bkgth->bskh", low, queries.q), v_grad


def _scores(static: StaticArgs, queries: Queries, keys: Keys) -> tuple[Array, Array | float]:
    """Return scores after softcap and mask, and the slope of the softcap."""
    scores = product("bkgth,bskh->bkgts", queries.q, keys.k)
    slope: Array | float = 1.0
    if static.softcap is not None:
        capped = jnp.tanh(scores / static.softcap)
        scores, slope = static.softcap * capped, 1.0 - jnp.square(capped)
    index, segments, until, prefix_segments = jax.tree.map(lambda x: x[:, 0, 0], queries[1:])
    mask = Mask(
        query_index=index,
        key_index=keys.indices,
        query_segments=segments,
        key_segments=keys.segments,
        visible_until=until,
        prefix_segments=prefix_segments,
        causal=static.causal,
        window=static.window,
        leading=static.leading,
    )
    return jnp.where(mask.materialize()[:, None, None], scores, HIDDEN), slope


def product(equation: str, x: Array, y: Array) -> Array:
    """Return an einsum with float32 sums."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def query_product(equation: str, x: Float[Array, "B K G T C"], y: Array) -> Array:
    """Return `product`, fast on a CPU for a single query too.

    One row of bfloat16 is duplicated there: XLA would convert y to float32, in seven times the time
    of two rows (8 rows, 12 heads of 64, 128 keys, AMX, jax 0.12). In a decode pass only the rows in
    use are computed, see `of_used_rows`.
    """
    return of_used_rows(lambda used: _query_product(equation, used, y[: len(used)]), x)


def _query_product(equation: str, x: Array, y: Array) -> Array:
    is_row = x.shape[2] * x.shape[3] == 1
    if is_single := is_row and x.dtype == jnp.bfloat16 and backend.name() == "cpu":
        x = jnp.broadcast_to(x, (*x.shape[:3], 2, x.shape[4]))
    out = product(equation, x, y)
    return out[:, :, :, :1] if is_single else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
    static: StaticArgs, query: Array, key: Array, value: Array, query_meta: Any, key_meta: Any
) -> Array:
    """Run one of the loops.

    `query_meta` is (index, segments, visible_until, prefix_segments) and `key_meta` (index,
    segments), or empty if they are those of the queries.
    """
    return _forward(static, query, key, value, query_meta, key_meta)[0]


def _forward(static: StaticArgs, *inputs: Any) -> tuple[Array, Any]:
    loop = _blockwise_forward if static.block else _ring_forward
    out, log_normalizer = loop(static, *inputs)
    return out, (*inputs, out, log_normalizer)


def _backward(static: StaticArgs, residuals: Any, out_grad: Array) -> tuple[Any, ...]:
    loop = _blockwise_backward if static.block else _ring_backward
    return (*loop(static, *residuals, out_grad), None, None)


_flash.defvjp(_forward, _backward)


def _cast_gradients(
    static: StaticArgs, grads: tuple[Array, Array, Array], query: Array, key: Array, value: Array
) -> tuple[Array, Array, Array]:
    q_grad, k_grad, v_grad = grads
    q_grad = by_token(q_grad * static.scale, query)
    return q_grad, k_grad.astype(key.dtype), v_grad.astype(value.dtype)


def blockwise(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    softcap: float | None = None,
    block: int = BLOCK,
) -> Float[Array, "B T N U"]:
    """Return softmax(softcap(scale x Q K^T) + mask) V over blocks of `block` queries and keys.

    At most B N block^2 scores exist at a time, so memory grows with the row, not with its square.
    Blocks hidden by causality or a window are skipped: half of the products of a causal row. With
    `visible_until` each block of queries stops at the largest value in any row. Rows are padded to
    a multiple of `block` with hidden slots. Queries are the last T of the S slots: there are more
    keys if the mask has leading ones that are no queries.

    Args: as in `ops.attention.attention`, and the size of a block.

    Raises ValueError if the mask is not one of whole rows.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B.2; the order of loops of
    Rabe and Staats 2021, arXiv:2112.05682.
    """
    if not mask.is_whole:
        raise ValueError("blockwise attention needs a mask of whole rows")
    length = query.shape[1]
    block = min(block, length)
    ahead = key.shape[1] - length
    static = StaticArgs(
        *(mask.causal, mask.window, mask.is_zigzag, compute, scale, softcap, block),
        leading=mask.leading,
        ahead=ahead,
    )

    def padded(x: Array, fill: int = 0) -> Array:
        rest = ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), *rest), constant_values=fill)

    def slots(segments: Array | None, length: int, first: int) -> tuple[Array, Array | None]:
        if segments is None and not mask.causal:
            segments = jnp.zeros((1, length), jnp.int32)
        index = jnp.arange(first, first + length - length % -block, dtype=jnp.int32)[None]
        # No segment is -1, not even padding, which sees itself.
        return index, None if segments is None else padded(segments, -1)

    index, segments = slots(mask.query_segments, length, ahead - mask.leading)
    until = None if mask.visible_until is None else padded(mask.visible_until)
    if until is not None:
        until = jnp.maximum(until, index)  # the added slots see themselves
    prefix = None if mask.prefix_segments is None else padded(mask.prefix_segments, -1)
    key_meta = slots(mask.key_segments, length + ahead, -mask.leading) if ahead else ()
    query, key, value = map(padded, (query, key, value))
    return _flash(static, query, key, value, (index, segments, until, prefix), key_meta)[:, :length]


def _blockwise_forward(static: StaticArgs, *inputs: Any) -> tuple[Array, Array]:
    (query, _, value), block = inputs[:3], static.block
    queries, keys = _operands(static, *inputs)
    count, keys_count = query.shape[1] // block, value.shape[1] // block

    def row(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        part = Slice(T_AXIS, i * block, block).of(queries)

        def update(j: Array, state: OnlineSoftmax) -> OnlineSoftmax:
            visible = Slice(S_AXIS, j * block, block).of(keys)
            return online_softmax_update(static, part, visible, state)

        bounds = _visible_blocks(static, keys_count, i, part.visible_until)
        state = OnlineSoftmax.empty(part, value.shape[-1])
        return None, lax.fori_loop(*bounds, update, state).finish()

    _, (out, log_normalizer) = lax.scan(row, None, jnp.arange(count))
    return by_token(_join_blocks(out), query), _join_blocks(log_normalizer)


def _blockwise_backward(static: StaticArgs, *inputs: Any) -> tuple[Array, Array, Array]:
    (query, key, value), block = inputs[:3], static.block
    queries, keys = _operands(static, *inputs[:5])
    residuals = Residuals.of(static, key, *inputs[5:])
    count, keys_count = query.shape[1] // block, value.shape[1] // block

    def row(grads: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        rows = Slice(T_AXIS, i * block, block)
        part, of_part = rows.of(queries), rows.of(residuals)

        def update(j: Array, carry: tuple[Array, tuple[Array, Array]]) -> Any:
            q_grad, grads = carry
            columns = Slice(S_AXIS, j * block, block)
            q_added, *added = _block_gradients(static, part, columns.of(keys), of_part)
            added = jax.tree.map(jnp.add, columns.of(grads), tuple(added))
            return q_grad + q_added, columns.into(grads, added)

        start = jnp.zeros(part.q.shape, jnp.float32), grads
        bounds = _visible_blocks(static, keys_count, i, part.visible_until)
        q_grad, grads = lax.fori_loop(*bounds, update, start)
        return grads, q_grad

    zeros = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    grads, q_grad = lax.scan(row, zeros, jnp.arange(count))
    return _cast_gradients(static, (_join_blocks(q_grad), *grads), query, key, value)


def _visible_blocks(
    static: StaticArgs, count: int, i: Array, visible_until: Array | None = None
) -> tuple[Bound, Bound]:
    """Return the range of key blocks that the i-th block of queries may see, of `count`."""
    first: Bound = 0
    if static.window is not None and not static.leading:
        first = jnp.maximum(0, (i * static.block - static.window + 1) // static.block)
    if visible_until is not None:
        stop = (visible_until.max() + static.leading) // static.block + 1
    elif static.causal:
        stop = i + 1 + -(-static.ahead // static.block)
    else:
        return first, count
    return first, jnp.minimum(stop, count) if static.leading else stop


def _join_blocks(blocks: Array) -> Array:
    """Return [blocks, B, K, G, T, ...] as [B, K, G, blocks x T, ...]."""
    moved = jnp.moveaxis(blocks, 0, 3)
    return moved.reshape(*moved.shape[:3], -1, *moved.shape[5:])


def ring_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask,
    compute: jnp.dtype,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N U"]:
    """Return softmax(softcap(scale x Q K^T) + mask) V; each device sees one other's keys a hop.

    Keys take C - 1 hops forward, and again backward together with their float32 gradients. So a
    device holds the keys of T / C slots and (T / C)^2 scores for any C. In zigzag order under a
    causal mask without `visible_until`, each hop computes only the visible half of its products,
    the same amount on every device.

    Args: as in `ops.attention.attention`.

    Raises ValueError if the slots cannot be split evenly, or the mask has prefix segments.

    Source: Liu et al. 2023, arXiv:2310.01889; striped balance Brandon et al. 2023,
    arXiv:2311.09431, there token by token; online softmax and backward pass Dao et al. 2022,
    arXiv:2205.14135, section 3.1 and appendix B.2.
    """
    if query.shape[1] % (parts := context.context_size()):
        raise ValueError(f"{query.shape[1]} slots do not divide over {parts} devices")
    if mask.prefix_segments is not None:
        raise ValueError("ring attention has no prefix segments")
    static = StaticArgs(mask.causal, mask.window, mask.is_zigzag, compute, scale, softcap)
    query_meta = (mask.query_index, mask.query_segments, mask.visible_until, None)
    return _flash(static, query, key, value, query_meta, (mask.key_index, mask.key_segments))


def _ring_forward(static: StaticArgs, *inputs: Any) -> tuple[Array, Array]:
    parts = context.context_size()

    def local(*inputs: Any) -> tuple[Array, Array]:
        query, _, value = inputs[:3]
        queries, keys = _operands(static, *inputs)

        def update(keys: Keys, state: OnlineSoftmax, hop: Bound) -> OnlineSoftmax:
            for q_slice, k_slice in _hop_slices(static, queries, keys, hop):
                part = online_softmax_update(
                    static, q_slice.of(queries), k_slice.of(keys), q_slice.of(state)
                )
                state = q_slice.into(state, part)
            return state

        def run_hop(carry: tuple[OnlineSoftmax, Keys], hop: Array) -> tuple[Any, None]:
            state, keys = carry
            return (update(keys, state, hop), context.ring_permute(keys, parts)), None

        # Keys are sent on while the device computes with them.
        state = OnlineSoftmax.empty(queries, value.shape[-1])
        state = online_softmax_update(static, queries, keys, state)
        start = (state, context.ring_permute(keys, parts))
        (state, keys), _ = lax.scan(run_hop, start, jnp.arange(1, parts - 1))
        out, log_normalizer = update(keys, state, parts - 1).finish()
        return by_token(out, query), log_normalizer

    specs, stats = _specs(*inputs)
    return context.on_each(local, specs, (specs[0], stats))(*inputs)


def _ring_backward(static: StaticArgs, *inputs: Any) -> tuple[Array, Array, Array]:
    parts = context.context_size()

    def local(*inputs: Any) -> tuple[Array, Array, Array]:
        query, key, value = inputs[:3]
        queries, keys = _operands(static, *inputs[:5])
        residuals = Residuals.of(static, key, *inputs[5:])

        def run_hop(carry: tuple[Array, Any], hop: Array) -> tuple[Any, None]:
            q_grad, (keys, grads) = carry[0], context.ring_permute(carry[1], parts)
            for q_slice, k_slice in _hop_slices(static, queries, keys, hop):
                q_added, *added = _block_gradients(
                    static, q_slice.of(queries), k_slice.of(keys), q_slice.of(residuals)
                )
                q_grad = q_slice.into(q_grad, q_slice.of(q_grad) + q_added)
                grads = k_slice.into(grads, jax.tree.map(jnp.add, k_slice.of(grads), tuple(added)))
            return (q_grad, (keys, grads)), None

        q_grad, *local_grads = _block_gradients(static, queries, keys, residuals)
        start = (q_grad, (keys, tuple(local_grads)))
        (q_grad, (_, grads)), _ = lax.scan(run_hop, start, jnp.arange(1, parts))
        k_grad, v_grad = context.ring_permute(grads, parts)  # back to the keys' own device
        return _cast_gradients(static, (q_grad, k_grad, v_grad), query, key, value)

    specs, stats = _specs(*inputs[:5])
    return context.on_each(local, (*specs, specs[0], stats, specs[0]), specs[:3])(*inputs)


def _hop_slices(
    static: StaticArgs, queries: Queries, keys: Keys, hop: Bound
) -> list[tuple[Slice, Slice]]:
    """Return the slices of queries and keys that a hop multiplies.

    In zigzag order a device has an early and a late chunk. Its late queries see the early keys of
    every other device. Its early queries see the early keys of a device before it, and its late
    queries the late keys of a device after it.
    """
    t, s = queries.q.shape[T_AXIS], keys.k.shape[S_AXIS]
    if not (static.causal and static.is_zigzag) or queries.visible_until is not None:
        return [(Slice(T_AXIS, 0, t), Slice(S_AXIS, 0, s))]
    is_after = jnp.asarray(hop > context.shard_index(), jnp.int32)
    t, s = t // 2, s // 2
    return [
        (Slice(T_AXIS, t, t), Slice(S_AXIS, 0, s)),
        (Slice(T_AXIS, is_after * t, t), Slice(S_AXIS, is_after * s, s)),
    ]


def _specs(
    _query: Array, key: Array, _value: Array, query_meta: Any, key_meta: Any
) -> tuple[Any, Any]:
    """Return the layouts of the inputs, and of an array with a number per query and head."""

    def slots(x: Array) -> Any:
        return context.spec(x.shape, "batch", "length")

    vectors = context.spec(key.shape, "batch", "length", "kv_heads", "head_dim")
    batch, length, heads, _ = vectors
    stats = PartitionSpec(batch, heads, None, length)
    return (*(vectors,) * 3, jax.tree.map(slots, query_meta), jax.tree.map(slots, key_meta)), stats
