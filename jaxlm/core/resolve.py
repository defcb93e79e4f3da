"""Nested dicts into typed sections, every problem found on the way."""

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
    """Stands for a value that is wrong. It can be held, but what looks at it fails, as arithmetic with it does anyway."""

    def _refuse(self, *_: Any) -> Any:
        raise ValueError("this value is wrong")

    __getattr__ = __bool__ = __eq__ = __hash__ = __str__ = _refuse  # type: ignore[assignment]


WRONG = _Wrong()


@dataclasses.dataclass
class Resolver:
    """Builds sections from nested dicts and gathers what is wrong with them.

    A setting that is absent takes its default. `section.problems()` is asked even where a setting is wrong, as far as it
    does not look at that one: so a contradiction is told in the same message.
    """

    schema: type
    raw: dict[str, Any]
    origins: dict[str, Origin]
    problems: list[Problem] = dataclasses.field(default_factory=list)
    value: Any = None

    def resolve(self) -> None:
        """Sets `value` to the section, or to None where a setting is wrong."""
        section = self._section((self.schema,), self.raw, "", self.schema())
        self.value = None if self.problems else section

    def origin(self, path: str) -> Origin:
        """Who set a path, or the nearest section around it that somebody set."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, DEFAULT)

    def _culprit(self, path: str) -> Origin:
        """Who made a setting contradict others: who set it, or else who last set one beside it."""
        origin, section = self.origin(path), path.rpartition(".")[0]
        beside = [other for there, other in self.origins.items() if there.startswith(section)]
        if origin.kind != "default" or not beside:
            return origin
        return Origin("default", f"default, beside {beside[-1]}")

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
                    "it is a section with settings of its own",
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
            there = join(path, str(name))
            self.problems.append(
                problem.unknown(
                    self.schema, self.raw, there, raw[name], self.origin(there), self.origins
                )
            )
        before = len(self.problems)
        values = {}
        for name, known in fields(arm).items():
            standing = getattr(default, name) if type(default) is arm else known.default
            inner = join(path, name)
            if known.arms:
                values[name] = self._section(known.arms, raw.get(name, {}), inner, standing)
            else:
                values[name] = self._value(known, raw.get(name, standing), inner)
        section = arm(**values)
        found: list[tuple[str, str, str]] = []
        is_right = len(self.problems) == before
        try:
            for each in section.problems() if hasattr(section, "problems") else ():
                found.append(each)
        except Exception:
            # Beside a wrong value, those contradictions are told that can be found without it.
            if is_right:
                raise
        for name, why, fix in found:
            there = join(path, name)
            value = plain(problem.at(plain(section), name))
            shown = "" if isinstance(value, dict) or value is None else f" = {brief(value)}"
            self.problems.append(
                Problem(f"{there}{shown} does not fit", why, self._culprit(there), fix)
            )
        if is_right and hasattr(section, "derived"):
            for name, value, reason in section.derived():
                section = dataclasses.replace(section, **{name: value})
                self._note_derived(join(path, name), reason)
        return section

    def _note_derived(self, path: str, reason: str) -> None:
        """Notes why a setting has a derived value, unless the user asked for that."""
        if reason and path not in self.origins:
            self.origins[path] = Origin("default", reason)

    def _value(self, known: Setting, raw: Any, path: str) -> Any:
        try:
            value = check(known.kind, raw)
        except ValueError as error:
            # A span says more about its text than its type does.
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
    """A name that no arm of a union has."""
    names = list(by_name(arms))
    there = join(path, tag(arms[0]) or "")
    meant = SYNONYMS.get(str(value)) or nearest(str(value), names)
    return Problem(
        f"{there} = {brief(value)} is not allowed",
        f"it must be one of {', '.join(names)}",
        origin,
        problem.flag(there, meant) if meant in names else problem.explain(there),
    )
