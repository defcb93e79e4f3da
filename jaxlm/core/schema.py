"""Schema of a section, from its dataclass: settings, types, ranges and the arms of unions."""

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
    """Return a dataclass field that is a setting of a section.

    Args:
      default: default value.
      doc: meaning, as a noun phrase.
      unit: unit of the value.
      low: smallest allowed value.
      high: largest allowed value.
      above: exclusive lower bound.
      below: exclusive upper bound.
      named: published sections by name, as in `--config.model=llama3-8b`.
      derived_from: setting of the same section from which the default is derived. The section's
        `derived()` yields (field, value, reason); an override of that setting recomputes the value.
    """
    meta = {"doc": doc, "unit": unit, "low": low, "high": high, "above": above, "below": below}
    more = {"named": named or {}, "derived_from": derived_from}
    return dataclasses.field(default=default, metadata=meta | more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a section with its resolved annotation."""

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
        """Sections that the field may hold; empty for a plain value."""
        return arms(self.kind)


def is_union(kind: Any) -> bool:
    """Return True if an annotation is `A | B`."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def is_section(kind: Any) -> bool:
    """Return True if an annotation is the class of a section."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not Span


@functools.cache
def arms(kind: Any) -> tuple[type, ...]:
    """Return the sections of an annotation: one, the arms of a union, or none for a plain value."""
    members = typing.get_args(kind) if is_union(kind) else (kind,)
    return members if all(is_section(member) for member in members) else ()


@functools.cache
def fields(section: Any) -> dict[str, Setting]:
    """Return the settings of a section, in order.

    Raises:
      TypeError: if a plain setting has no default.
    """
    kinds = typing.get_type_hints(section)
    result = {}
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
        result[field.name] = Setting(name=field.name, kind=kind, default=default, **field.metadata)
    return result


@functools.cache
def tag(section: type) -> str | None:
    """Return the setting that names the arm: the first whose only allowed value is its default."""
    for name, known in fields(section).items():
        if typing.get_origin(known.kind) is Literal and typing.get_args(known.kind) == (
            known.default,
        ):
            return name
    return None


def arm_name(section: type) -> str:
    """Return the name of an arm in files and on the command line."""
    name = tag(section)
    return fields(section)[name].default if name else section.__name__


def by_name(sections: tuple[type, ...]) -> dict[str, type]:
    """Return the arms by name."""
    return {arm_name(section): section for section in sections}


def join(path: str, name: str) -> str:
    """Join `a.b` and `c` to `a.b.c`."""
    return f"{path}.{name}" if path else name


def plain(value: Any) -> Any:
    """Return a section as nested dicts, a span as its text or number, other values unchanged."""
    if isinstance(value, Span):
        return value.plain()
    if dataclasses.is_dataclass(value):
        section: Any = type(value)
        return {name: plain(getattr(value, name)) for name in fields(section)}
    return tuple(plain(item) for item in value) if isinstance(value, tuple) else value


def flat(raw: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested dicts to dotted paths."""
    result: dict[str, Any] = {}
    for name, value in raw.items():
        inner = join(path, str(name))
        result |= flat(value, inner) if isinstance(value, dict) else {inner: value}
    return result


def leaves(section: Any, path: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """Yield (dotted path, setting, value) of every plain setting, nested sections included."""
    kind: Any = type(section)
    for name, known in fields(kind).items():
        value = getattr(section, name)
        if known.arms:
            yield from leaves(value, join(path, name))
        else:
            yield join(path, name), known, value


def chosen(sections: tuple[type, ...], raw: Any, default: Any) -> type | None:
    """Return the arm that nested dicts name, else the default's; None if the name is unknown."""
    names = by_name(sections)
    label = tag(sections[0])
    if label is None or not isinstance(raw, dict) or label not in raw:
        return type(default)
    name = raw[label]
    return names.get(name) if isinstance(name, str) else None


def settings(schema: type, raw: dict[str, Any], *, every_arm: bool = False) -> dict[str, Setting]:
    """Return settings and sections by dotted path, for the arms that `raw` names or for all."""
    result: dict[str, Setting] = {}

    def visit(section: type, inner: Any, path: str) -> None:
        for name, known in fields(section).items():
            inner_path = join(path, name)
            result.setdefault(inner_path, known)
            below = inner.get(name, {}) if isinstance(inner, dict) else {}
            picked = chosen(known.arms, below, known.default) if known.arms else None
            for arm in known.arms if every_arm else (picked,) if picked else ():
                visit(arm, below, inner_path)

    visit(schema, raw, "")
    return result
