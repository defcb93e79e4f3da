"""Loading of configs: read the file, apply the overrides, resolve to a typed value."""

import copy
import dataclasses
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.core import problems, sections, shipped, user_code
from jaxlm.core.config_file import read_file
from jaxlm.core.nearest import nearest_word
from jaxlm.core.problems import DEFAULT, Origin, Origins, Problem
from jaxlm.core.quoting import holds_secret
from jaxlm.core.sections import Setting

Overrides = Sequence[tuple[str, str]]  # dotted path and text, as on the command line


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
    is_part: bool = False  # of a config: settings that contradict each other are no problem
    problems: list[Problem] = dataclasses.field(default_factory=list)
    value: Any = None

    def resolve(self) -> Any:
        """Set `value` to the section, or to None if a setting is wrong; return it."""
        section = self._section((self.schema,), self.raw, "", self.schema())
        self.value = None if self.problems else section
        return self.value

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
            raw = sections.plain(raw)
        label = sections.tag(arms[0]) or ""
        if not isinstance(raw, dict):
            fix = problems.explain(path or problems.root_name(self.schema))
            names = sections.by_name(arms) if label and isinstance(raw, str) else {}
            if meant := nearest_word(raw, names):
                fix = problems.flag(sections.join(path, label), meant)
            return self._wrong(problems.not_a_section(path, raw, self.origin(path), fix))
        arm = sections.chosen(arms, raw, default)
        if arm is None:
            origin = self.origin(sections.join(path, label))
            return self._wrong(problems.unknown_arm(arms, path, raw[label], origin))
        for name in raw.keys() - sections.fields(arm).keys():
            inner = sections.join(path, str(name))
            where = (inner, raw[name], self.origin(inner), self.origins)
            self._wrong(problems.unknown(self.schema, self.raw, *where))
        before = len(self.problems)
        values = {}
        for name, known in sections.fields(arm).items():
            fallback = getattr(default, name) if type(default) is arm else known.default
            inner = sections.join(path, name)
            if known.arms:
                inside = raw.get(name, {})
                if isinstance(inside, str) and known.named:
                    if inside not in known.named:
                        origin = self.origin(inner)
                        values[name] = self._wrong(_unknown_section(known, inner, inside, origin))
                        continue
                    inside = known.named[inside]
                values[name] = self._section(known.arms, inside, inner, fallback)
            else:
                values[name] = self._value(known, raw.get(name, fallback), inner)
        section = arm(**values)
        contradictions: list[tuple[str, str, str]] = []
        is_right = len(self.problems) == before
        has_rules = hasattr(section, "problems") and not self.is_part
        try:
            for each in section.problems() if has_rules else ():
                contradictions.append(each)
        except Exception:
            # With a wrong value, report the contradictions found before its first use.
            if is_right:
                raise
        for name, why, fix in contradictions:
            inner = sections.join(path, name)
            value = sections.plain(problems.value_at(sections.plain(section), name))
            is_plain = value is not None and not isinstance(value, dict)
            what = f"{inner} = {sections.brief(value)}" if is_plain else inner
            self._wrong(Problem(f"{what} does not fit", why, self._culprit(inner), fix))
        if is_right and hasattr(section, "derived"):
            for name, value, reason in section.derived():
                section = dataclasses.replace(section, **{name: value})
                if reason:  # of the derived value, unless the user set one
                    self.origins.setdefault(sections.join(path, name), Origin("default", reason))
        return section

    def _wrong(self, problem: Problem) -> Any:
        """Add a problem and return the placeholder of the wrong value."""
        self.problems.append(problem)
        return WRONG

    def _value(self, known: Setting, raw: Any, path: str) -> Any:
        try:
            value = sections.check(known.kind, raw)
        except ValueError as error:
            # The message of a span has more detail than its type.
            why = str(error) if "span" in str(error) or "steps" in str(error) else ""
            return self._wrong(problems.wrong_value(path, known, raw, self.origin(path), why))
        if not sections.is_within(known, value):
            return self._wrong(problems.wrong_value(path, known, raw, self.origin(path)))
        if any(holds_secret(text) for text in _texts(value)):
            self._wrong(problems.secret(path, value, self.origin(path)))
        return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A resolved config, and the origin of each value by dotted path."""

    value: Any
    provenance: dict[str, Origin]


def load(
    schema: type, file: str | None, overrides: Overrides = (), *, is_part: bool = False
) -> Loaded:
    """Read a config and apply overrides.

    Raises InputMissing if there is no such file, ConfigError with all other problems in one error.

    Args:
      schema: class of the section to build.
      file: `configs/x.py` or `configs/x.py:argument`, which is run; a resolved `config.json` or a
        directory with one, which is only parsed; without such a file, the name of a shipped
        config, or else of a published section such as `llama3-8b`, the only setting that is not
        a default; None for the defaults.
      overrides: dotted paths and texts, as on the command line, in any order.
      is_part: allows settings that contradict each other: the config need not run yet.
    """
    raw: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    if file is not None and (published := _published(schema, file)):
        overrides = [published, *overrides]
    elif file is not None:
        raw, origins = read_file(file, schema, [name for _, name in _every_published(schema)])
    raw = sections.current_names(schema, raw)
    origins = {sections.current(schema, path)[0]: origin for path, origin in origins.items()}
    overrides = _current_overrides(schema, overrides)
    resolver = _apply(schema, raw, origins, overrides, is_part=is_part)
    return _loaded(resolver, _corrections(resolver, raw, origins, overrides))


def _every_published(schema: type) -> list[tuple[str, str]]:
    """Return path and name of each published section."""
    known = sections.fields(schema).items()
    return [(path, name) for path, each in known for name in each.named]


def _published(schema: type, text: str) -> tuple[str, str] | None:
    """Return path and name of the published section that --config names; None for a config."""
    name = text.partition(":")[0]
    if Path(text).exists() or shipped.find(name) or shipped.find(name.replace("-", "_")):
        return None
    folded = {name.replace("_", "-"): (path, name) for path, name in _every_published(schema)}
    return folded.get(text.replace("_", "-"))


def _loaded(resolver: Resolver, fix: str = "") -> Loaded:
    if resolver.problems:
        raise problems.error(resolver.problems, fix)
    paths = [path for path, _, _ in sections.leaves(resolver.value)]
    return Loaded(resolver.value, {path: resolver.origin(path) for path in paths})


def _apply(
    schema: type,
    raw: Any,
    origins: dict[str, Origin],
    overrides: Overrides,
    *,
    is_part: bool = False,
) -> Resolver:
    """Resolve the settings of a file under overrides; the arguments are not modified."""
    resolver = Resolver(schema, copy.deepcopy(raw), dict(origins), is_part=is_part)
    _drop_derived(resolver, {path for path, _ in overrides})
    for path, text in _arms_first(schema, overrides):
        if wrong := _override(resolver, path, text):
            resolver.problems.append(wrong)
    resolver.resolve()
    return resolver


def _drop_derived(resolver: Resolver, overridden: set[str]) -> None:
    """Drop each derived value of a file if an override changes the setting it was derived from.

    A resolved config does not record which values were derived, so a value equal to the derived one
    counts as derived. A different value was chosen by the user and stays.
    """
    known = sections.settings(resolver.schema, resolver.raw)
    for path, each in known.items():
        section, _, name = path.rpartition(".")
        if not each.derived_from or path in overridden:
            continue
        if sections.join(section, each.derived_from) not in overridden:
            continue
        inside = problems.value_at(resolver.raw, section, {})
        if not isinstance(inside, dict) or name not in inside:
            continue
        (arm,) = known[section].arms
        others = {key: value for key, value in inside.items() if key != name}
        stored = Resolver(arm, inside, {}).resolve()
        if stored is not None and stored == Resolver(arm, others, {}).resolve():
            del inside[name]
            resolver.origins.pop(path, None)


def _corrections(resolver: Resolver, raw: Any, origins: Origins, overrides: Overrides) -> str:
    """Return flags that correct the config, by trying one fix after another; "" if they do not."""
    flags: dict[str, str] = {}
    remaining = list(overrides)
    while resolver.problems:
        first = resolver.problems[0]
        is_flag = first.fix.startswith(("--config.", "'--config."))
        words = shlex.split(first.fix.partition("\n")[0]) if is_flag else []
        added = dict(word.removeprefix("--config.").partition("=")[::2] for word in words)
        is_pasted = all(word.startswith("--config.") for word in words)
        if not is_pasted or added.items() <= flags.items() or flags | added != added | flags:
            return ""
        flags |= added
        # A setting of another arm stays, with its value, if the fix chooses that arm.
        known = sections.settings(resolver.schema, resolver.raw, every_arm=True)
        remaining = [
            (path, text)
            for path, text in remaining
            if path not in added
            # A setting that contradicts another stays if the other one is corrected.
            and (path in known or first.origin.where != f"--config.{path}={text}")
        ]
        resolver = _apply(resolver.schema, raw, origins, [*remaining, *flags.items()])
    return shlex.join(f"--config.{path}={text}" for path, text in flags.items())


def from_json(
    schema: type, data: Any, where: str = "config.json", overrides: Overrides = ()
) -> Any:
    """Return the section of a `to_json` result, with overrides as on the command line.

    Only lists (to tuples) and text (to spans) are converted. An absent setting, newer than the
    file, takes its default. Raises ConfigError if one is unknown, of another type or out of range,
    or the data names code of a user without its digest.
    """
    user_code.check_recorded(schema, data, where)
    return loaded_json(schema, data, where, overrides).value


def loaded_json(schema: type, data: Any, where: str, overrides: Overrides = ()) -> Loaded:
    """Return the section as `from_json` does, with the origin of each of its values."""
    if isinstance(data, dict):
        data = sections.current_names(schema, data)
    overrides = _current_overrides(schema, overrides)
    return _loaded(_apply(schema, data, {"": Origin("file", where)}, overrides))


def _current_overrides(schema: type, overrides: Overrides) -> list[tuple[str, str]]:
    """Return overrides under the current names of their settings, with a warning for others."""
    result = []
    for path, text in overrides:
        new, values = sections.current(schema, path, tuple(text.split(",")))
        if new != path:
            problems.warn_renamed(path, new)
        result.append((new, ",".join(map(sections.show, values))))
    return result


@functools.cache
def _labels(schema: type) -> frozenset[str]:
    """Return the paths of published sections, and of the settings that name an arm."""
    every = sections.settings(schema, {}, every_arm=True)
    labels = {path for path, known in every.items() if known.named}
    for path, known in every.items():
        labels |= {sections.join(path, name) for arm in known.arms if (name := sections.tag(arm))}
    return frozenset(labels)


def _arms_first(schema: type, overrides: Overrides) -> list[tuple[str, str]]:
    """Sort overrides: sections and names of arms first, outer before inner, then the others."""
    labels = _labels(schema)

    def order(pair: tuple[str, str]) -> tuple[bool, int]:
        is_label = pair[0] in labels
        return not is_label, pair[0].count(".") if is_label else 0

    return sorted(overrides, key=order)


def _override(resolver: Resolver, path: str, text: str) -> Problem | None:
    """Set one value, or return the problems."""
    schema, raw, origins = resolver.schema, resolver.raw, resolver.origins
    origin = Origin("command line", f"--config.{path}={text}")
    present = sections.settings(schema, raw)
    section, _, name = path.rpartition(".")
    known, parent = present.get(path), present.get(section)
    arms = sections.by_name(parent.arms) if parent and parent.arms else {}
    is_label = bool(parent and arms and name == sections.tag(parent.arms[0]))
    if known is None and not is_label:
        return problems.unknown(schema, raw, path, text, origin, origins)
    if known and text in known.named:
        _replace(raw, origins, path, known.named[text])
    elif known and known.arms:
        return _unknown_section(known, path, text, origin)
    elif parent and is_label:
        inside = _section(raw, section)
        before = sections.chosen(parent.arms, inside, parent.default)
        is_same = before is not None and sections.arm_name(before) == text
        arm = before if is_same else user_code.find(parent.arms, text)
        if arm is None:
            return problems.unknown_arm(parent.arms, section, text, origin)
        if not is_same:
            # Settings of another arm do not apply to this one.
            _replace(raw, origins, section, arm())
        inside[name] = text
    elif known:
        inside = _section(raw, section)
        try:
            inside[name] = sections.read(known.kind, text)
        except ValueError as error:
            why = str(error) if "span" in str(error) else ""
            return problems.wrong_value(path, known, text, origin, why)
    origins[path] = origin
    return None


def _replace(raw: dict[str, Any], origins: dict[str, Origin], path: str, section: Any) -> None:
    """Set a whole section and forget the origins of its settings."""
    inside = _section(raw, path)
    inside.clear()
    inside.update(sections.plain(section))
    for stale in [name for name in origins if name.startswith(f"{path}.")]:
        del origins[stale]


def _unknown_section(known: Setting, path: str, text: str, origin: Origin) -> Problem:
    label, names = sections.tag(known.arms[0]), sections.by_name(known.arms)
    if (meant := nearest_word(text, [*known.named, *names])) in known.named:
        fix = problems.flag(path, meant)
    elif label and meant:
        fix = problems.flag(sections.join(path, label), meant)
    else:
        fix = problems.explain(path)
    wrong = problems.not_a_section(path, text, origin, fix)
    published = f"{wrong.why}, or a published name: see `jaxlm config explain {path}`"
    return dataclasses.replace(wrong, why=published) if known.named else wrong


def _section(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the dict at a path, created if absent."""
    for name in path.split(".") if path else ():
        if not isinstance(raw.get(name), dict):
            raw[name] = {}
        raw = raw[name]
    return raw
