"""Problems of a config: all are reported in one error, each with the probable setting and a fix."""

import dataclasses
import linecache
import re
import shlex
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.provenance import DEFAULT, Origin
from jaxlm.core.quoting import without_secret
from jaxlm.core.schema import Setting, by_name, chosen, fields, settings, tag
from jaxlm.core.spelling import SYNONYMS, distance, has_same_numbers, nearest, notations
from jaxlm.core.values import brief, choices, is_within, read, requirement, show

EXPLAIN = "jaxlm config explain"
MAX_LINES = 8
MAX_LETTERS = 160


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem: what, why, origin of the value, and a fix to paste."""

    what: str
    why: str
    origin: Origin
    fix: str = ""

    @property
    def line(self) -> str:
        """The problem without its fix, in one line."""
        text = f"{self.origin}: {self.what}; {self.why}"
        return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."


class UnknownSetting(ConfigError, AttributeError, KeyError):
    """An unknown setting in a config file; also the error that `hasattr` and `get` expect."""


def error(
    problems: list[Problem], fix: str = "", kind: type[ConfigError] = ConfigError
) -> ConfigError:
    """Return one error for all problems, in at most eight lines; `fix` corrects all of them."""
    if len(problems) == 1:
        only = problems[0]
        alternatives = "\n" in only.fix
        return kind(
            only.what,
            where=str(only.origin),
            why=only.why,
            fix=only.fix if alternatives or not fix else fix,
        )
    unexplained = [each.fix for each in problems if each.fix.startswith(EXPLAIN)]
    if not fix and unexplained:
        fix = explain(*dict.fromkeys(each.removeprefix(EXPLAIN).strip() for each in unexplained))
    fix = fix or problems[0].fix.partition("\n")[0]
    room = MAX_LINES - 2 - bool(fix)
    lines = [problem.line for problem in problems]
    if len(lines) > room:
        lines = [*lines[: room - 1], f"and {len(lines) - room + 1} more"]
    return kind(
        f"{len(problems)} settings are wrong",
        where=", ".join(dict.fromkeys(problem.origin.place for problem in problems)),
        why="\n".join(lines),
        fix=fix,
    )


def flag(path: str, value: Any) -> str:
    """Return the flag that sets a value."""
    return shlex.quote(f"--config.{path}={show(value)}")


def line_of(origin: Origin) -> str:
    """Return the source line of an origin, or an empty text."""
    name, _, number = origin.where.rpartition(":")
    linecache.checkcache(name)
    return (
        linecache.getline(name, int(number)).strip()
        if origin.kind == "file" and number.isdecimal()
        else ""
    )


def explain(*paths: str) -> str:
    """Return the command that lists types, ranges and choices of settings."""
    return " ".join([EXPLAIN, *filter(None, paths)])


def flag_or_explain(path: str, known: Setting, value: Any) -> str:
    """Return the flag that sets the same value in a notation that the setting accepts.

    If there is none, return the command that lists the accepted values: no other value is
    suggested.
    """
    try:
        return flag(path, same(known, value))
    except ValueError:
        return explain(path)


def wrong_value(path: str, known: Setting, value: Any, origin: Origin, why: str = "") -> Problem:
    """Return the problem of a value of the wrong type or out of range.

    Args:
      path: dotted path of the setting.
      known: the setting.
      value: the value.
      origin: origin of the value.
      why: the reason; by default the type and range of the setting.
    """
    reason = why or f"it must be {requirement(known)}"
    return Problem(
        f"{path} = {brief(value)} is not allowed",
        f"{reason} ({known.doc})" if known.doc else reason,
        origin,
        flag_or_explain(path, known, value),
    )


def secret(path: str, value: Any, origin: Origin) -> Problem:
    """Return the problem of a URL with a secret; the fix is the URL without the secret."""
    return Problem(
        f"{path} contains a password or a key",
        "config.json and command.sh of the run would store it; pass it to the tool that reads the "
        "URL by its environment variable or file",
        origin,
        without_secret(flag(path, value)),
    )


def same(known: Setting, value: Any) -> Any:
    """Return the value that `value` denotes in another notation.

    `2k` is 2000, `"32"` is 32, `fp16` is `float16`; a misspelled choice is the nearest choice.

    Raises:
      ValueError: if there is none, or it is out of range.
    """
    texts = [show(value)]
    if isinstance(value, str):
        texts += notations(value, known.unit)
        if words := choices(known.kind):
            items = [item.strip() for item in value.split(",")]
            texts.append(
                ",".join(SYNONYMS.get(item) or nearest(item, words) or item for item in items)
            )
    for text in texts:
        try:
            result = read(known.kind, text)
        except ValueError:
            continue
        if is_within(known, result):
            return result
    raise ValueError(f"{brief(value)} has no other notation")


def unknown(
    schema: type,
    raw: dict[str, Any],
    path: str,
    value: Any,
    origin: Origin,
    origins: dict[str, Origin],
) -> Problem:
    """Return the problem of an unknown setting, with the setting that was probably meant.

    Candidates are the setting with this name in another trainer (`ALIASES` of the schema), a
    setting with a similar path, and settings of this name in another section. The fix keeps the
    value. Without a candidate, the settings of the section are listed.

    Args:
      schema: class of the config.
      raw: the config as nested dicts.
      path: dotted path of the unknown setting.
      value: its value; None if not known.
      origin: origin of the value.
      origins: origins of all values of the config by path.
    """
    present = settings(schema, raw)
    section, _, leaf = path.rpartition(".")
    union = present.get(section)
    if union and (owners := _owners(union.arms, leaf)):
        label = f"{section}.{tag(union.arms[0])}"
        arm = chosen(union.arms, value_at(raw, section, {}), union.default)
        now = next((name for name, each in by_name(union.arms).items() if each is arm), None)
        return Problem(
            f"{path} is not a setting here",
            f"it belongs to another arm of {section}: {label} is {now}, "
            f"{' and '.join(owners)} would have it",
            origin,
            "\n".join(f"--config.{label}={owner}" for owner in owners[:3]),
        )
    similar = {
        name: known
        for name, known in present.items()
        if value is None or bool(known.arms) == isinstance(value, dict)
    }
    ranked = rank(path, similar, aliases(schema))
    if ranked:
        best = ranked[0]
        return Problem(
            f"unknown setting {path}",
            f"the nearest is {best}{_described(present[best], raw, best, origins)}",
            origin,
            _renamed(path, best, present[best], value, origin),
        )
    elsewhere = settings(schema, raw, every_arm=True)
    if path in elsewhere:
        return Problem(
            f"{path} is not a setting here",
            f"it belongs to another arm of {section}: {elsewhere[path].doc}",
            origin,
            explain(path),
        )
    section = next((name for name in _parents(path) if name in present), "")
    names = [
        name.removeprefix(f"{section}.")
        for name in present
        if name.startswith(section) and name.rpartition(".")[0] == section
    ]
    return Problem(
        f"unknown setting {path}",
        f"{section or 'the config'} has {', '.join(names)}",
        origin,
        explain(section or root_name(schema)),
    )


def aliases(schema: type) -> dict[str, str]:
    """Return the settings of a schema by their names in other trainers."""
    return getattr(schema, "ALIASES", {})


def root_name(schema: type) -> str:
    """Return the name of a whole config in `jaxlm config explain`; empty for a run."""
    return getattr(schema, "ROOT", "")


def _described(known: Setting, raw: dict[str, Any], path: str, origins: dict[str, Origin]) -> str:
    """Return doc, type and value of a setting, as a clause after its name."""
    doc = f": {known.doc}, {requirement(known)}" if known.doc else ""
    if known.arms:
        return doc
    return f"{doc}, now {show(value_at(raw, path, known.default))} ({origins.get(path, DEFAULT)})"


def _owners(arms: tuple[type, ...], leaf: str) -> list[str]:
    """Return the names of the arms that have a setting of this name."""
    return [name for name, arm in by_name(arms).items() if leaf in fields(arm)] if arms else []


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


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
    most = max(1, len(leaf) // 3 + 1)
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


def for_flag(schema: type, name: str, value: str | None) -> str | None:
    """Return the setting's flag for an unknown flag of a verb, or None.

    `--lr=0.1` becomes `--config.optim.lr=0.1`. The name may be a setting's path, its last part if
    unique, or its name in another trainer. If the setting does not accept the value, return the
    command that lists the accepted values.
    """
    known = {path: each for path, each in settings(schema, {}).items() if not each.arms}
    folded = name.replace("-", "_")
    paths = [path for path in known if folded in (path, path.rpartition(".")[2])]
    path = paths[0] if len(paths) == 1 else aliases(schema).get(folded)
    if path not in known:
        return None
    return explain(path) if value is None else flag_or_explain(path, known[path], value)


def _renamed(path: str, best: str, known: Setting, value: Any, origin: Origin) -> str:
    """Return the flag or source line with the correct name and the same value."""
    if known.arms or value is None:
        suits = known.arms == () or value is None
    else:
        suits = not flag_or_explain(best, known, value).startswith(EXPLAIN)
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
