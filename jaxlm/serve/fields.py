"""Request bodies: JSON with limits, and typed fields. Every problem names its field.

Example:
  >>> fields = Fields(parse(b'{"max_tokens": 5}'))
  >>> fields.integer("max_tokens", 16, low=0), fields.integer("n", 1, low=1)
  (5, 1)
  >>> fields.check_all_used(())
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from jaxlm.core.nearest import nearest_word

MAX_BODY = 2 * 2**20  # bytes
MAX_DEPTH = 64  # of nested lists and objects


class RefusedRequest(Exception):
    """A request that gets an error: status, message, and the field that is wrong."""

    def __init__(self, status: int, message: str, field: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.field, self.headers = status, field, headers

    def as_json(self) -> dict[str, Any]:
        """Return the body of the response, in the form of OpenAI."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.field, "code": self.status}
        }


def parse(body: bytes) -> dict[str, Any]:
    """Return the object of a JSON text. Raises RefusedRequest with 400."""

    def refuse(constant: str) -> None:
        raise RefusedRequest(400, f"the body has the number {constant}, which is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise RefusedRequest(400, "the body has a field twice", twice[:80])
        return value

    try:
        value = json.loads(body.decode(), parse_constant=refuse, object_pairs_hook=unique)
    except RecursionError:
        raise RefusedRequest(400, f"the body is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise RefusedRequest(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RefusedRequest(400, f"the body is a {type(value).__name__}, not an object")
    _check_values(value)
    return value


def _check_values(value: dict[str, Any]) -> None:
    """Raise RefusedRequest for deep nesting, infinite numbers, or text that is not Unicode."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RefusedRequest(400, f"the body is nested more than {MAX_DEPTH} deep")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += [*each.keys(), *each.values()]
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, float) and not math.isfinite(each):
                raise RefusedRequest(400, "the body has a number that is not finite")
            elif isinstance(each, str) and not each.isascii():
                try:
                    each.encode()
                except UnicodeEncodeError:
                    message = "the body has half of a surrogate pair"
                    raise RefusedRequest(400, message) from None
        level = inner


class Fields:
    """The fields of a body, read one by one; `check_all_used` refuses the rest."""

    def __init__(self, body: dict[str, Any]):
        self._body = body
        self._used: set[str] = set()

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field as it is; null is the default."""
        self._used.add(name)
        value = self._body.get(name)
        return default if value is None else value

    def number(
        self, name: str, default: float, *, low: float, high: float, above: bool = False
    ) -> float:
        """Return a number from `low` to `high`; with `above`, larger than `low`.

        Args:
          name: the field.
          default: without the field.
          low: smallest number.
          high: largest number.
          above: exclude `low` itself.
        """
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedRequest(422, f"{name} is {_kind(value)}, not a number", name)
        if not low <= value <= high or (above and value == low):
            bounds = f"{'above' if above else 'at least'} {low:g} and at most {high:g}"
            raise RefusedRequest(422, f"{name} must be {bounds}", name)
        return float(value)

    def integer(self, name: str, default: Any, *, low: int, high: int = 2**31 - 1) -> Any:
        """Return an integer from `low` to `high`, or the default."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise RefusedRequest(422, f"{name} is {_kind(value)}, not an integer", name)
        if not low <= value <= high:
            raise RefusedRequest(422, f"{name} must be from {low} to {high}", name)
        return value

    def switch(self, name: str) -> bool:
        """Return true or false; false without the field."""
        value = self.value(name, False)
        if not isinstance(value, bool):
            raise RefusedRequest(422, f"{name} is {_kind(value)}, not true or false", name)
        return value

    def text(self, name: str) -> str | None:
        """Return a text, or None without the field."""
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise RefusedRequest(422, f"{name} is {_kind(value)}, not a text", name)
        return value

    def inner(self, name: str) -> "Fields":
        """Return the fields of an object; none without the field."""
        value = self.value(name, {})
        if not isinstance(value, dict):
            raise RefusedRequest(422, f"{name} is {_kind(value)}, not an object", name)
        return Fields(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a text or a list of texts as a tuple."""
        value = self.value(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise RefusedRequest(422, f"{name} must be a text or a list of texts", name)
        return tuple(value)

    def check_all_used(self, ignored: Sequence[str]) -> None:
        """Raise RefusedRequest for a field that was not read and is not ignored."""
        for name in self._body:
            if name not in self._used and name not in ignored:
                near = nearest_word(name, [*self._used])
                meant = f"; the nearest one is {near}" if near else ""
                message = f"there is no field {name[:80]!r}{meant}"
                raise RefusedRequest(400, message, name[:80])


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")
