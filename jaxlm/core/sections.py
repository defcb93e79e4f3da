"""Schema of sections, from their dataclasses: settings, arms of unions, types and values."""

import ast
import contextlib
import dataclasses
import decimal
import functools
import json
import math
import numbers
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxlm.core.span import Span

_NAMES = {
    bool: "true or false",
    int: "int",
    float: "float",
    str: "text",
    type(None): "None",
    Span: "span",
}


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
    formerly: str | tuple[str, Mapping[Any, Any]] = "",
    names_code: bool = False,
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
      formerly: name of the setting in the last release, which is still read; with it, if values
        changed too, a mapping of former to current values.
      names_code: an entry may be `FILE.py:FUNCTION`, see `user_code.function`.
    """
    meta = {"doc": doc, "unit": unit, "low": low, "high": high, "above": above, "below": below}
    old_name, values = (formerly, {}) if isinstance(formerly, str) else formerly
    more: dict[str, Any] = {"named": named or {}, "derived_from": derived_from}
    more |= {"former_name": old_name, "former_values": values, "names_code": names_code}
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
    former_name: str = ""
    former_values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    names_code: bool = False

    @functools.cached_property
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
        is_literal = typing.get_origin(known.kind) is Literal
        if is_literal and typing.get_args(known.kind) == (known.default,):
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
    label = tag(sections[0])
    if label is None or not isinstance(raw, dict) or label not in raw:
        return type(default)
    from jaxlm.core import user_code  # its module is built on this one

    recorded = raw.get("source")
    return user_code.find(sections, raw[label], recorded if isinstance(recorded, str) else "")


def settings(schema: type, raw: dict[str, Any], *, every_arm: bool = False) -> dict[str, Setting]:
    """Return settings and sections by dotted path, for the arms that `raw` names or for all."""
    if every_arm:
        return dict(_every_setting(schema))
    result: dict[str, Setting] = {}

    def visit(section: type, inner: Any, path: str) -> None:
        for name, known in fields(section).items():
            inner_path = join(path, name)
            result.setdefault(inner_path, known)
            below = inner.get(name, {}) if isinstance(inner, dict) else {}
            if known.arms and (picked := chosen(known.arms, below, known.default)):
                visit(picked, below, inner_path)

    visit(schema, raw, "")
    return result


@functools.cache
def _every_setting(schema: type) -> dict[str, Setting]:
    """Return the settings of all arms; a path of several arms has the setting of the first."""
    result: dict[str, Setting] = {}

    def visit(section: type, path: str) -> None:
        for name, known in fields(section).items():
            inner_path = join(path, name)
            result.setdefault(inner_path, known)
            for arm in known.arms:
                visit(arm, inner_path)

    visit(schema, "")
    return result


@functools.cache
def _former_settings(schema: type) -> dict[str, tuple[str, Mapping[Any, Any]]]:
    """Return the path and the changed values of each renamed setting, by its former path."""
    return {
        join(path.rpartition(".")[0], known.former_name): (path, known.former_values)
        for path, known in settings(schema, {}, every_arm=True).items()
        if known.former_name
    }


def current(schema: type, path: str, value: Any = None) -> tuple[str, Any]:
    """Return path and value of a setting that may have the names of the last release."""
    former = _former_settings(schema)
    head, tail = path, ""
    while head and head not in former:
        head, _, name = head.rpartition(".")
        tail = join(name, tail) if tail else name
    if not head:
        return path, value
    path, values = former[head]
    if tail:
        return join(path, tail), value
    if isinstance(value, (tuple, list)):
        return path, type(value)(values.get(item, item) for item in value)
    return path, values.get(value, value) if isinstance(value, str) else value


def current_names(schema: type, raw: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested dicts with the current names; a setting that has both is left as it is."""
    result = {}
    for name, value in raw.items():
        inner, value = current(schema, join(path, str(name)), value)
        new = inner.rpartition(".")[2]
        if isinstance(value, dict):
            value = current_names(schema, value, inner)
        result[name if new != name and new in raw else new] = value
    return result


