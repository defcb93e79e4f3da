"""Settings of optimizers and learning-rate schedules. The unions at the end are the registries."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting

DECAY_EXEMPT = ("*/scale", "*/bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """What every optimizer has: a peak rate, decoupled decay, clipping, and groups by path."""

    lr: float = setting(3e-4, "peak learning rate", above=0.0)
    weight_decay: float = setting(0.1, "share of a weight taken off at each step, times the learning rate", low=0.0)
    clip_norm: float | None = setting(1.0, "gradients are scaled down to this global norm; None does not", above=0.0)
    clip_value: float | None = setting(None, "gradient elements are cut to +- this before the norm is taken; None does not", above=0.0)
    decay_exempt: tuple[str, ...] = setting(DECAY_EXEMPT, "paths of parameters without weight decay (fnmatch patterns)")
    lr_scale: tuple[str, ...] = setting((), "learning-rate factors by path: PATTERN=FACTOR,PATTERN=FACTOR")

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Each factor is a number from zero up."""
        for text in self.lr_scale:
            pattern, equals, factor = text.rpartition("=")
            try:
                fits = bool(pattern and equals) and float(factor) >= 0
            except ValueError:
                fits = False
            if not fits:
                yield "lr_scale", f"{text!r} is not PATTERN=FACTOR with a factor from 0 up", "--config.optim.lr_scale='embedding/*=0.5'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Shared):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101). 8 bytes of state a parameter."""

    name: Literal["adamw"] = "adamw"
    b1: float = setting(0.9, "decay of the mean of gradients", low=0.0, below=1.0)
    b2: float = setting(0.95, "decay of the mean of squared gradients", low=0.0, below=1.0)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Shared):
    """The sign of an interpolated momentum (Chen et al., arXiv:2302.06675). 4 bytes of state a parameter."""

    name: Literal["lion"] = "lion"
    lr: float = setting(1e-4, "peak learning rate; the paper advises a third to a tenth of AdamW's", above=0.0)
    weight_decay: float = setting(1.0, "share of a weight taken off at each step, times the learning rate; three to ten times AdamW's", low=0.0)
    b1: float = setting(0.9, "weight of the momentum in the update", low=0.0, below=1.0)
    b2: float = setting(0.99, "decay of the momentum", low=0.0, below=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Shared):
    """Second moments kept as row and column means (Shazeer & Stern, arXiv:1804.04235). Few bytes of state a parameter."""

    name: Literal["adafactor"] = "adafactor"
    lr: float = setting(1e-2, "peak learning rate, times the parameter's root mean square", above=0.0)
    weight_decay: float = setting(0.0, "share of a weight taken off at each step, times the learning rate", low=0.0)
    decay_rate: float = setting(0.8, "the second moment's decay at step t is 1 - t**-decay_rate", above=0.0, below=1.0)
    factor_from: int = setting(128, "matrices are factored where both sides are at least this", low=1)


Optimizer = AdamW | Lion | Adafactor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warmed:
    """What every schedule has: a linear warm-up. Update t (from 0) of w warm-up steps has the rate lr x (t + 1) / w."""

    warmup: Span = setting(Span.parse("2%"), "steps in which the rate rises to its peak")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(Warmed):
    """Half a cosine from the peak down to the floor (Loshchilov & Hutter, arXiv:1608.03983, without restarts)."""

    name: Literal["cosine"] = "cosine"
    floor: float = setting(0.1, "rate at the end, as a share of the peak", low=0.0, high=1.0)
    decay: Span = setting(Span.parse("100%"), "step at which the floor is reached, counted from the start of the run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Warmed):
    """A straight line from the peak down to the floor."""

    name: Literal["linear"] = "linear"
    floor: float = setting(0.0, "rate at the end, as a share of the peak", low=0.0, high=1.0)
    decay: Span = setting(Span.parse("100%"), "step at which the floor is reached, counted from the start of the run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Warmed):
    """The peak, for ever."""

    name: Literal["constant"] = "constant"


Schedule = Cosine | Linear | Constant


def is_absolute(schedule: Schedule) -> bool:
    """Whether the rate at a step does not depend on how long the run is, so that a run can be made longer."""
    spans = [schedule.warmup] + ([] if isinstance(schedule, Constant) else [schedule.decay])
    return all(span.unit != "share" for span in spans)
