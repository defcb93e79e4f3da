"""Which parameters decay and at which share of the learning rate: by path, each leaf in exactly one group."""

import dataclasses
import fnmatch
from collections.abc import Iterable

from jaxlm.core.errors import ConfigError
from jaxlm.optim.config import DECAY_EXEMPT, Shared


@dataclasses.dataclass(frozen=True, order=True)
class Group:
    """How the leaves of a group are updated."""

    lr_scale: float
    decays: bool


def assign(config: Shared, paths: Iterable[str]) -> dict[str, Group]:
    """The group of every leaf.

    Raises:
      ConfigError: where a pattern of the user's matches no leaf, or two learning-rate factors match one.
    """
    paths = list(paths)
    factors = [(text.rpartition("=")[0], float(text.rpartition("=")[2])) for text in config.lr_scale]
    for field, patterns in (("lr_scale", [p for p, _ in factors]), ("decay_exempt", config.decay_exempt)):
        for pattern in patterns:
            if not fnmatch.filter(paths, pattern) and not (field == "decay_exempt" and pattern in DECAY_EXEMPT):
                raise ConfigError(
                    f"the pattern {pattern!r} matches no parameter",
                    where=f"optim.{field}",
                    why="parameters: " + ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else ""),
                    fix=f"--config.optim.{field}='{paths[0]}{'=0.5' if field == 'lr_scale' else ''}'",
                )
    groups = {}
    for path in paths:
        scales = [(pattern, factor) for pattern, factor in factors if fnmatch.fnmatchcase(path, pattern)]
        if len(scales) > 1:
            raise ConfigError(
                f"{len(scales)} learning-rate factors match {path}",
                where="optim.lr_scale",
                why=", ".join(f"{pattern}={factor}" for pattern, factor in scales),
                fix=f"--config.optim.lr_scale='{scales[0][0]}={scales[0][1]}'",
            )
        exempt = any(fnmatch.fnmatchcase(path, pattern) for pattern in config.decay_exempt)
        groups[path] = Group(scales[0][1] if scales else 1.0, not exempt)
    return groups
