"""What a section is made of, read from its dataclass: settings, their types and ranges, and the arms of a union."""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxlm.core.span import Span


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    named: Mapping[str, Any] | None = None,
    derived_from: str = "",
) -> Any:
    """A field of a section: its default, what it means, its unit, and the range it must lie in.

    `low` and `high` are inclusive, `above` and `below` exclusive. `named` are sections that the field may be set to by a
    word, as in `--config.model=llama3-8b`. `derived_from` names the setting of the same section from which the default is
    derived: the section's `derived()` yields (field, value, reason), and an override of that setting derives it anew.
    """
    meta = {"doc": doc, "unit": unit, "low": low, "high": high, "above": above, "below": below}
    more = {"named": named or {}, "derived_from": derived_from}
    return dataclasses.field(default=default, metadata=meta | more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a section, with its annotation resolved."""

    name: str
    kind: Any
    default: Any
    doc: str = ""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derived_from: str = ""

    @property
    def arms(self) -> tuple[type, ...]:
        """The sections that it may hold; empty where it holds a plain value."""
        return arms(self.kind)


def is_union(kind: Any) -> bool:
    """Whether an annotation is `A | B`."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def is_section(kind: Any) -> bool:
    """Whether an annotation is the class of a section."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not Span


@functools.cache
def arms(kind: Any) -> tuple[type, ...]:
    """The sections of an annotation: one, those of a union, or none for a plain value."""
    members = typing.get_args(kind) if is_union(kind) else (kind,)
    return members if all(is_section(member) for member in members) else ()


@functools.cache
def fields(section: Any) -> dict[str, Setting]:
    """The settings of a section, in order.

    Raises:
      TypeError: where a plain setting has no default.
    """
    kinds = typing.get_type_hints(section)
    found = {}
    for field in dataclasses.fields(section):
        kind = kinds[field.name]
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif arms(kind):
            default = arms(kind)[0]()
        else:
            raise TypeError(f"{section.__name__}.{field.name} has no default")
        found[field.name] = Setting(name=field.name, kind=kind, default=default, **field.metadata)
    return found


@functools.cache
def tag(section: type) -> str | None:
    """The setting that names the arm: the first whose only value is its default. None where there is none."""
    for name, known in fields(section).items():
        if typing.get_origin(known.kind) is Literal and typing.get_args(known.kind) == (
            known.default,
        ):
            return name
    return None


def arm_name(section: type) -> str:
    """The name of an arm in files and on the command line."""
    name = tag(section)
    return fields(section)[name].default if name else section.__name__


def by_name(sections: tuple[type, ...]) -> dict[str, type]:
    """The arms by name."""
    return {arm_name(section): section for section in sections}


def join(path: str, name: str) -> str:
    """`a.b` and `c` make `a.b.c`."""
    return f"{path}.{name}" if path else name


def plain(value: Any) -> Any:
    """A section as nested dicts, a span as its text or number; all else as it is."""
    if isinstance(value, Span):
        return value.plain()
    if dataclasses.is_dataclass(value):
        section: Any = type(value)
        return {name: plain(getattr(value, name)) for name in fields(section)}
    return tuple(plain(item) for item in value) if isinstance(value, tuple) else value


def flat(raw: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Nested dicts as one, by dotted path."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        here = join(path, str(name))
        found |= flat(value, here) if isinstance(value, dict) else {here: value}
    return found


def leaves(section: Any, path: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """Every plain setting of a section and of those inside it: dotted path, setting, value."""
    kind: Any = type(section)
    for name, known in fields(kind).items():
        value = getattr(section, name)
        if known.arms:
            yield from leaves(value, join(path, name))
        else:
            yield join(path, name), known, value


def chosen(sections: tuple[type, ...], raw: Any, default: Any) -> type | None:
    """The arm that nested dicts name, the default's where they name none; None where there is no such arm."""
    names = by_name(sections)
    label = tag(sections[0])
    if label is None or not isinstance(raw, dict) or label not in raw:
        return type(default)
    wanted = raw[label]
    return names.get(wanted) if isinstance(wanted, str) else None


def settings(schema: type, raw: dict[str, Any], *, every_arm: bool = False) -> dict[str, Setting]:
    """Dotted path -> setting, sections included, for the arms that `raw` names, or for every arm there is."""
    found: dict[str, Setting] = {}

    def visit(section: type, inner: Any, path: str) -> None:
        for name, known in fields(section).items():
            here = join(path, name)
            found.setdefault(here, known)
            below = inner.get(name, {}) if isinstance(inner, dict) else {}
            picked = chosen(known.arms, below, known.default) if known.arms else None
            for arm in known.arms if every_arm else (picked,) if picked else ():
                visit(arm, below, here)

    visit(schema, raw, "")
    return found
