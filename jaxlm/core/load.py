"""Loading of configs: read the file, apply the overrides, resolve to a typed value."""

import copy
import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from jaxlm.core import problems as problem
from jaxlm.core.config_file import read_file
from jaxlm.core.problems import Problem
from jaxlm.core.provenance import Origin
from jaxlm.core.resolve import Resolver, unknown_arm
from jaxlm.core.schema import Setting, by_name, chosen, join, leaves, plain, settings, tag
from jaxlm.core.spelling import nearest
from jaxlm.core.values import brief, read


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A resolved config, and the origin of each value by dotted path."""

    value: Any
    provenance: dict[str, Origin]


def load(schema: type, file: str | None, overrides: Sequence[tuple[str, str]] = ()) -> Loaded:
    """Read a config and apply overrides.

    Args:
      schema: class of the section to build.
      file: `configs/x.py` or `configs/x.py:argument`, which is run; a resolved `config.json` or a
        directory with one, which is only parsed; None for the defaults.
      overrides: dotted paths and texts, as on the command line, in any order.

    Raises:
      InputMissing: if there is no such file.
      ConfigError: with all other problems, in one error.
    """
    raw, origins = read_file(file) if file is not None else ({}, {})
    resolver = _apply(schema, raw, origins, overrides)
    if resolver.problems:
        raise problem.error(resolver.problems, _mend(resolver, raw, origins, overrides))
    return _loaded(resolver)


def _loaded(resolver: Resolver) -> Loaded:
    paths = [path for path, _, _ in leaves(resolver.value)]
    return Loaded(resolver.value, {path: resolver.origin(path) for path in paths})


def _apply(
    schema: type,
    raw: dict[str, Any],
    origins: dict[str, Origin],
    overrides: Sequence[tuple[str, str]],
) -> Resolver:
    """Resolve the settings of a file under overrides; the arguments are not modified."""
    resolver = Resolver(schema, copy.deepcopy(raw), dict(origins))
    _drop_derived(resolver, {path for path, _ in overrides})
    for path, text in _arms_first(schema, overrides):
        _override(resolver, path, text)
    resolver.resolve()
    return resolver


def _drop_derived(resolver: Resolver, overridden: set[str]) -> None:
    """Drop each derived value of a file if an override changes the setting it was derived from.

    A resolved config does not record which values were derived, so a value equal to the derived one
    counts as derived. A different value was chosen by the user and stays.
    """
    known = settings(resolver.schema, resolver.raw)
    for path, each in known.items():
        section, _, name = path.rpartition(".")
        if not each.derived_from or path in overridden:
            continue
        inside = problem.value_at(resolver.raw, section, {})
        if not isinstance(inside, dict) or name not in inside:
            continue
        if join(section, each.derived_from) not in overridden:
            continue
        (arm,) = known[section].arms
        stored, derived = (
            Resolver(arm, values, {})
            for values in (inside, {key: value for key, value in inside.items() if key != name})
        )
        stored.resolve()
        derived.resolve()
        if stored.value is not None and stored.value == derived.value:
            del inside[name]
            resolver.origins.pop(path, None)


def _mend(
    resolver: Resolver,
    raw: dict[str, Any],
    origins: dict[str, Origin],
    overrides: Sequence[tuple[str, str]],
) -> str:
    """Return flags that correct the config, by trying one fix after another; "" if they do not."""
    flags: dict[str, str] = {}
    remaining = list(overrides)
    while resolver.problems:
        first = resolver.problems[0]
        words = (
            shlex.split(first.fix.partition("\n")[0])
            if first.fix.startswith(("--config.", "'--config."))
            else []
        )
        added = dict(word.removeprefix("--config.").partition("=")[::2] for word in words)
        if (
            not added
            or any(flags.get(path, text) != text for path, text in added.items())
            or added.items() <= flags.items()
            or not all(word.startswith("--config.") for word in words)
        ):
            return ""
        flags |= added
        known = settings(resolver.schema, resolver.raw)
        remaining = [
            pair
            for pair in remaining
            if pair[0] not in added
            # A setting that contradicts another stays if the other one is corrected.
            and (pair[0] in known or first.origin.where != f"--config.{pair[0]}={pair[1]}")
        ]
        resolver = _apply(resolver.schema, raw, origins, [*remaining, *flags.items()])
    return shlex.join(f"--config.{path}={text}" for path, text in flags.items())


def from_json(
    schema: type,
    data: Any,
    where: str = "config.json",
    overrides: Sequence[tuple[str, str]] = (),
) -> Any:
    """Return the section of a `to_json` result, with overrides as on the command line.

    Only lists (to tuples) and text (to spans) are converted. An absent setting, newer than the
    file, takes its default.

    Raises:
      ConfigError: if a setting is unknown, has another type or is out of range.
    """
    return loaded_json(schema, data, where, overrides).value


def loaded_json(
    schema: type, data: Any, where: str, overrides: Sequence[tuple[str, str]] = ()
) -> Loaded:
    """Return the section as `from_json` does, with the origin of each of its values."""
    resolver = _apply(schema, data, {"": Origin("file", where)}, overrides)
    if resolver.problems:
        raise problem.error(resolver.problems)
    return _loaded(resolver)


def _arms_first(schema: type, overrides: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Sort overrides: sections and names of arms first, outer before inner, then the others."""
    every = settings(schema, {}, every_arm=True)
    labels = {
        join(path, name)
        for path, known in every.items()
        for arm in known.arms
        if (name := tag(arm))
    } | {path for path, known in every.items() if known.named}
    return sorted(
        overrides,
        key=lambda pair: (pair[0] not in labels, pair[0].count(".") if pair[0] in labels else 0),
    )


