"""Conversion of nested dicts to typed sections, with all problems collected."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxlm.core import problems as problem
from jaxlm.core.problems import Problem
from jaxlm.core.provenance import DEFAULT, Origin
from jaxlm.core.quoting import holds_secret
from jaxlm.core.schema import Setting, by_name, chosen, fields, join, plain, tag
from jaxlm.core.spelling import SYNONYMS, nearest
from jaxlm.core.values import brief, check, is_within


class _Wrong:
    """Placeholder of a wrong value: it can be stored, but every use of it raises ValueError."""

    def _refuse(self, *_: Any) -> Any:
        raise ValueError("this value is wrong")

    __getattr__ = __bool__ = __eq__ = __hash__ = __str__ = _refuse  # type: ignore[assignment]


WRONG = _Wrong()


@dataclasses.dataclass
class Resolver:
    """Builder of sections from nested dicts that collects their problems.

    An absent setting takes its default. `section.problems()` runs even if a setting is wrong, until
    it uses that setting: so contradictions are reported in the same message.
    """

    schema: type
    raw: dict[str, Any]
    origins: dict[str, Origin]
    problems: list[Problem] = dataclasses.field(default_factory=list)
    value: Any = None

    def resolve(self) -> None:
        """Set `value` to the section, or to None if a setting is wrong."""
        section = self._section((self.schema,), self.raw, "", self.schema())
        self.value = None if self.problems else section

    def origin(self, path: str) -> Origin:
        """Return the origin of a path, or of the nearest enclosing section that was set."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, DEFAULT)

    def _culprit(self, path: str) -> Origin:
        """Return the origin of a contradicting setting, else of the last one set in its section."""
        origin, section = self.origin(path), path.rpartition(".")[0]
        others = [each for name, each in self.origins.items() if name.startswith(section)]
        if origin.kind != "default" or not others:
            return origin
        return Origin("default", f"default, with {others[-1]}")

    def _section(self, arms: tuple[type, ...], raw: Any, path: str, default: Any) -> Any:
        if isinstance(raw, arms):
            raw = plain(raw)
        if not isinstance(raw, dict):
            names = list(by_name(arms)) if tag(arms[0]) else []
            meant = nearest(raw, names) if isinstance(raw, str) else None
            fix = (
                problem.flag(join(path, tag(arms[0]) or ""), meant)
                if meant
                else problem.explain(path or problem.root_name(self.schema))
            )
            self.problems.append(
                Problem(
                    f"{path or 'the config'} = {brief(raw)} is not allowed",
                    "it is a section that contains settings",
                    self.origin(path),
                    fix,
                )
            )
            return WRONG
        arm = chosen(arms, raw, default)
        if arm is None:
            self.problems.append(
                unknown_arm(
                    arms, path, raw[tag(arms[0])], self.origin(join(path, tag(arms[0]) or ""))
                )
            )
            return WRONG
        for name in raw.keys() - fields(arm).keys():
            inner = join(path, str(name))
            self.problems.append(
                problem.unknown(
                    self.schema, self.raw, inner, raw[name], self.origin(inner), self.origins
                )
            )
        before = len(self.problems)
        values = {}
        for name, known in fields(arm).items():
            fallback = getattr(default, name) if type(default) is arm else known.default
            inner = join(path, name)
            if known.arms:
                values[name] = self._section(known.arms, raw.get(name, {}), inner, fallback)
            else:
                values[name] = self._value(known, raw.get(name, fallback), inner)
        section = arm(**values)
        contradictions: list[tuple[str, str, str]] = []
        is_right = len(self.problems) == before
        try:
            for each in section.problems() if hasattr(section, "problems") else ():
                contradictions.append(each)
        except Exception:
            # With a wrong value, report the contradictions found before its first use.
            if is_right:
                raise
        for name, why, fix in contradictions:
            inner = join(path, name)
            value = plain(problem.value_at(plain(section), name))
            shown = "" if isinstance(value, dict) or value is None else f" = {brief(value)}"
            self.problems.append(
                Problem(f"{inner}{shown} does not fit", why, self._culprit(inner), fix)
            )
        if is_right and hasattr(section, "derived"):
            for name, value, reason in section.derived():
                section = dataclasses.replace(section, **{name: value})
                self._note_derived(join(path, name), reason)
        return section

    def _note_derived(self, path: str, reason: str) -> None:
        """Record why a setting has a derived value, unless the user set it."""
        if reason and path not in self.origins:
            self.origins[path] = Origin("default", reason)

    def _value(self, known: Setting, raw: Any, path: str) -> Any:
        try:
            value = check(known.kind, raw)
        except ValueError as error:
            # The message of a span has more detail than its type.
            why = str(error) if "span" in str(error) or "steps" in str(error) else ""
            self.problems.append(problem.wrong_value(path, known, raw, self.origin(path), why))
            return WRONG
        if not is_within(known, value):
            self.problems.append(problem.wrong_value(path, known, raw, self.origin(path)))
            return WRONG
        if any(holds_secret(text) for text in _texts(value)):
            self.problems.append(problem.secret(path, value, self.origin(path)))
        return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)


def unknown_arm(arms: tuple[type, ...], path: str, value: Any, origin: Origin) -> Problem:
    """Return the problem of a name that no arm of a union has."""
    names = list(by_name(arms))
    label = join(path, tag(arms[0]) or "")
    meant = SYNONYMS.get(str(value)) or nearest(str(value), names)
    return Problem(
        f"{label} = {brief(value)} is not allowed",
        f"it must be one of {', '.join(names)}",
        origin,
        problem.flag(label, meant) if meant in names else problem.explain(label),
    )
