"""Adam with 8-bit moments: matrices in blocks of codes, each block with a float32 scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.optim import rounding
from jaxlm.optim.config import AdamW8bit
from jaxlm.optim.moments import blocks


class QuantizedMoment(NamedTuple):
    """Moment of a matrix: a code for each number, and the largest absolute value of each block."""

    codes: Array
    scales: Array


Moment = QuantizedMoment | Array


class Adam8bitState(NamedTuple):
    """Number of updates, and two moments of each leaf: `QuantizedMoment` for matrices."""

    updates: Array
    first: Any
    second: Any


class PowerCode(NamedTuple):
    """Quantization of numbers from -1 to 1: code c represents (c / largest)^power."""

    power: int
    largest: int
    dtype: Any


M_CODE, V_CODE = PowerCode(3, 127, jnp.int8), PowerCode(4, 255, jnp.uint8)  # of the two moments


def scale_by_adam_8bit(config: AdamW8bit, axes: Any) -> optax.GradientTransformation:
    """Return Adam's direction, with moments rounded to eight bits between updates.

        m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  u = m' / (sqrt(v') + eps)

    m' = m / (1 - b1^t) and v' = v / (1 - b2^t) use the moments before rounding. m is stored as
    s (c / 127)^3 with c from -127 to 127, v as s (c / 255)^4 with c from 0 to 255, with s the
    largest |m|, or v, of a block of up to `block` numbers.

    Rounding is stochastic, to one of the two nearest codes with the number itself as the mean: a
    running mean changes by less than the distance between codes in each step, and rounding to the
    nearest would never change it. Only a v of 0 is rounded to 0, because u divides by its root. The
    random numbers depend on the number of the update, not on the mesh.

    State for each number of a block's matrix: 2 + 8 / size bytes, with the block size of
    `moments.blocks`: 192 for a dimension of 3,072 that the tensor axis may split, 256 for one of
    256 that it does not. Embeddings, norms and biases have AdamW's 8 bytes.

    Blocks are cut along a dimension that fsdp does not split, and no block crosses the boundary
    between two of up to 16 tensor shards: on a power of two of devices, each quantizes its own
    shard without communication. On other meshes, such as 3 devices, blocks that cross a boundary
    are gathered in each update.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2. There a block is 2,048 numbers of the
    flattened tensor, codes are a table (dynamic tree quantization) instead of a power, and rounding
    is to the nearest.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    numbers = {path: number for number, path in enumerate(names)}

    def block_of(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        return blocks(shape, names[path], config.block)

    def init(params: Any) -> Adam8bitState:
        def zeros(code: PowerCode) -> Any:
            def zero(path: str, param: Array) -> Moment:
                block = block_of(path, param.shape)
                if block is None:
                    return jnp.zeros_like(param)
                dim, size = block
                scales = [n // size if d == dim else n for d, n in enumerate(param.shape)]
                codes = jnp.zeros(param.shape, code.dtype)
                return QuantizedMoment(codes, jnp.zeros(scales, jnp.float32))

            return tree.map_with_path(zero, params)

        return Adam8bitState(jnp.zeros((), jnp.int32), zeros(M_CODE), zeros(V_CODE))

    def update(grads: Any, state: Adam8bitState, params: Any = None) -> tuple[Any, Adam8bitState]:
        del params
        count = state.updates + 1
        t = count.astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(0), count)

        # The direction of a leaf, and its next moments.
        def step(path: str, grad: Array, first: Moment, second: Moment) -> tuple[Any, ...]:
            block = block_of(path, grad.shape)
            m = config.b1 * dequantize(first, M_CODE, block) + (1 - config.b1) * grad
            v = config.b2 * dequantize(second, V_CODE, block) + (1 - config.b2) * jnp.square(grad)
            root = jnp.sqrt(v / (1 - config.b2**t))
            direction = m / (1 - config.b1**t) / (root + config.eps)
            if block is None:
                return direction, m, v
            bits = jax.random.bits(jax.random.fold_in(key, numbers[path]), grad.shape, jnp.uint32)
            low, high = (half.astype(jnp.float32) / 2**16 for half in (bits & 0xFFFF, bits >> 16))
            return direction, quantize(m, M_CODE, block, low), quantize(v, V_CODE, block, high)

        leaves = tree.map_with_path(step, grads, state.first, state.second)
        structure: Any = jax.tree.structure(grads)
        directions, first, second = map(
            structure.unflatten, zip(*structure.flatten_up_to(leaves), strict=True)
        )
        return directions, Adam8bitState(count, first, second)

    return optax.GradientTransformation(init, update)


def dequantize(moment: Moment, code: PowerCode, block: tuple[int, int] | None) -> Array:
    """Return a moment as numbers; `block` is the dimension of its blocks and their size."""
    if not isinstance(moment, QuantizedMoment):
        return moment
    assert block is not None
    dim, size = block
    share = moment.codes.astype(jnp.float32) / code.largest
    return share**code.power * jnp.repeat(moment.scales, size, axis=dim)


def quantize(x: Array, code: PowerCode, block: tuple[int, int], noise: Array) -> QuantizedMoment:
    """Return x as codes, stochastically rounded by uniform `noise` in [0, 1) of x's shape."""
    dim, size = block
    x = x.astype(jnp.float32)
    blocked = x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])
    scales = jnp.abs(blocked).max(dim + 1)
    share = jnp.abs(x) / jnp.repeat(jnp.where(scales > 0, scales, 1.0), size, axis=dim)
    low = jnp.clip(jnp.floor(share ** (1 / code.power) * code.largest), 0, code.largest - 1)
    below, above = ((end / code.largest) ** code.power for end in (low, low + 1))
    codes = low + rounding.takes_other(share, below, above, noise)
    if code is V_CODE:
        codes = jnp.where(x > 0, jnp.maximum(codes, 1.0), codes)
    return QuantizedMoment((codes * jnp.sign(x)).astype(code.dtype), scales)
