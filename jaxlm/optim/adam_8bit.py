"""Adam whose moments of matrices are codes of eight bits, in blocks with a scale each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.optim import rounding
from jaxlm.optim.config import AdamW8bit
from jaxlm.optim.moments import blocks


class Coded(NamedTuple):
    """A moment of a matrix: a code for each number, and the largest size in each block."""

    codes: Array
    scales: Array


class Moments(NamedTuple):
    """The updates so far; and each leaf's two moments, `Coded` for matrices."""

    updates: Array
    first: Any
    second: Any


class Code(NamedTuple):
    """How numbers from -1 to 1 become codes: code c stands for (c / largest)^power."""

    power: int
    largest: int
    dtype: Any


FIRST, SECOND = Code(3, 127, jnp.int8), Code(4, 255, jnp.uint8)


class Stepped(NamedTuple):
    """What an update makes of a leaf."""

    direction: Array
    first: Coded | Array
    second: Coded | Array


def scale_by_adam_8bit(config: AdamW8bit, axes: Any) -> optax.GradientTransformation:
    """Adam's direction, with moments that are rounded to eight bits between the updates.

        m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  u = m' / (sqrt(v') + eps)
        kept: m as s (c / 127)^3 with c from -127 to 127, v as s (c / 255)^4 with c from 0 to 255

    with s the largest |m|, or v, of a block of up to `block` numbers. An update sees its own moments unrounded. Rounding
    is to one of the two nearest codes at random, with the number itself as the mean: a running mean moves by less than a
    code's width each step, and rounding to the nearest would hold it where it is. Only a v of 0 becomes 0, as its root
    divides. The random numbers are those of the update's number, whatever the mesh.

    Matrices of the blocks keep 2 + 8 / block bytes a number, whose block is `moments.blocks` of `block`: 192 for a dimension of
    3,072 that tensor may split, 256 for one of 256 that it does not. Embeddings, norms and biases are AdamW's, 8 bytes.
    Blocks are cut along a dimension that fsdp does not split, and none crosses from one to the next of up to 16 shards of
    tensor: a power of two of devices decodes and codes its own part without the others'. On other meshes, as 3 devices, blocks
    that cross are gathered in each update.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2. There blocks are stretches of 2,048 of the flattened
    tensor, codes are a table (dynamic tree quantization) instead of a power, and rounding is to the nearest.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    numbers = {path: number for number, path in enumerate(names)}

    def cut(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        return blocks(shape, names[path], config.block)

    def init(params: Any) -> Moments:
        def zeros(code: Code) -> Any:
            def zero(path: str, param: Array) -> Coded | Array:
                found = cut(path, param.shape)
                if found is None:
                    return jnp.zeros_like(param)
                dim, size = found
                scales = [n // size if d == dim else n for d, n in enumerate(param.shape)]
                return Coded(jnp.zeros(param.shape, code.dtype), jnp.zeros(scales, jnp.float32))

            return tree.map_with_path(zero, params)

        return Moments(jnp.zeros((), jnp.int32), zeros(FIRST), zeros(SECOND))

    def update(grads: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        del params
        count = state.updates + 1
        t = count.astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(0), count)

        def step(path: str, grad: Array, first: Coded | Array, second: Coded | Array) -> Stepped:
            found = cut(path, grad.shape)
            m = config.b1 * decoded(first, FIRST, found) + (1 - config.b1) * grad
            v = config.b2 * decoded(second, SECOND, found) + (1 - config.b2) * jnp.square(grad)
            root = jnp.sqrt(v / (1 - config.b2**t))
            direction = m / (1 - config.b1**t) / (root + config.eps)
            if found is None:
                return Stepped(direction, m, v)
            bits = jax.random.bits(jax.random.fold_in(key, numbers[path]), grad.shape, jnp.uint32)
            low, high = (half.astype(jnp.float32) / 2**16 for half in (bits & 0xFFFF, bits >> 16))
            return Stepped(
                direction, encoded(m, FIRST, found, low), encoded(v, SECOND, found, high)
            )

        stepped = tree.map_with_path(step, grads, state.first, state.second)

        def pick(part: int) -> Any:
            return jax.tree.map(lambda leaf: leaf[part], stepped, is_leaf=_is_stepped)

        return pick(0), Moments(count, pick(1), pick(2))

    return optax.GradientTransformation(init, update)


def decoded(moment: Coded | Array, code: Code, cut: tuple[int, int] | None) -> Array:
    """The numbers that codes stand for, in blocks of `cut`: along which dimension, and how long."""
    if not isinstance(moment, Coded):
        return moment
    assert cut is not None
    dim, size = cut
    share = moment.codes.astype(jnp.float32) / code.largest
    return share**code.power * jnp.repeat(moment.scales, size, axis=dim)


def encoded(x: Array, code: Code, cut: tuple[int, int], noise: Array) -> Coded:
    """The codes of x; `noise`, from 0 to below 1, decides which of the two nearest each number takes."""
    dim, size = cut
    x = x.astype(jnp.float32)
    blocked = x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])
    scales = jnp.abs(blocked).max(dim + 1)
    share = jnp.abs(x) / jnp.repeat(jnp.where(scales > 0, scales, 1.0), size, axis=dim)
    low = jnp.clip(jnp.floor(share ** (1 / code.power) * code.largest), 0, code.largest - 1)
    below, above = ((end / code.largest) ** code.power for end in (low, low + 1))
    codes = low + rounding.takes_other(share, below, above, noise)
    if code is SECOND:
        codes = jnp.where(x > 0, jnp.maximum(codes, 1.0), codes)
    return Coded((codes * jnp.sign(x)).astype(code.dtype), scales)


def _is_stepped(node: Any) -> bool:
    return isinstance(node, Stepped)