def describe(kind: Any) -> str:
    """Return an annotation in words: `int or auto`, `one of scan, unroll`, `list of text`."""
    if is_union(kind):
        return " or ".join(describe(member) for member in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return str(choices[0]) if len(choices) == 1 else f"one of {', '.join(map(str, choices))}"
    if typing.get_origin(kind) is tuple:
        items = [describe(item) for item in typing.get_args(kind) if item is not Ellipsis]
        return (
            f"list of {items[0]}" if Ellipsis in typing.get_args(kind) else f"({', '.join(items)})"
        )
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def choices(kind: Any) -> list[str]:
    """Return the words of the Literals of an annotation, also inside unions and lists."""
    members = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return list(map(str, members))
    if is_union(kind) or typing.get_origin(kind) is tuple:
        return [word for member in members for word in choices(member)]
    return []


def bounds(known: Setting) -> str:
    """Return the range of a setting: `> 0`, `>= 0 and < 1`, or an empty text."""
    limits = ((">=", known.low), (">", known.above), ("<=", known.high), ("<", known.below))
    return " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


def requirement(known: Setting) -> str:
    """Return type and range in one phrase: `float > 0`."""
    return f"{describe(known.kind)} {bounds(known)}".strip()


def show(value: Any) -> str:
    """Format a value for the command line; `read` is the inverse."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        items = [show(item) for item in value]
        bare = items and all(_is_bare(item) for item in items)
        return ",".join(items) if bare else json.dumps(list(value), default=str)
    return str(value)


def brief(value: Any) -> str:
    """Return a value as an error quotes it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_bare(item: str) -> bool:
    """Return True if an item of a list needs no quotes."""
    return item == item.strip() != "" and "," not in item and item[0] not in "[("


def is_within(known: Setting, value: Any) -> bool:
    """Return False if a number, or a number of a list, is outside the range of its setting."""
    if isinstance(value, tuple):
        return all(is_within(known, item) for item in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return (
        (known.low is None or value >= known.low)
        and (known.above is None or value > known.above)
        and (known.high is None or value <= known.high)
        and (known.below is None or value < known.below)
    )


def check(kind: Any, value: Any) -> Any:
    """Return the value converted to its type: int to float, list to tuple, text to span.

    Raises:
      ValueError: if it has another type. A float is no int, and a bool is no number.
    """
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if is_union(kind):
        for member in members:
            try:
                return check(member, value)
            except ValueError:
                continue
    elif origin is Literal:
        for choice in members:
            if type(choice) is type(value) and choice == value:
                return choice
    elif origin is tuple and isinstance(value, (tuple, list)):
        if Ellipsis in members:
            return tuple(check(members[0], item) for item in value)
        if len(members) == len(value):
            return tuple(check(member, item) for member, item in zip(members, value, strict=True))
    elif kind is Span and isinstance(value, (int, str, Span)):
        return Span.parse(value)
    elif kind in (bool, str, type(None)) and type(value) is kind:
        return value
    elif type(value) is bool:
        pass  # a bool is a number in Python, but not in a config
    elif kind is int and isinstance(value, numbers.Integral):
        return int(value)
    elif kind is float and isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(f"it must be {describe(kind)}")


def read(kind: Any, text: str) -> Any:
    """Parse the text of a command line as a value.

    Raises:
      ValueError: if the text is no value of that type.
    """
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if is_union(kind):
        # Any text is a str, so narrower types are tried first.
        for member in sorted(members, key=lambda member: member is str):
            try:
                return read(member, text)
            except ValueError:
                continue
    elif origin is Literal:
        for choice in members:
            if text == str(choice):
                return choice
    elif origin is tuple:
        return _read_list(kind, members, text)
    elif kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    elif kind is int:
        return _read_int(text)
    elif kind is float:
        with contextlib.suppress(ValueError):
            return check(float, float(text))
    elif kind is type(None) and text in ("None", "none", "null"):
        return None
    elif kind is Span:
        return Span.parse(text)
    elif kind is str:
        return text
    raise ValueError(f"it must be {describe(kind)}")


def _read_int(text: str) -> int:
    """Parse `1000`, `1_000` or `1e3` exactly, without a float in between."""
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise ValueError("it must be int") from None
    # An exponent in the thousands would create a number that fills the memory.
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        raise ValueError("it must be int")
    return int(number)


def _read_list(kind: Any, members: tuple[Any, ...], text: str) -> tuple[Any, ...]:
    """Parse `a,b`, a JSON list or a Python tuple."""
    if text[:1] in ("[", "(") and text[-1:] in ("]", ")"):
        for parser in (json.loads, ast.literal_eval):
            try:
                return check(kind, parser(text))
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    items = [item.strip() for item in text.split(",") if item.strip()]
    if Ellipsis in members:
        return tuple(read(members[0], item) for item in items)
    if len(items) != len(members):
        raise ValueError(f"it must be {describe(kind)}")
    return tuple(read(member, item) for member, item in zip(members, items, strict=True))
