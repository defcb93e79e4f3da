"""What is wrong with a config: each problem said once, all of them in one error, the right setting named."""

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
MOST_LINES = 8
MOST_LETTERS = 160


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what, why, who did it, and what to paste."""

    what: str
    why: str
    origin: Origin
    fix: str = ""

    @property
    def line(self) -> str:
        """All of it but the fix."""
        text = f"{self.origin}: {self.what}; {self.why}"
        return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 3]}..."


class UnknownSetting(ConfigError, AttributeError, KeyError):
    """A setting that does not exist, met in a config file; also what `hasattr` and `get` expect."""


def error(
    problems: list[Problem], fix: str = "", kind: type[ConfigError] = ConfigError
) -> ConfigError:
    """One error that holds every problem, in at most eight lines; `fix` mends them together, else each says its own."""
    if len(problems) == 1:
        only = problems[0]
        alternatives = "\n" in only.fix
        return kind(
            only.what,
            where=str(only.origin),
            why=only.why,
            fix=only.fix if alternatives or not fix else fix,
        )
    unsaid = [each.fix for each in problems if each.fix.startswith(EXPLAIN)]
    if not fix and unsaid:
        fix = explain(*dict.fromkeys(each.removeprefix(EXPLAIN).strip() for each in unsaid))
    fix = fix or problems[0].fix.partition("\n")[0]
    room = MOST_LINES - 2 - bool(fix)
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
    """The command line's words that set a value."""
    return shlex.quote(f"--config.{path}={show(value)}")


def line_of(origin: Origin) -> str:
    """The source line that an origin names, or nothing."""
    name, _, number = origin.where.rpartition(":")
    linecache.checkcache(name)
    return (
        linecache.getline(name, int(number)).strip()
        if origin.kind == "file" and number.isdecimal()
        else ""
    )


def explain(*paths: str) -> str:
    """Return the command that lists what is known of settings: types, ranges, choices."""
    return " ".join([EXPLAIN, *filter(None, paths)])


def flag_or_explain(path: str, known: Setting, value: Any) -> str:
    """Return the flag that sets the same value in a notation that the setting takes.

    If there is none, return the command that lists what the setting takes: no other value is
    suggested.
    """
    try:
        return flag(path, same(known, value))
    except ValueError:
        return explain(path)


def wrong_value(path: str, known: Setting, value: Any, origin: Origin, why: str = "") -> Problem:
    """Describe a value of another type, or outside its range."""
    reason = why or f"it must be {requirement(known)}"
    return Problem(
        f"{path} = {brief(value)} is not allowed",
        f"{reason} ({known.doc})" if known.doc else reason,
        origin,
        flag_or_explain(path, known, value),
    )


def secret(path: str, value: Any, origin: Origin) -> Problem:
    """A URL with a name, a password or a key in it; the fix is the URL without."""
    return Problem(
        f"{path} holds a password or a key",
        "config.json and command.sh of the run would keep it; give it to the tool that reads the URL, as its environment variable or file",
        origin,
        without_secret(flag(path, value)),
    )


def same(known: Setting, value: Any) -> Any:
    """Return the value of a setting that means what `value` says in another notation.

    `2k` is 2000, `"32"` is 32, `fp16` is `float16`; a misspelt choice is the one that it is a slip
    of. A value outside the range, or of another kind, has no such value.

    Raises:
      ValueError: if there is none.
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
            found = read(known.kind, text)
        except ValueError:
            continue
        if is_within(known, found):
            return found
    raise ValueError(f"{brief(value)} has no other notation")


def unknown(
    schema: type,
    raw: dict[str, Any],
    path: str,
    value: Any,
    origin: Origin,
    origins: dict[str, Origin],
) -> Problem:
    """Describe a setting that does not exist, and name the one that was probably meant.

    That is the setting with this name in another trainer (`ALIASES` of the schema), or one slip of
    the fingers away, or with the same last name in another section. The fix keeps the value. If
    nothing is near, what there is is listed. `value` is None if it is not known.
    """
    present = settings(schema, raw)
    section, _, leaf = path.rpartition(".")
    union = present.get(section)
    if union and (owners := _owners(union.arms, leaf)):
        label = f"{section}.{tag(union.arms[0])}"
        own = chosen(union.arms, at(raw, section, {}), union.default)
        now = next((name for name, arm in by_name(union.arms).items() if arm is own), None)
        return Problem(
            f"{path} is not a setting here",
            f"it belongs to another arm of {section}: {label} is {now}, {' and '.join(owners)} would have it",
            origin,
            "\n".join(f"--config.{label}={owner}" for owner in owners[:3]),
        )
    alike = {
        name: known
        for name, known in present.items()
        if value is None or bool(known.arms) == isinstance(value, dict)
    }
    ranked = rank(path, alike, aliases(schema))
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
    """Return the names that other trainers use for settings of a schema, and the settings."""
    return getattr(schema, "ALIASES", {})


def root_name(schema: type) -> str:
    """Return what `jaxlm config explain` calls a whole config: nothing for a run's."""
    return getattr(schema, "ROOT", "")


