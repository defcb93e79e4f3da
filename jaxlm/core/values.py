"""Values of settings: parse from text, check against type and range, format."""

import ast
import decimal
import json
import math
import numbers
import typing
from typing import Any, Literal

from jaxlm.core.schema import Setting, is_union
from jaxlm.core.span import Span

_NAMES = {
    bool: "true or false",
    int: "int",
    float: "float",
    str: "text",
    type(None): "None",
    Span: "span",
}


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
        return check(float, _read_float(text))
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


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("it must be float") from None


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