def _override(resolver: Resolver, path: str, text: str) -> None:
    """Set one value, or add a problem."""
    schema, raw, origins = resolver.schema, resolver.raw, resolver.origins
    origin = Origin("command line", f"--config.{path}={text}")
    present = settings(schema, raw)
    known = present.get(path)
    section, _, name = path.rpartition(".")
    parent = present.get(section)
    is_label = parent is not None and bool(parent.arms) and name == tag(parent.arms[0])
    if known is None and not is_label:
        resolver.problems.append(problem.unknown(schema, raw, path, text, origin, origins))
        return
    if known is not None and text in known.named:
        _replace(raw, origins, path, known.named[text])
        origins[path] = origin
        return
    if known is not None and known.arms:
        resolver.problems.append(_unknown_section(known, path, text, origin))
        return
    inside = _section(raw, section)
    if parent is not None and is_label:
        if text not in by_name(parent.arms):
            resolver.problems.append(unknown_arm(parent.arms, section, text, origin))
            return
        if chosen(parent.arms, inside, parent.default) is not by_name(parent.arms)[text]:
            # Settings of another arm do not apply to this one.
            _replace(raw, origins, section, by_name(parent.arms)[text]())
        inside[name] = text
    elif known is not None:
        try:
            value = read(known.kind, text)
        except ValueError as error:
            resolver.problems.append(
                problem.wrong_value(
                    path, known, text, origin, str(error) if "span" in str(error) else ""
                )
            )
            return
        inside[name] = value
    origins[path] = origin


def _replace(raw: dict[str, Any], origins: dict[str, Origin], path: str, section: Any) -> None:
    """Set a whole section and forget the origins of its settings."""
    inside = _section(raw, path)
    inside.clear()
    inside.update(plain(section))
    for stale in [name for name in origins if name.startswith(f"{path}.")]:
        del origins[stale]


def _unknown_section(known: Setting, path: str, text: str, origin: Origin) -> Problem:
    label, names = tag(known.arms[0]), by_name(known.arms)
    if (meant := nearest(text, [*known.named, *names])) in known.named:
        fix = problem.flag(path, meant)
    elif label and meant:
        fix = problem.flag(join(path, label), meant)
    else:
        fix = problem.explain(path)
    why = "it is a section that contains settings"
    if known.named:
        why += f", or a published name: see `jaxlm config explain {path}`"
    return Problem(f"{path} = {brief(text)} is not allowed", why, origin, fix)


def _section(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the dict at a path, created if absent."""
    for name in path.split(".") if path else ():
        if not isinstance(raw.get(name), dict):
            raw[name] = {}
        raw = raw[name]
    return raw