def _described(known: Setting, raw: dict[str, Any], path: str, origins: dict[str, Origin]) -> str:
    """Return the doc, the type and the value of a setting, as a clause that follows its name."""
    doc = f": {known.doc}, {requirement(known)}" if known.doc else ""
    if known.arms:
        return doc
    return f"{doc}, now {show(at(raw, path, known.default))} ({origins.get(path, DEFAULT)})"


def _owners(arms: tuple[type, ...], leaf: str) -> list[str]:
    """The names of the arms that have a setting of this name."""
    return [name for name, arm in by_name(arms).items() if leaf in fields(arm)] if arms else []


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def at(raw: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of nested dicts."""
    for name in path.split("."):
        if not isinstance(raw, dict) or name not in raw:
            return default
        raw = raw[name]
    return raw


def rank(path: str, known: dict[str, Setting], others: dict[str, str]) -> list[str]:
    """Return the settings that `path` may mean, likeliest first; `others` are names elsewhere."""
    section, _, leaf = path.rpartition(".")
    alias = others.get(leaf.lower().replace("-", "_"), "")
    most = max(1, len(leaf) // 3 + 1)
    scores = {}
    for name in known:
        their_section, _, their_leaf = name.rpartition(".")
        if leaf == their_leaf:
            scores[name] = 1.5 + distance(section, their_section) / 100
        is_slip = abs(len(path) - len(name)) <= most and has_same_numbers(path, name)
        if is_slip and (slips := distance(path, name)) <= most:
            scores[name] = min(scores.get(name, 99.0), float(slips))
    if alias in known and not scores:
        return [alias]
    return sorted(scores, key=lambda name: scores[name])


def for_flag(schema: type, name: str, value: str | None) -> str | None:
    """Return the flag of the setting that a verb's unknown flag names, or None.

    `--lr=0.1` is `--config.optim.lr=0.1`: the setting's path, its last name if no other setting has
    it or if it is one of `train`, or its name in another trainer. If the value does not suit the
    setting, what suits it is listed instead.
    """
    known = {path: each for path, each in settings(schema, {}).items() if not each.arms}
    folded = name.replace("-", "_")
    paths = [path for path in known if folded in (path, path.rpartition(".")[2])]
    if f"train.{folded}" in paths:
        paths = [f"train.{folded}"]
    path = paths[0] if len(paths) == 1 else aliases(schema).get(folded)
    if path not in known:
        return None
    return explain(path) if value is None else flag_or_explain(path, known[path], value)


def _renamed(path: str, best: str, known: Setting, value: Any, origin: Origin) -> str:
    """Return what to paste: the flag or the source line with the right name and the same value."""
    if known.arms or value is None:
        suits = known.arms == () or value is None
    else:
        suits = not flag_or_explain(best, known, value).startswith(EXPLAIN)
    source = line_of(origin)
    for wrong, right in ((path, best), (path.rpartition(".")[2], best.rpartition(".")[2])):
        pattern = rf"(?<![\w]){re.escape(wrong)}(?![\w])"
        is_beside = wrong == path or path.rpartition(".")[0] == best.rpartition(".")[0]
        if suits and is_beside and re.search(pattern, source):
            return re.sub(pattern, right, source, count=1)
    if known.arms or value is None:
        return explain(best)
    if origin.kind == "file":  # a flag would leave the wrong name in the file
        return f"write {best} in place of {path}" if suits else explain(best)
    return flag_or_explain(best, known, value)
