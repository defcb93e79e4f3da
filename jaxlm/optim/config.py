"""Settings of the optimizer."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

Problems = Iterator[tuple[str, str, str]]

# Settings that several optimizers have, each with a default of its own.
LR = "peak learning rate"
FIRST = "decay of the gradient's running mean"
SECOND = "decay of the squared gradient's running mean"
EPS = "added to the root of the second moment"
DECAY = "share of a weight lost per update, times the learning rate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """What every optimizer has: clipping, and which parameters decay and learn how fast.

    Patterns are shell patterns over leaf paths such as `stack/0/attention/query/weight`; `*` crosses slashes.
    """

    clip_norm: float | None = setting(
        1.0, "largest global norm of the gradient; None does not clip", above=0
    )
    clip_value: float | None = setting(
        None,
        "largest absolute value of a gradient element, applied before clip_norm; None does not clip",
        above=0,
    )
    no_decay: tuple[str, ...] = setting(
        (),
        "patterns of parameters without weight decay, beside biases and vectors, which never decay",
    )
    lr_scale: tuple[str, ...] = setting(
        (),
        "PATTERN=FACTOR on the learning rate of parameters, such as 'embedding/*=0.5'; 0 keeps them as they are",
    )
    decay_scale: tuple[str, ...] = setting(
        (), "PATTERN=FACTOR on the weight decay of parameters that decay"
    )
    clip_groups: tuple[str, ...] = setting(
        (),
        "PATTERN=NORM, the largest norm of these parameters' gradient together, before clip_norm",
    )
    freeze: tuple[str, ...] = setting(
        (), "patterns of parameters that are not trained: no gradient, no optimizer state"
    )
    layer_decay: float = setting(
        1.0,
        "factor on the learning rate from each layer to the one before; final norm and unembedding learn at the full rate",
        above=0,
        high=1,
    )

    def problems(self) -> Problems:
        """Each entry is a pattern and a factor of at least zero."""
        for field in ("lr_scale", "decay_scale", "clip_groups"):
            for entry in getattr(self, field):
                pattern, _, factor = entry.rpartition("=")
                if not pattern or not _is_factor(factor):
                    fix = f"jaxlm config explain optim.{field}"
                    yield field, f"{entry!r} is not PATTERN=FACTOR with a factor >= 0", fix


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Groups):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"
    lr: float = setting(3e-4, LR, above=0)
    b1: float = setting(0.9, FIRST, low=0, below=1)
    b2: float = setting(0.95, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.1, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(Groups):
    """Stochastic gradient descent: the gradient itself."""

    name: Literal["sgd"] = "sgd"
    lr: float = setting(0.1, LR, above=0)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(Groups):
    """Gradients added up, earlier ones fading: a heavy ball."""

    name: Literal["momentum"] = "momentum"
    lr: float = setting(0.01, LR, above=0)
    momentum: float = setting(0.9, "what is kept of the sum of gradients", low=0, below=1)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nesterov(Groups):
    """Momentum, one step ahead of itself."""

    name: Literal["nesterov"] = "nesterov"
    lr: float = setting(0.01, LR, above=0)
    momentum: float = setting(0.9, "what is kept of the sum of gradients", low=0, below=1)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(Groups):
    """The gradient over the root of the sum of all squared gradients so far."""

    name: Literal["adagrad"] = "adagrad"
    lr: float = setting(0.01, LR, above=0)
    initial: float = setting(0.0, "the sum of squares before the first gradient", low=0)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsProp(Groups):
    """The gradient over the root of its running mean square."""

    name: Literal["rmsprop"] = "rmsprop"
    lr: float = setting(1e-3, LR, above=0)
    decay: float = setting(0.9, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Groups):
    """Running means of the gradient and of its square; AdamW at the published defaults, without decay."""

    name: Literal["adam"] = "adam"
    lr: float = setting(1e-3, LR, above=0)
    b1: float = setting(0.9, FIRST, low=0, below=1)
    b2: float = setting(0.999, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nadam(Groups):
    """AdamW whose momentum is Nesterov's."""

    name: Literal["nadam"] = "nadam"
    lr: float = setting(3e-4, LR, above=0)
    b1: float = setting(0.9, FIRST, low=0, below=1)
    b2: float = setting(0.95, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.1, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmsGrad(Groups):
    """AdamW that divides by the largest second moment so far, so that steps only shrink."""

    name: Literal["amsgrad"] = "amsgrad"
    lr: float = setting(3e-4, LR, above=0)
    b1: float = setting(0.9, FIRST, low=0, below=1)
    b2: float = setting(0.95, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.1, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW8bit(Groups):
    """AdamW that keeps the moments of the blocks' matrices in eight bits."""

    name: Literal["adamw8bit"] = "adamw8bit"
    lr: float = setting(3e-4, LR, above=0)
    b1: float = setting(0.9, FIRST, low=0, below=1)
    b2: float = setting(0.95, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    block: int = setting(256, "most numbers that share a scale", low=2)
    weight_decay: float = setting(0.1, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFree(Groups):
    """AdamW whose parameters are the average of its iterates; goes with a constant schedule."""

    name: Literal["schedule_free"] = "schedule_free"
    lr: float = setting(1e-3, LR, above=0)
    b1: float = setting(
        0.9,
        "how near to the average the gradient is taken; 0 is at the last iterate",
        low=0,
        high=1,
    )
    b2: float = setting(0.99, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.1, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Groups):
    """The sign of an interpolated momentum."""

    name: Literal["lion"] = "lion"
    lr: float = setting(1e-4, "peak learning rate; a third to a tenth of AdamW's", above=0)
    b1: float = setting(0.9, "weight of the momentum in the update's sign", low=0, below=1)
    b2: float = setting(0.99, "decay of the momentum", low=0, below=1)
    weight_decay: float = setting(1.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Groups):
    """Second moments as rows and columns; steps relative to the size of the parameter."""

    name: Literal["adafactor"] = "adafactor"
    lr: float = setting(
        0.01, "peak step, relative to the root mean square of the parameter", above=0
    )
    exponent: float = setting(
        0.8, "the second moment's decay at update t is 1 - t^-exponent", above=0, high=1
    )
    eps: float = setting(1e-30, "added to the squared gradient", above=0)
    smallest_scale: float = setting(1e-3, "floor of the parameter's root mean square", above=0)
    clip_update: float | None = setting(
        1.0, "largest root mean square of a leaf's update; None does not clip", above=0
    )
    factor_from: int = setting(
        128, "matrices whose two largest dimensions reach this are factored", low=2
    )
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Groups):
    """Orthogonal momentum for the matrices of the blocks, Adam for the rest."""

    name: Literal["muon"] = "muon"
    lr: float = setting(0.02, "peak learning rate of the matrices", above=0)
    momentum: float = setting(0.95, "decay of the matrices' momentum", low=0, below=1)
    newton_schulz_steps: int = setting(
        5, "steps towards the orthogonal matrix", unit="steps", low=1
    )
    newton_schulz_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "dtype of the products in them"
    )
    adam_lr: float = setting(3e-3, "peak learning rate of embeddings, norms and biases", above=0)
    b1: float = setting(0.9, "decay of their gradient's running mean", low=0, below=1)
    b2: float = setting(0.95, "decay of their squared gradient's running mean", low=0, below=1)
    eps: float = setting(1e-8, "added to the root of their second moment", above=0)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soap(Groups):
    """Adam in the eigenbasis of Shampoo's matrices, for the matrices of the blocks; Adam for the rest."""

    name: Literal["soap"] = "soap"
    lr: float = setting(3e-3, LR, above=0)
    b1: float = setting(0.95, FIRST, low=0, below=1)
    b2: float = setting(
        0.95, "decay of the running means of squares, and of Shampoo's matrices", low=0, below=1
    )
    eps: float = setting(1e-8, EPS, above=0)
    every: int = setting(10, "updates from one turn of the bases to the next", low=1)
    longest: int = setting(10_000, "longest side of a matrix that is given a basis", low=1)
    weight_decay: float = setting(0.01, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sophia(Groups):
    """Momentum over an estimate of the curvature's diagonal, clipped element by element."""

    name: Literal["sophia"] = "sophia"
    lr: float = setting(3e-4, "peak learning rate, and the largest step of an element", above=0)
    b1: float = setting(0.965, FIRST, low=0, below=1)
    b2: float = setting(0.99, "decay of the diagonal's running mean", low=0, below=1)
    gamma: float = setting(
        0.05, "of the diagonal that the momentum is divided by; less clips more", above=0
    )
    eps: float = setting(1e-12, "least that it is divided by", above=0)
    every: int = setting(10, "updates from one estimate of the diagonal to the next", low=1)
    weight_decay: float = setting(0.2, DECAY, low=0)


# Those that give a direction, which is then scaled by the learning rate.
Directed = (
    AdamW
    | Sgd
    | Momentum
    | Nesterov
    | Adagrad
    | RmsProp
    | Adam
    | Nadam
    | AmsGrad
    | AdamW8bit
    | Lion
    | Adafactor
    | Muon
    | Soap
    | Sophia
)
Optimizer = Directed | ScheduleFree


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False
