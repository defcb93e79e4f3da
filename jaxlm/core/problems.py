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
from jaxlm.core.spelling import distance
from jaxlm.core.values import brief, check, describe, is_within, read, requirement, show

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
    return (
        linecache.getline(name, int(number)).strip()
        if origin.kind == "file" and number.isdecimal()
        else ""
    )


def wrong_value(path: str, known: Setting, value: Any, origin: Origin, why: str = "") -> Problem:
    """A value of another type, or outside its range; the fix is the nearest value that is neither."""
    reason = why or f"it must be {requirement(known)}"
    return Problem(
        f"{path} = {brief(value)} is not allowed",
        f"{reason} ({known.doc})" if known.doc else reason,
        origin,
        flag(path, acceptable(known, value)),
    )


def secret(path: str, value: Any, origin: Origin) -> Problem:
    """A URL with a name, a password or a key in it; the fix is the URL without."""
    return Problem(
        f"{path} holds a password or a key",
        "config.json and command.sh of the run would keep it; give it to the tool that reads the URL, as its environment variable or file",
        origin,
        without_secret(flag(path, value)),
    )


def acceptable(known: Setting, value: Any) -> Any:
    """A value that a setting takes and that is near the one given, or else its default."""
    attempts: list[Any] = [value]
    if isinstance(value, str):
        choices = re.findall(r"[\w.+-]+", describe(known.kind))
        attempts += sorted(choices, key=lambda choice: distance(value, choice))[:1]
        attempts += [value.strip(), value.strip("'\"").replace(",", "")]
    elif isinstance(value, float) and value == value and abs(value) < 2**63:
        attempts.append(round(value))
    attempts += [
        limit
        for limit in (known.low, known.high)
        if limit is not None and _is_beyond(value, limit, known)
    ]
    for attempt in attempts:
        for reader in (check, read):
            try:
                found = reader(known.kind, attempt if reader is check else show(attempt))
            except ValueError:
                continue
            if is_within(known, found):
                return found
    return known.default


def _is_beyond(value: Any, limit: float, known: Setting) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (value < limit if limit == known.low else value > limit)


def unknown(
    schema: type,
    raw: dict[str, Any],
    path: str,
    value: Any,
    origin: Origin,
    origins: dict[str, Origin],
) -> Problem:
    """A setting that does not exist, with the one that was probably meant.

    `value` is None where it is not known. Nearest means: one slip of the fingers away, or else the same name in another section, or else the
    words of the name in its doc (`learning_rate` is `optim.lr`, the peak learning rate).
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
    ranked = rank(path, alike)
    if not ranked:
        elsewhere = {
            name: known
            for name, known in settings(schema, raw, every_arm=True).items()
            if name not in present
        }
        if path in elsewhere:
            section = path.rpartition(".")[0]
            return Problem(
                f"{path} is not a setting here",
                f"it belongs to another arm of {section}: {elsewhere[path].doc}",
                origin,
                f"jaxlm config explain {path}",
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
            f"jaxlm config explain {section}".strip(),
        )
    best = ranked[0]
    known = present[best]
    now = (
        f", now {show(at(raw, best, known.default))} ({origins.get(best, DEFAULT)})"
        if not known.arms
        else ""
    )
    why = (
        f"the nearest is {best}: {known.doc}, {requirement(known)}{now}"
        if known.doc
        else f"the nearest is {best}{now}"
    )
    return Problem(
        f"unknown setting {path}", why, origin, _renamed(path, best, known, value, origin)
    )


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


def rank(path: str, known: dict[str, Setting]) -> list[str]:
    """The settings that `path` may have meant, likeliest first."""
    section, _, leaf = path.rpartition(".")
    words = set(re.split(r"[_\s-]+", leaf.lower()))
    most = max(1, len(leaf) // 3 + 1)
    scores = {}
    for name, each in known.items():
        their_section, _, their_leaf = name.rpartition(".")
        score = 99.0
        if abs(len(path) - len(name)) <= most:  # it takes as many slips at least
            slips = distance(path, name)
            score = float(slips) if slips <= most else score
        if leaf == their_leaf:
            score = min(score, 1.5 + distance(section, their_section) / 100)
        if words <= set(re.findall(r"\w+", each.doc.lower())) and max(map(len, words)) > 3:
            # Of docs with these words, the shortest says little else: `lr` before `lr_scale`.
            score = min(score, 2.2 + (their_section != section) / 2 + len(each.doc) / 10_000)
        if score < 99:
            scores[name] = score
    return sorted(scores, key=lambda name: scores[name])


def _renamed(path: str, best: str, known: Setting, value: Any, origin: Origin) -> str:
    """What to paste: the flag with the right name, or the source line with the right name."""
    source = line_of(origin)
    for wrong, right in ((path, best), (path.rpartition(".")[2], best.rpartition(".")[2])):
        pattern = rf"(?<![\w]){re.escape(wrong)}(?![\w])"
        if (
            source
            and re.search(pattern, source)
            and (wrong == path or path.rpartition(".")[0] == best.rpartition(".")[0])
        ):
            return re.sub(pattern, right, source, count=1)
    if known.arms:
        return f"{best} instead of {path}"
    return flag(best, known.default if value is None else acceptable(known, value))
