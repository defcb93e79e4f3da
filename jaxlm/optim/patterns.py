"""Parameters by patterns over their paths. Free of JAX."""

import fnmatch
from collections.abc import Iterable

from jaxlm.core.errors import ConfigError
from jaxlm.optim.config import Groups


def matches(field: str, pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern of a setting matches.

    Raises:
      ConfigError: where there is none.
    """
    paths = list(paths)
    found = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not found:
        raise ConfigError(
            f"the pattern {pattern!r} matches no parameter",
            where=f"optim.{field}",
            why="parameters are " + ", ".join(paths[:6]) + (" ..." if len(paths) > 6 else ""),
            fix=f'--config.optim.{field}="()"',
        )
    return found


def factors(config: Groups, field: str, paths: Iterable[str]) -> dict[str, float]:
    """The number that a setting of PATTERN=NUMBER gives to each path that it matches.

    Raises:
      ConfigError: where two of its patterns match the same, or one matches nothing.
    """
    paths = list(paths)
    found: dict[str, tuple[str, float]] = {}
    entries = getattr(config, field)
    for entry in entries:
        pattern, _, factor = entry.rpartition("=")
        for path in matches(field, pattern, paths):
            if path in found:
                raise ConfigError(
                    f"two groups of {field} hold {path}",
                    where=f"optim.{field}",
                    why=f"{found[path][0]!r} and {pattern!r} both match it",
                    fix=f'--config.optim.{field}="{tuple(e for e in entries if e != entry)}"',
                )
            found[path] = (pattern, float(factor))
    return {path: factor for path, (_, factor) in found.items()}


def frozen(config: Groups, paths: Iterable[str]) -> frozenset[str]:
    """Those that are not trained.

    Raises:
      ConfigError: where a pattern matches nothing, or nothing is left.
    """
    paths = list(paths)
    found = frozenset(
        path for pattern in config.freeze for path in matches("freeze", pattern, paths)
    )
    if found and len(found) == len(paths):
        raise ConfigError(
            "every parameter is frozen",
            where="optim.freeze",
            why=f"{', '.join(map(repr, config.freeze))} match all {len(paths)}",
            fix="jaxlm config explain optim.freeze",
        )
    return found
