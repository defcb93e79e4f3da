"""Parameters selected by patterns over their paths. Free of JAX."""

import fnmatch
from collections.abc import Iterable

from jaxlm.core.errors import ConfigError
from jaxlm.optim.config import OptimizerBase


def matches(field: str, pattern: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that a pattern of a setting matches. Raises ConfigError if there is none."""
    paths = list(paths)
    matched = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not matched:
        raise ConfigError(
            f"the pattern {pattern!r} matches no parameter",
            where=f"optim.{field}",
            why="parameters are " + ", ".join(paths[:6]) + (" ..." if len(paths) > 6 else ""),
            fix=f'--config.optim.{field}="()"',
        )
    return matched


def factors(config: OptimizerBase, field: str, paths: Iterable[str]) -> dict[str, float]:
    """Return the numbers of a setting of PATTERN=NUMBER entries, by the paths that they match.

    Raises ConfigError if two of its patterns match the same path, or one matches no path.
    """
    paths = list(paths)
    assigned: dict[str, tuple[str, float]] = {}
    entries = getattr(config, field)
    for entry in entries:
        pattern, _, factor = entry.rpartition("=")
        for path in matches(field, pattern, paths):
            if path in assigned:
                raise ConfigError(
                    f"two groups of {field} contain {path}",
                    where=f"optim.{field}",
                    why=f"{assigned[path][0]!r} and {pattern!r} both match it",
                    fix=f'--config.optim.{field}="{tuple(e for e in entries if e != entry)}"',
                )
            assigned[path] = (pattern, float(factor))
    return {path: factor for path, (_, factor) in assigned.items()}


def frozen(config: OptimizerBase, paths: Iterable[str]) -> frozenset[str]:
    """Return the paths of the parameters that are not trained.

    Raises ConfigError if a pattern matches no path, or every path is frozen.
    """
    paths = list(paths)
    selected = (path for each in config.freeze for path in matches("freeze", each, paths))
    frozen_paths = frozenset(selected)
    if frozen_paths and len(frozen_paths) == len(paths):
        why = f"{', '.join(map(repr, config.freeze))} match all {len(paths)} parameters"
        fix = "jaxlm config explain optim.freeze"
        raise ConfigError("every parameter is frozen", where="optim.freeze", why=why, fix=fix)
    return frozen_paths
