"""Problems of a config: origins of its values, and one error for all its problems."""

import dataclasses
import linecache
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jaxlm.core import sections, shipped, user_code
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import SYNONYMS, distance, has_same_numbers, nearest_word, notations
from jaxlm.core.quoting import without_secret
from jaxlm.core.sections import Setting

EXPLAIN = "jaxlm config explain"
MAX_LINES = 8
MAX_LETTERS = 160


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a value, such as `configs/quickstart.py:14` or `--config.optim.lr=1e-3`."""

    kind: Literal["default", "file", "command line"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind

    @property
    def place(self) -> str:
        """File without its line, or the kind."""
        return self.where.rpartition(":")[0] or self.where if self.kind == "file" else self.kind


DEFAULT = Origin("default")
Origins = dict[str, Origin]  # of values by dotted path
Raw = dict[str, Any]  # a config as nested dicts


class RenamedSetting(FutureWarning):
    """Warning about a setting whose former name is read for one release."""


def warn_renamed(old: str, new: str) -> None:
    """Warn that a config or a command line uses the former name of a setting."""
    text = f"the setting {old} is now named {new}; the old name stops working in the next release"
    warnings.warn(text, RenamedSetting, stacklevel=2)


def short(path: str | os.PathLike[str]) -> str:
    """Return a path, relative if it is below the working directory, or a shipped config."""
    relative = os.path.relpath(path)
    if not relative.startswith(".."):
        return relative
    if (full := Path(path)).is_relative_to(shipped.FOLDER):
        return f"jaxlm/configs/{full.relative_to(shipped.FOLDER)}"
    return os.fspath(path)


def caller(is_ours: Callable[[str], bool]) -> Origin:
    """Return the source line that called into the files accepted by `is_ours`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return Origin("file", f"{short(frame.f_code.co_filename)}:{frame.f_lineno}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem: what, why, origin of the value, and a fix to paste."""

    what: str
    why: str
    origin: Origin
    fix: str = ""

    @property
    def line(self) -> str:
        """The problem without its fix, in one line; a long path does not shorten the rest."""
        text = f"{self.what}; {self.why}"
        if len(text) > MAX_LETTERS:
            text = f"{text[:MAX_LETTERS].rpartition(' ')[0]} ..."
        return f"{self.origin}: {text}"


class UnknownSetting(ConfigError, AttributeError, KeyError):
    """An unknown setting in a config file; also the error that `hasattr` and `get` expect."""


def error(
    problems: list[Problem], fix: str = "", kind: type[ConfigError] = ConfigError
) -> ConfigError:
    """Return one error for all problems, in at most eight lines; `fix` corrects all of them."""
    if len(problems) == 1:
        only = problems[0]
        if "\n" in only.fix or not fix:  # several alternatives
            fix = only.fix
        return kind(only.what, where=str(only.origin), why=only.why, fix=fix)
    unexplained = [each.fix for each in problems if each.fix.startswith(EXPLAIN)]
    if not fix and unexplained:
        fix = explain(*dict.fromkeys(each.removeprefix(EXPLAIN).strip() for each in unexplained))
    fix = fix or problems[0].fix.partition("\n")[0]
    room = MAX_LINES - 2 - bool(fix)
    lines = [problem.line for problem in problems]
    if len(lines) > room:
        lines = [*lines[: room - 1], f"and {len(lines) - room + 1} more"]
    where = ", ".join(dict.fromkeys(problem.origin.place for problem in problems))
    return kind(f"{len(problems)} settings are wrong", where=where, why="\n".join(lines), fix=fix)


def flag(path: str, value: Any) -> str:
    """Return the flag that sets a value."""
    return shlex.quote(f"--config.{path}={sections.show(value)}")


def line_of(origin: Origin) -> str:
    """Return the source line of an origin, or an empty text."""
    name, _, number = origin.where.rpartition(":")
    linecache.checkcache(name)
    is_line = origin.kind == "file" and number.isdecimal()
    return linecache.getline(name, int(number)).strip() if is_line else ""


def explain(*paths: str) -> str:
    """Return the command that lists types, ranges and choices of settings."""
    return " ".join([EXPLAIN, *filter(None, paths)])


def flag_or_explain(path: str, known: Setting, value: Any) -> str:
    """Return the flag of the same value, else the command that lists values; never a guess."""
    try:
        return flag(path, same(known, value))
    except ValueError:
        return explain(path)


def _not_allowed(path: str, value: Any, why: str, origin: Origin, fix: str) -> Problem:
    what = f"{path or 'the config'} = {sections.brief(value)} is not allowed"
    return Problem(what, why, origin, fix)


def not_a_section(path: str, value: Any, origin: Origin, fix: str) -> Problem:
    """Return the problem of a plain value for a section."""
    return _not_allowed(path, value, "it is a section that contains settings", origin, fix)


def wrong_value(path: str, known: Setting, value: Any, origin: Origin, why: str = "") -> Problem:
    """Return the problem of a value of the wrong type or out of range.

    Args:
      path, known: the setting by its dotted path.
      value, origin: the value and its origin.
      why: the reason; by default the type and range of the setting.
    """
    reason = why or f"it must be {sections.requirement(known)}"
    reason += f" ({known.doc})" if known.doc else ""
    return _not_allowed(path, value, reason, origin, flag_or_explain(path, known, value))


def secret(path: str, value: Any, origin: Origin) -> Problem:
    """Return the problem of a URL with a secret; the fix is the URL without the secret."""
    why = "config.json and command.sh of the run would store it; pass it to the tool that reads "
    why += "the URL by its environment variable or file"
    fix = without_secret(flag(path, value))
    return Problem(f"{path} contains a password or a key", why, origin, fix)


def same(known: Setting, value: Any) -> Any:
    """Return the value that `value` denotes in another notation.

    `2k` is 2000, `"32"` is 32, `fp16` is `float16`; a misspelled choice is the nearest choice.
    Raises ValueError if there is none, or it is out of range.
    """
    texts = [sections.show(value)]
    if isinstance(value, str):
        texts += notations(value, known.unit)
        if words := sections.choices(known.kind):
            items = map(str.strip, value.split(","))
            meant = (SYNONYMS.get(item) or nearest_word(item, words) or item for item in items)
            texts.append(",".join(meant))
    for text in texts:
        try:
            result = sections.read(known.kind, text)
        except ValueError:
            continue
        if sections.is_within(known, result):
            return result
    raise ValueError(f"{sections.brief(value)} has no other notation")


def unknown(
    schema: type, raw: Raw, path: str, value: Any, origin: Origin, origins: Origins
) -> Problem:
    """Return the problem of an unknown setting, with the setting that was probably meant.

    Candidates are the setting with this name in another trainer (`ALIASES` of the schema), a
    setting with a similar path, and settings of this name in another section; for a name without
    a section, the setting that a flag of this name is fixed to comes first. The fix keeps the
    value. Without a candidate, the settings of the section are listed.

    Args:
      schema, raw: class of the config, and the config as nested dicts.
      path, value: the unknown setting; None for an unknown value.
      origin, origins: origin of the value, and of all values of the config by path.
    """
    present = sections.settings(schema, raw)
    section, _, leaf = path.rpartition(".")
    union = present.get(section)
    arms = sections.by_name(union.arms) if union and union.arms else {}
    owners = [name for name, each in arms.items() if leaf in sections.fields(each)]
    similar = present
    if value is not None:
        is_section = isinstance(value, dict)
        similar = {name: each for name, each in present.items() if bool(each.arms) == is_section}
    what = f"unknown setting {path}"
    if union and owners:
        label = f"{section}.{sections.tag(union.arms[0])}"
        arm = sections.chosen(union.arms, value_at(raw, section, {}), union.default)
        now = next((name for name, each in arms.items() if each is arm), None)
        what, owned = f"{path} is not a setting here", f"{' and '.join(owners)} would have it"
        why = f"it is a setting of another {section}: {label} is {now}, {owned}"
        fix = "\n".join(f"--config.{label}={owner}" for owner in owners[:3])
    elif best := _nearest(schema, path, similar):
        why = f"the nearest is {best}{_described(present[best], raw, best, origins)}"
        fix = _renamed(path, best, present[best], value, origin)
    elif elsewhere := sections.settings(schema, raw, every_arm=True).get(path):
        what = f"{path} is not a setting here"
        why, fix = f"it is a setting of another {section}: {elsewhere.doc}", explain(path)
    elif named := _of_an_arm(present, raw, section, leaf, value):
        why, fix = named
    else:
        while section and section not in present:
            section = section.rpartition(".")[0]
        names = [name.rpartition(".")[2] for name in present if name.rpartition(".")[0] == section]
        why = f"{section or 'the config'} has {', '.join(names)}"
        fix = explain(section or root_name(schema))
    return Problem(what, why, origin, fix)


def _of_an_arm(
    present: dict[str, Setting], raw: Raw, name: str, leaf: str, value: Any
) -> tuple[str, str] | None:
    """Return why and fix if a section is named by an arm of a union: `lora.rank` or `dpo.beta`.

    Args:
      present: the settings of the config, by path.
      raw: the config as nested dicts.
      name, leaf, value: the two parts of the unknown path, and its value.
    """
    for section, union in present.items():
        arm = sections.by_name(union.arms).get(name) if union.arms else None
        known = sections.fields(arm).get(leaf) if arm else None
        if known is None:
            continue
        path = f"{section}.{leaf}"
        why = f"it is {path} with {section}.{sections.tag(union.arms[0])}={name}: {known.doc}"
        fix = explain(path) if value is None else flag_or_explain(path, known, value)
        chosen = sections.chosen(union.arms, value_at(raw, section, {}), union.default)
        if chosen is not arm and not fix.startswith(EXPLAIN):
            fix = f"{flag(f'{section}.{sections.tag(union.arms[0])}', name)} {fix}"
        return why, fix
    return None


def root_name(schema: type) -> str:
    """Return the name of a whole config in `jaxlm config explain`; empty for a run."""
    return getattr(schema, "ROOT", "")


def _described(known: Setting, raw: Raw, path: str, origins: Origins) -> str:
    """Return doc, type and value of a setting, as a clause after its name."""
    doc = f": {known.doc}, {sections.requirement(known)}" if known.doc else ""
    if known.arms:
        return doc
    value = sections.show(value_at(raw, path, known.default))
    return f"{doc}, now {value} ({origins.get(path, DEFAULT)})"


def value_at(raw: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of nested dicts."""
    for name in path.split("."):
        if not isinstance(raw, dict) or name not in raw:
            return default
        raw = raw[name]
    return raw


def rank(path: str, known: dict[str, Setting], others: dict[str, str]) -> list[str]:
    """Return the settings that `path` may mean, likeliest first; `others` are aliases."""
    section, _, leaf = path.rpartition(".")
    alias = others.get(leaf.lower().replace("-", "_"), "")
    if alias in known and alias.rpartition(".")[0] == section:
        return [alias]
    most = len(leaf) // 3 + 1 if len(leaf) > 3 else 1  # of three letters, two make another word
    scores = {}
    for name in known:
        other_section, _, other_leaf = name.rpartition(".")
        if leaf == other_leaf:
            scores[name] = 1.5 + distance(section, other_section) / 100
        is_slip = abs(len(path) - len(name)) <= most and has_same_numbers(path, name)
        if is_slip and (edits := distance(path, name)) <= most:
            scores[name] = min(scores.get(name, 99.0), float(edits))
    if alias in known and not scores:
        return [alias]
    return sorted(scores, key=lambda name: scores[name])


def _nearest(schema: type, path: str, known: dict[str, Setting]) -> str | None:
    """Return the setting that `path` probably means, or None: its name alone, else the nearest."""
    named = None if "." in path else _by_name(schema, path, known)
    return named or next(iter(rank(path, known, getattr(schema, "ALIASES", {}))), None)


def _by_name(schema: type, name: str, known: dict[str, Setting]) -> str | None:
    """Return the setting with this name in another trainer, path or last part, or None.

    If several settings have this last part, it is that of `train`.
    """
    folded = name.replace("-", "_")
    plain = [path for path, each in known.items() if not each.arms]
    alias = getattr(schema, "ALIASES", {}).get(folded)
    if alias in plain:
        return alias
    paths = [path for path in plain if folded in (path, path.rpartition(".")[2])]
    if f"train.{folded}" in paths:
        return f"train.{folded}"
    return paths[0] if len(paths) == 1 else None


def for_flag(schema: type, name: str, value: str | None) -> str | None:
    """Return the setting's flag for an unknown flag of a verb, or None.

    `--lr=0.1` becomes `--config.optim.lr=0.1`. The name may be a setting's path, its last part if
    unique or in `train`, or its name in another trainer. If the setting does not accept the value,
    return the command that lists the accepted values.
    """
    known = sections.settings(schema, {})
    path = _by_name(schema, name, known)
    if path is None:
        return None
    return explain(path) if value is None else flag_or_explain(path, known[path], value)


def _renamed(path: str, best: str, known: Setting, value: Any, origin: Origin) -> str:
    """Return the flag or source line with the correct name and the same value."""
    suits = value is None or not (
        known.arms or flag_or_explain(best, known, value).startswith(EXPLAIN)
    )
    source = line_of(origin)
    for wrong, right in ((path, best), (path.rpartition(".")[2], best.rpartition(".")[2])):
        pattern = rf"(?<![\w]){re.escape(wrong)}(?![\w])"
        is_same_section = wrong == path or path.rpartition(".")[0] == best.rpartition(".")[0]
        if suits and is_same_section and re.search(pattern, source):
            return re.sub(pattern, right, source, count=1)
    if known.arms or value is None:
        return explain(best)
    if origin.kind == "file":  # a flag would not remove the wrong name from the file
        return f"write {best} instead of {path}" if suits else explain(best)
    return flag_or_explain(best, known, value)


def unknown_arm(arms: tuple[type, ...], path: str, value: Any, origin: Origin) -> Problem:
    """Return the problem of a name that no arm of a union has.

    `METHODS` of the first arm has the flags of methods that are settings of an arm, by name.
    """
    names = list(sections.by_name(arms))
    label = sections.join(path, sections.tag(arms[0]) or "")
    meant = SYNONYMS.get(str(value)) or nearest_word(str(value), names)
    method = getattr(arms[0], "METHODS", {}).get(str(value).lower().replace("-", "_"))
    fix = method or (flag(label, meant) if meant in names else explain(label))
    why = f"it must be one of {', '.join(names)}"
    if user_code.base_of(arms) is not None:
        why += f", or {user_code.FORM}"
    return _not_allowed(label, value, why, origin, fix)
