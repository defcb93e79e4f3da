"""Loading a config: what the file says, then the overrides, then one typed value."""

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
    """A resolved config, and who set each of its values by dotted path."""

    value: Any
    provenance: dict[str, Origin]


def load(schema: type, file: str | None, overrides: Sequence[tuple[str, str]] = ()) -> Loaded:
    """Reads a config and applies overrides.

    Args:
      schema: the section to build.
      file: `configs/x.py` or `configs/x.py:argument`, which is run; a resolved `config.json` or a directory that holds
        one, which is only read; None for the defaults.
      overrides: dotted path and text, as on the command line. Names of arms apply first, whatever the order.

    Raises:
      InputMissing: where there is no such file.
      ConfigError: with everything else that is wrong, in one error.
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
    """Resolves what a file says under overrides; both stay as they are."""
    resolver = Resolver(schema, copy.deepcopy(raw), dict(origins))
    _derive_anew(resolver, {path for path, _ in overrides})
    for path, text in _arms_first(schema, overrides):
        _override(resolver, path, text)
    resolver.resolve()
    return resolver


def _derive_anew(resolver: Resolver, overridden: set[str]) -> None:
    """Drop each derived value of a file if an override changes the setting it was derived from.

    A resolved config holds the value and not that it was derived, so a value equal to the derived
    one counts as such. A value that differs was chosen, and stays.
    """
    known = settings(resolver.schema, resolver.raw)
    for path, each in known.items():
        section, _, name = path.rpartition(".")
        if not each.derived_from or path in overridden:
            continue
        inside = problem.at(resolver.raw, section, {})
        if not isinstance(inside, dict) or name not in inside:
            continue
        if join(section, each.derived_from) not in overridden:
            continue
        (arm,) = known[section].arms
        given, derived = (
            Resolver(arm, values, {})
            for values in (inside, {key: value for key, value in inside.items() if key != name})
        )
        given.resolve()
        derived.resolve()
        if given.value is not None and given.value == derived.value:
            del inside[name]
            resolver.origins.pop(path, None)


def _mend(
    resolver: Resolver,
    raw: dict[str, Any],
    origins: dict[str, Origin],
    overrides: Sequence[tuple[str, str]],
) -> str:
    """Flags that, in place of the wrong ones, make the config right: one fix after another, tried. Nothing where none do."""
    flags: dict[str, str] = {}
    kept = list(overrides)
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
        kept = [
            pair
            for pair in kept
            if pair[0] not in added
            # A setting that contradicts another stays where the other one is mended.
            and (pair[0] in known or first.origin.where != f"--config.{pair[0]}={pair[1]}")
        ]
        resolver = _apply(resolver.schema, raw, origins, [*kept, *flags.items()])
    return shlex.join(f"--config.{path}={text}" for path, text in flags.items())


def from_json(
    schema: type,
    data: Any,
    where: str = "config.json",
    overrides: Sequence[tuple[str, str]] = (),
) -> Any:
    """A section from what `to_json` gave, with overrides as on the command line. Nothing is converted but lists to tuples and text to spans.

    A setting that is absent, being newer than the file, takes its default.

    Raises:
      ConfigError: where a setting is unknown, of another type or out of range.
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
    """Overrides in the order that they apply: whole sections and names of arms, outer before inner, then the rest as they came."""
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
    """Sets one value, or adds to the problems."""
    schema, raw, origins, found = resolver.schema, resolver.raw, resolver.origins, resolver.problems
    origin = Origin("command line", f"--config.{path}={text}")
    present = settings(schema, raw)
    known = present.get(path)
    section, _, name = path.rpartition(".")
    parent = present.get(section)
    is_label = parent is not None and bool(parent.arms) and name == tag(parent.arms[0])
    if known is None and not is_label:
        found.append(problem.unknown(schema, raw, path, text, origin, origins))
        return
    if known is not None and text in known.named:
        _replace(raw, origins, path, known.named[text])
        origins[path] = origin
        return
    if known is not None and known.arms:
        found.append(_unknown_section(known, path, text, origin))
        return
    inside = _section(raw, section)
    if parent is not None and is_label:
        if text not in by_name(parent.arms):
            found.append(unknown_arm(parent.arms, section, text, origin))
            return
        if chosen(parent.arms, inside, parent.default) is not by_name(parent.arms)[text]:
            # Another arm's settings mean nothing to this one.
            _replace(raw, origins, section, by_name(parent.arms)[text]())
        inside[name] = text
    elif known is not None:
        try:
            value = read(known.kind, text)
        except ValueError as error:
            found.append(
                problem.wrong_value(
                    path, known, text, origin, str(error) if "span" in str(error) else ""
                )
            )
            return
        inside[name] = value
    origins[path] = origin


def _replace(raw: dict[str, Any], origins: dict[str, Origin], path: str, section: Any) -> None:
    """Sets a whole section; what was said of its settings is forgotten."""
    inside = _section(raw, path)
    inside.clear()
    inside.update(plain(section))
    for stale in [there for there in origins if there.startswith(f"{path}.")]:
        del origins[stale]


def _unknown_section(known: Setting, path: str, text: str, origin: Origin) -> Problem:
    label, names = tag(known.arms[0]), by_name(known.arms)
    if (meant := nearest(text, [*known.named, *names])) in known.named:
        fix = problem.flag(path, meant)
    elif label and meant:
        fix = problem.flag(join(path, label), meant)
    else:
        fix = problem.explain(path)
    why = "it is a section with settings of its own"
    if known.named:
        why += f", or one of those that `jaxlm config explain {path}` names"
    return Problem(f"{path} = {brief(text)} is not allowed", why, origin, fix)


def _section(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """The dict at a path, made where there is none."""
    for name in path.split(".") if path else ():
        if not isinstance(raw.get(name), dict):
            raw[name] = {}
        raw = raw[name]
    return raw
