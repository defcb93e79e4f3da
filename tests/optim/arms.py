"""Every arm of the union `Optimizer`: its update in float64 numpy, and the bytes of its state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.optim.config import (
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    AdamW8bit,
    AmsGrad,
    Lion,
    Momentum,
    Muon,
    Nadam,
    Nesterov,
    Optimizer,
    RmsProp,
    ScheduleFree,
    Sgd,
    Soap,
    Sophia,
)
from jaxlm.optim.sophia import CurvatureEstimate

AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "norm": {"scale": ("embed",)},
    "stack": {
        "out": {"weight": ("layers", "heads", "head_dim", "embed")},
        "query": {
            "weight": ("layers", "embed", "heads", "head_dim"),
            "bias": ("layers", "heads", "head_dim"),
        },
        "up": {"weight": ("layers", "embed", "mlp")},
    },
}
SIZES = {"vocab": 6, "embed": 4, "layers": 3, "heads": 2, "head_dim": 2, "mlp": 6}
INPUTS = {"stack/out/weight": 4, "stack/query/weight": 4, "stack/up/weight": 4}  # of the matrices
# Where adamw8bit cuts a layer of them into blocks of up to three: which dimension, and how long.
BLOCKS = {"stack/out/weight": (1, 2), "stack/query/weight": (2, 2), "stack/up/weight": (1, 3)}
NEAR = {"rtol": 2e-5, "atol": 2e-6}  # how near every arm comes to its update in float64
PATHS = list(tree.leaves(AXES, is_leaf=lambda node: isinstance(node, tuple)))


@dataclasses.dataclass
class Leaf:
    """One layer of a parameter, and what its reference remembers of it, from step to step."""

    path: str
    layer: int
    value: np.ndarray
    seen: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def decays(self) -> bool:
        """If it is a matrix or a table."""
        return self.path.endswith(("weight", "table"))

    @property
    def is_matrix(self) -> bool:
        return self.path in INPUTS

    def mean(self, name: str, decay: float, new: np.ndarray) -> np.ndarray:
        """The running mean of this name, with one more value."""
        self.seen[name] = decay * self.seen.get(name, 0.0) + (1 - decay) * new
        return self.seen[name]


Direction = Callable[[Any, Leaf, np.ndarray, int], np.ndarray]


def sgd(c, leaf, g, t):
    return g


def momentum(c, leaf, g, t):
    leaf.seen["m"] = c.momentum * leaf.seen.get("m", 0.0) + g
    return leaf.seen["m"]


def nesterov(c, leaf, g, t):
    return g + c.momentum * momentum(c, leaf, g, t)


def adagrad(c, leaf, g, t):
    leaf.seen["sum"] = leaf.seen.get("sum", c.initial) + g * g
    return g / np.sqrt(leaf.seen["sum"])


def rmsprop(c, leaf, g, t):
    return g / (np.sqrt(leaf.mean("v", c.decay, g * g)) + c.eps)


def adam(c, leaf, g, t):
    m, v = leaf.mean("m", c.b1, g), leaf.mean("v", c.b2, g * g)
    return m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.eps)


def nadam(c, leaf, g, t):
    m, v = leaf.mean("m", c.b1, g), leaf.mean("v", c.b2, g * g)
    lookahead = c.b1 * m / (1 - c.b1 ** (t + 1)) + (1 - c.b1) * g / (1 - c.b1**t)
    return lookahead / (np.sqrt(v / (1 - c.b2**t)) + c.eps)


def amsgrad(c, leaf, g, t):
    m, v = leaf.mean("m", c.b1, g), leaf.mean("v", c.b2, g * g)
    leaf.seen["most"] = np.maximum(leaf.seen.get("most", 0.0), v / (1 - c.b2**t))
    return m / (1 - c.b1**t) / (np.sqrt(leaf.seen["most"]) + c.eps)


def adamw8bit(c, leaf, g, t):
    if not leaf.is_matrix:
        return adam(c, leaf, g, t)
    m, v = leaf.mean("m", c.b1, g), leaf.mean("v", c.b2, g * g)
    # The same random halves of 32 bits: by the update's number, then by the leaf's.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), t), PATHS.index(leaf.path))
    bits = np.asarray(jax.random.bits(key, (SIZES["layers"], *g.shape), jnp.uint32))[leaf.layer]
    dim, size = BLOCKS[leaf.path]
    leaf.seen["m"] = rounded(m, (np.arange(128) / 127) ** 3, dim, size, bits % 2**16 / 2**16)
    leaf.seen["v"] = rounded(v, (np.arange(256) / 255) ** 4, dim, size, bits // 2**16 / 2**16)
    leaf.seen["v"] = np.maximum(leaf.seen["v"], (v > 0) * largest(v, dim, size) / 255**4)
    return m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.eps)


def largest(x, dim, size):
    """The largest |x| of the block of each number."""
    parts = np.split(np.abs(x), x.shape[dim] // size, axis=dim)
    return np.concatenate(
        [np.broadcast_to(part.max(dim, keepdims=True), part.shape) for part in parts], axis=dim
    )


def rounded(x, book, dim, size, noise):
    """Each number as one of the two nearest entries of the book, times the largest of its block.

    Args:
      x: numbers.
      book: values of the codes, ascending.
      dim: dimension along which blocks are cut.
      size: numbers in a block along it.
      noise: uniform in [0, 1); decides between the two.
    """
    scale = largest(x, dim, size)
    share = np.abs(x) / scale
    low = np.clip(np.searchsorted(book, share, side="right") - 1, 0, len(book) - 2)
    up = noise < (share - book[low]) / (book[low + 1] - book[low])
    return np.sign(x) * book[low + up] * scale


def schedule_free(c, leaf, g, t):
    rate, x, z = 0.01 / t, leaf.value, leaf.seen.get("z", leaf.value)
    y = c.b1 * x + (1 - c.b1) * z
    v = leaf.mean("v", c.b2, g * g)
    decay = c.weight_decay if leaf.decays else 0.0
    size = rate * np.sqrt(1 - c.b2**t)
    leaf.seen["z"] = z = z - size * (g / (np.sqrt(v) + c.eps) + decay * y)
    leaf.seen["sum"] = leaf.seen.get("sum", 0.0) + size**2
    share = size**2 / leaf.seen["sum"]
    # As a direction: the suite multiplies it by `rate` and adds the decay.
    return (x - ((1 - share) * x + share * z)) / rate - decay * x


def lion(c, leaf, g, t):
    u = np.sign(c.b1 * leaf.seen.get("m", 0.0) + (1 - c.b1) * g)
    leaf.mean("m", c.b2, g)
    return u


def adafactor(c, leaf, g, t):
    beta, square = 1 - t**-c.exponent, g * g + c.eps
    large = np.sort(g.shape)[-2:]
    if len(large) == 2 and large[0] >= c.factor_from:
        # The two largest dimensions, the later of equal ones; means over each.
        first, last = sorted(sorted(range(g.ndim), key=lambda d: (g.shape[d], d))[-2:])
        row = leaf.mean("row", beta, square.sum(last, keepdims=True))
        col = leaf.mean("col", beta, square.sum(first, keepdims=True))
        second = row * col / row.sum(first, keepdims=True)
    else:
        second = leaf.mean("v", beta, square)
    u = g / np.sqrt(second)
    u = u / max(1, np.sqrt((u * u).mean()) / c.clip_update)
    return u * max(c.smallest_scale, np.sqrt((leaf.value**2).mean()))


def muon(c, leaf, g, t):
    if not leaf.is_matrix:
        return c.adam_lr / c.lr * adam(c, leaf, g, t)
    m = leaf.mean("m", c.momentum, g)
    lookahead = (c.momentum * m + (1 - c.momentum) * g).reshape(INPUTS[leaf.path], -1)
    ins, outs = lookahead.shape
    return (orthogonal(lookahead, c.newton_schulz_steps) * max(1, outs / ins) ** 0.5).reshape(
        g.shape
    )


def soap(c, leaf, g, t):
    if not leaf.is_matrix:
        return adam(c, leaf, g, t)
    x, seen = g.reshape(INPUTS[leaf.path], -1), leaf.seen
    squares = [x @ x.T, x.T @ x]
    bases = seen.get("bases", [np.eye(len(square)) for square in squares])
    u = np.zeros(x.shape)
    if t > 1:
        m = leaf.mean("m", c.b1, x) / (1 - c.b1 ** (t - 1))
        v = leaf.mean("v", c.b2, (bases[0].T @ x @ bases[1]) ** 2) / (1 - c.b2 ** (t - 1))
        u = bases[0] @ (bases[0].T @ m @ bases[1] / (np.sqrt(v) + c.eps)) @ bases[1].T
    for side, square in enumerate(squares):
        mean = leaf.mean(f"square {side}", c.b2, square)
        if len(square) <= c.max_dim and t == 1:
            bases[side] = np.linalg.eigh(mean)[1][:, ::-1]
        elif len(square) <= c.max_dim and (t - 1) % c.every == 0:
            bases[side] = np.linalg.qr(mean @ bases[side])[0]
    seen["bases"] = bases
    return u.reshape(g.shape)


def sophia(c, leaf, g, t):
    m = leaf.mean("m", c.b1, g)
    if t % c.every == 1:
        leaf.mean("h", c.b2, 20 * g * g)
    return np.clip(m / np.maximum(c.gamma * leaf.seen["h"], c.eps), -1, 1)


def extra_args(config, grads, t):
    """Extra arguments of update t: an estimate of the curvature if it is due, else nonsense."""
    if not isinstance(config, Sophia):
        return {}
    is_due = t % config.every == 1
    diagonal = jax.tree.map(lambda g: 20 * g * g if is_due else g + 1e3, grads)
    return {"curvature": CurvatureEstimate(jnp.asarray(is_due), diagonal)}


def orthogonal(x, steps):
    a, b, c = 3.4445, -4.7750, 2.0315
    flip = x.shape[0] > x.shape[1]
    y = (x.T if flip else x) / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if flip else y


@dataclasses.dataclass(frozen=True)
class Arm:
    """A config, its update in float64, and its bytes of state for a number of a large matrix."""

    config: Optimizer
    direction: Direction
    matrix_bytes: float


ARMS = {
    AdamW: Arm(AdamW(weight_decay=0.3), adam, 8),
    Sgd: Arm(Sgd(weight_decay=0.3), sgd, 0),
    Momentum: Arm(Momentum(weight_decay=0.3), momentum, 4),
    Nesterov: Arm(Nesterov(weight_decay=0.3), nesterov, 4),
    Adagrad: Arm(Adagrad(initial=0.1, weight_decay=0.3), adagrad, 4),
    RmsProp: Arm(RmsProp(weight_decay=0.3), rmsprop, 4),
    Adam: Arm(Adam(), adam, 8),
    Nadam: Arm(Nadam(weight_decay=0.3), nadam, 8),
    AmsGrad: Arm(AmsGrad(weight_decay=0.3), amsgrad, 12),
    AdamW8bit: Arm(AdamW8bit(block=3, weight_decay=0.3), adamw8bit, 2 + 8 / 128),
    ScheduleFree: Arm(ScheduleFree(weight_decay=5.0), schedule_free, 8),
    Lion: Arm(Lion(weight_decay=0.3), lion, 4),
    Adafactor: Arm(Adafactor(factor_from=4, weight_decay=0.3), adafactor, 4 / 512 + 4 / 2048),
    Muon: Arm(Muon(newton_schulz_dtype="float32", adam_lr=0.005, weight_decay=0.3), muon, 4),
    # The first gradient does not determine the basis of a side that is longer by two.
    Soap: Arm(Soap(max_dim=4, weight_decay=0.3), soap, 8 + 8 * (512 / 2048 + 2048 / 512)),
    Sophia: Arm(Sophia(every=3, gamma=0.5), sophia, 8),
}
