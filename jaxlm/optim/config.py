"""Settings of the optimizers, one class each, with everything about them that needs no JAX.

Example:
    >>> [array.shape for array in AdamW(lr=1e-3).state((64, 256), ("embed", "mlp"))]
    [(64, 256), (64, 256)]
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.core.user_code import Interface
from jaxlm.optim import moments
from jaxlm.optim.moments import ONE_DEVICE, Shape, StateArray
from jaxlm.parallel.logical import LogicalAxes, Sizes

Problems = Iterator[tuple[str, str, str]]

# Settings that several optimizers have, each with a default of its own.
LR = "peak learning rate"
FIRST = "decay of the gradient's running mean"
SECOND = "decay of the squared gradient's running mean"
EPS = "added to the root of the second moment"
DECAY = "share of a weight lost per update, times the learning rate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerBase:
    """Settings of every optimizer: clipping, and groups of parameters by path.

    Patterns are shell patterns over leaf paths such as `stack/0/attention/query/weight`; `*`
    crosses slashes.

    Attributes:
      moment_count: arrays of the parameter's shape in the state, unless `state` differs.
      follows_width: a step has the size of the learning rate, so muP's rates by width apply.
      reads_whole_matrices: updates need a whole matrix, so shards are gathered.
      averages_parameters: the parameters are an average, and the gradient is taken elsewhere.
      further_rates: settings that are learning rates besides `lr`, and scale with it.

    The settings of an optimizer in a file of a user have `lr`, `weight_decay`, and
    `direction(axes)` too: the transformation from the clipped gradient to the direction u, as
    `optim.build` has them for the others.
    """

    moment_count: ClassVar[int] = 1
    follows_width: ClassVar[bool] = False
    reads_whole_matrices: ClassVar[bool] = False
    averages_parameters: ClassVar[bool] = False
    further_rates: ClassVar[tuple[str, ...]] = ()

    PARTS: ClassVar = Interface("optim", needs=("direction", "lr", "weight_decay"))

    clip_norm: float | None = setting(
        1.0, "largest global norm of the gradient; None does not clip", above=0
    )
    clip_value: float | None = setting(
        None,
        "largest absolute value of a gradient element, applied before clip_norm; None does not"
        " clip",
        above=0,
    )
    no_decay: tuple[str, ...] = setting(
        (), "patterns of parameters without weight decay; biases and vectors never decay"
    )
    lr_scale: tuple[str, ...] = setting(
        (),
        "PATTERN=FACTOR on the learning rate of parameters, such as 'embedding/*=0.5'; with 0 they"
        " stay the same",
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
        "factor on the learning rate from each layer to the one before; final norm and unembedding"
        " have the full rate",
        above=0,
        high=1,
    )

    def problems(self) -> Problems:
        """Check that each entry is a pattern and a factor of at least zero."""
        for field in ("lr_scale", "decay_scale", "clip_groups"):
            for entry in getattr(self, field):
                pattern, _, factor = entry.rpartition("=")
                if not pattern or not _is_factor(factor):
                    fix = f"jaxlm config explain optim.{field}"
                    yield field, f"{entry!r} is not PATTERN=FACTOR with a factor >= 0", fix

    @property
    def curvature_every(self) -> int | None:
        """Return the updates between two estimates of the curvature; None for no estimates."""
        return None

    def state(self, shape: Shape, axes: LogicalAxes, mesh: Sizes = ONE_DEVICE) -> list[StateArray]:
        """Return the arrays that the optimizer keeps for a parameter, without scalars.

        Their shapes are the same on every mesh; a mesh axis that `mesh` omits has size 1.
        """
        return moments.full(self.moment_count, shape, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamLike(OptimizerBase):
    """Settings of Adam and its kin."""

    name: str = ""
    lr: float = setting(3e-4, LR, above=0)
    b1: float = setting(0.9, FIRST, low=0, below=1)
    b2: float = setting(0.95, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.1, DECAY, low=0)

    moment_count: ClassVar[int] = 2
    follows_width: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(AdamLike):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(OptimizerBase):
    """Stochastic gradient descent: the gradient itself."""

    name: Literal["sgd"] = "sgd"
    lr: float = setting(0.1, LR, above=0)
    weight_decay: float = setting(0.0, DECAY, low=0)

    moment_count: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(OptimizerBase):
    """A decaying sum of gradients: heavy-ball momentum."""

    name: Literal["momentum"] = "momentum"
    lr: float = setting(0.01, LR, above=0)
    momentum: float = setting(0.9, "decay of the sum of gradients", low=0, below=1)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nesterov(OptimizerBase):
    """Momentum, evaluated one step ahead."""

    name: Literal["nesterov"] = "nesterov"
    lr: float = setting(0.01, LR, above=0)
    momentum: float = setting(0.9, "decay of the sum of gradients", low=0, below=1)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerBase):
    """The gradient over the root of the sum of all squared gradients so far."""

    name: Literal["adagrad"] = "adagrad"
    lr: float = setting(0.01, LR, above=0)
    initial: float = setting(0.0, "sum of squares before the first gradient", low=0)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsProp(OptimizerBase):
    """The gradient over the root of its running mean square."""

    name: Literal["rmsprop"] = "rmsprop"
    lr: float = setting(1e-3, LR, above=0)
    decay: float = setting(0.9, SECOND, low=0, below=1)
    eps: float = setting(1e-8, EPS, above=0)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(AdamLike):
    """Running means of the gradient and of its square, with the published defaults and no decay."""

    name: Literal["adam"] = "adam"
    lr: float = setting(1e-3, LR, above=0)
    b2: float = setting(0.999, SECOND, low=0, below=1)
    weight_decay: float = setting(0.0, DECAY, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nadam(AdamLike):
    """AdamW with Nesterov momentum."""

    name: Literal["nadam"] = "nadam"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmsGrad(AdamLike):
    """AdamW that divides by the largest second moment so far, so that steps only shrink."""

    name: Literal["amsgrad"] = "amsgrad"

    moment_count: ClassVar[int] = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW8bit(AdamLike):
    """AdamW with the moments of the blocks' matrices in eight bits."""

    name: Literal["adamw8bit"] = "adamw8bit"
    block: int = setting(256, "most numbers that share a scale", low=2)

    def state(self, shape: Shape, axes: LogicalAxes, mesh: Sizes = ONE_DEVICE) -> list[StateArray]:
        """Return two moments; those of a block's matrix are codes with scales."""
        return moments.block_moments(shape, axes, self.block, mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFree(AdamLike):
    """AdamW whose parameters are the average of its iterates; use it with a constant schedule."""

    name: Literal["schedule_free"] = "schedule_free"
    lr: float = setting(1e-3, LR, above=0)
    b1: float = setting(
        0.9, "where the gradient is taken: 1 at the average, 0 at the last iterate", low=0, high=1
    )
    b2: float = setting(0.99, SECOND, low=0, below=1)

    follows_width: ClassVar[bool] = False
    averages_parameters: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(OptimizerBase):
    """The sign of an interpolated momentum."""

    name: Literal["lion"] = "lion"
    lr: float = setting(1e-4, "peak learning rate; a third to a tenth of AdamW's", above=0)
    b1: float = setting(0.9, "weight of the momentum in the update's sign", low=0, below=1)
    b2: float = setting(0.99, "decay of the momentum", low=0, below=1)
    weight_decay: float = setting(1.0, DECAY, low=0)

    follows_width: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerBase):
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
        128, "least size of both dimensions of a matrix that is factored", low=2
    )
    weight_decay: float = setting(0.0, DECAY, low=0)

    def state(self, shape: Shape, axes: LogicalAxes, mesh: Sizes = ONE_DEVICE) -> list[StateArray]:
        """Return the second moment; that of a large matrix is a row and a column."""
        return moments.factored_moments(shape, axes, self.factor_from)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(OptimizerBase):
    """Orthogonalized momentum for the matrices of the blocks, Adam for the rest."""

    name: Literal["muon"] = "muon"
    lr: float = setting(0.02, "peak learning rate of the matrices", above=0)
    momentum: float = setting(0.95, "decay of the matrices' momentum", low=0, below=1)
    newton_schulz_steps: int = setting(
        5, "iterations towards the orthogonal matrix", unit="steps", low=1
    )
    newton_schulz_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "dtype of the products in them"
    )
    adam_lr: float = setting(3e-3, "peak learning rate of embeddings, norms and biases", above=0)
    b1: float = setting(0.9, "decay of their gradient's running mean", low=0, below=1)
    b2: float = setting(0.95, "decay of their squared gradient's running mean", low=0, below=1)
    eps: float = setting(1e-8, "added to the root of their second moment", above=0)
    weight_decay: float = setting(0.0, DECAY, low=0)

    reads_whole_matrices: ClassVar[bool] = True
    further_rates: ClassVar[tuple[str, ...]] = ("adam_lr",)

    def state(self, shape: Shape, axes: LogicalAxes, mesh: Sizes = ONE_DEVICE) -> list[StateArray]:
        """Return the momentum of a block's matrix, and two moments of other parameters."""
        return moments.full(1 if moments.inputs(axes) else 2, shape, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soap(AdamLike):
    """Adam in the eigenbasis of Shampoo's matrices for the blocks' matrices; Adam for the rest."""

    name: Literal["soap"] = "soap"
    lr: float = setting(3e-3, LR, above=0)
    b1: float = setting(0.95, FIRST, low=0, below=1)
    b2: float = setting(
        0.95, "decay of the running means of squares, and of Shampoo's matrices", low=0, below=1
    )
    every: int = setting(10, "updates between two eigendecompositions", low=1)
    max_dim: int = setting(
        10_000, "longest side of a matrix that has a basis", low=1, formerly="longest"
    )
    weight_decay: float = setting(0.01, DECAY, low=0)

    follows_width: ClassVar[bool] = False
    reads_whole_matrices: ClassVar[bool] = True

    def state(self, shape: Shape, axes: LogicalAxes, mesh: Sizes = ONE_DEVICE) -> list[StateArray]:
        """Return two moments, and for a block's matrix also Shampoo's matrices and bases."""
        return moments.basis_moments(shape, axes, self.max_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sophia(OptimizerBase):
    """Momentum over an estimate of the curvature's diagonal, clipped element by element."""

    name: Literal["sophia"] = "sophia"
    lr: float = setting(3e-4, "peak learning rate, and the largest step of an element", above=0)
    b1: float = setting(0.965, FIRST, low=0, below=1)
    b2: float = setting(0.99, "decay of the diagonal's running mean", low=0, below=1)
    gamma: float = setting(
        0.05, "factor on the diagonal that divides the momentum; less clips more", above=0
    )
    eps: float = setting(1e-12, "least divisor", above=0)
    every: int = setting(10, "updates between two estimates of the diagonal", low=1)
    weight_decay: float = setting(0.2, DECAY, low=0)

    moment_count: ClassVar[int] = 2

    @property
    def curvature_every(self) -> int | None:
        """Return the updates between two estimates of the curvature."""
        return self.every


# Optimizers with a direction, which the learning rate scales.
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
