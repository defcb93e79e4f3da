"""Settings of the optimizer."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

Problems = Iterator[tuple[str, str, str]]


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
        "PATTERN=FACTOR on the learning rate of parameters, such as 'embedding/*=0.5'; 0 freezes them",
    )

    def problems(self) -> Problems:
        """Each entry of lr_scale is a pattern and a factor of at least zero."""
        for entry in self.lr_scale:
            pattern, _, factor = entry.rpartition("=")
            if not pattern or not _is_factor(factor):
                fix = "--config.optim.lr_scale=\"('embedding/*=0.5',)\""
                yield "lr_scale", f"{entry!r} is not PATTERN=FACTOR with a factor >= 0", fix


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Groups):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"
    lr: float = setting(3e-4, "peak learning rate", above=0)
    b1: float = setting(0.9, "decay of the gradient's running mean", low=0, below=1)
    b2: float = setting(0.95, "decay of the squared gradient's running mean", low=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = setting(
        0.1, "share of a weight lost per update, times the learning rate", low=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Groups):
    """The sign of an interpolated momentum."""

    name: Literal["lion"] = "lion"
    lr: float = setting(1e-4, "peak learning rate; a third to a tenth of AdamW's", above=0)
    b1: float = setting(0.9, "weight of the momentum in the update's sign", low=0, below=1)
    b2: float = setting(0.99, "decay of the momentum", low=0, below=1)
    weight_decay: float = setting(
        1.0, "share of a weight lost per update, times the learning rate", low=0
    )


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
    weight_decay: float = setting(
        0.0, "share of a weight lost per update, times the learning rate", low=0
    )


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
    weight_decay: float = setting(
        0.0, "share of a weight lost per update, times the learning rate", low=0
    )


Optimizer = AdamW | Lion | Adafactor | Muon


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False
