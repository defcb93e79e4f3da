"""Settings of the rewards of reinforcement learning. Free of JAX.

Example:
  >>> [term(text) for text in ("number", "format:think/answer=0.1")]
  [Term(label='number', name='number', argument='', weight=1.0), Term(label='format:think/answer', \
name='format', argument='think/answer', weight=0.1)]
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxlm.core import user_code
from jaxlm.core.config import setting
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import nearest_word
from jaxlm.rl import verifiers

# Rewards that run the completion, and the field of `info` with its tests, else the answer has them.
PROGRAMS = {"python": "tests", "doctest": "doctest"}
PATTERN = "regex"
NAMES = (*verifiers.VERIFIERS, PATTERN, *PROGRAMS)
NEED_ANSWER = (*verifiers.NEED_ANSWER, PATTERN, *PROGRAMS)
FUNCTIONS_FLAG = "--config.reward.functions="
_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


class Term(NamedTuple):
    """A reward and its weight in the total; `label` is its name in records."""

    label: str
    name: str
    argument: str
    weight: float

    @property
    def is_file(self) -> bool:
        """True for a function of a file, which `argument` names."""
        return self.name.endswith(".py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Functions that score a completion; the reward is their weighted sum."""

    functions: tuple[str, ...] = setting(
        (),
        "NAME=WEIGHT of each reward: exact, number, choice, json, regex:PATTERN, format:TAGS, "
        "length:TOKENS, ended, python, doctest, or FILE.py:FUNCTION; the weight may be left out "
        "(1)",
    )
    sources: tuple[str, ...] = setting(
        (),
        "FILE=DIGEST of each file of functions, which are part of the run's identity",
        derived_from="functions",
    )
    seconds: float = setting(5.0, "time limit of a call of a function or a program", above=0)
    bytes: int = setting(
        2**29, "memory limit of a process that computes rewards", unit="bytes", low=2**26
    )
    workers: int | Literal["auto"] = setting(
        "auto", "calls at a time; auto is one for each processor, and at most 8", low=1
    )
    tolerance: float = setting(
        0.05,
        "share of the samples of a rollout or an evaluation that may have no score; more end the "
        "run",
        low=0.0,
        high=1.0,
    )
    sandbox: Literal["auto", "process"] = setting(
        "auto",
        "isolation of programs that the model writes: auto needs namespaces of the kernel, where a "
        "program has no files of yours; process permits limits alone where there are none",
    )

    @property
    def terms(self) -> tuple[Term, ...]:
        """The rewards of `functions`. Raises ValueError if one has no weight."""
        return tuple(map(term, self.functions))

    def unanswered(self, answer: str | None, info: Any) -> str:
        """Return the label of a reward that a prompt has nothing to compare with; empty if none."""
        fields = info if answer is None and isinstance(info, dict) else {}
        for each in self.terms:
            is_known = answer is not None or PROGRAMS.get(each.name) in fields
            if each.name in NEED_ANSWER and not is_known:
                return each.label
        return ""

    @property
    def recorded_files(self) -> Iterator[tuple[str, str]]:
        """Each file of functions with its digest."""
        for text in self.sources:
            name, _, digest = text.rpartition("=")
            yield name, digest

    @staticmethod
    def files_without_digest(raw: Mapping[str, Any]) -> list[str]:
        """Return the files of a section of a config.json that have no digest there."""
        recorded = {str(text).rpartition("=")[0] for text in raw.get("sources") or ()}
        files = []
        for text in raw.get("functions") or ():
            with contextlib.suppress(ValueError):
                each = term(str(text))
                files += [each.name] if each.is_file and each.name not in recorded else []
        return files

    def derived(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield (setting, value, reason): digests of files that the user names."""
        recorded, sources = dict(self.recorded_files), []
        with contextlib.suppress(ValueError, ConfigError):  # which `problems` reports
            for name in dict.fromkeys(each.name for each in self.terms if each.is_file):
                digest = recorded.get(name) or user_code.named_file(name, "reward.functions").digest
                sources.append(f"{name}={digest}")
        if tuple(sources) != self.sources:
            yield "sources", tuple(sources), "digests of the files of reward.functions"

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield rewards that do not exist, and weights and arguments that are wrong."""
        places: dict[str, int] = {}
        recorded = dict(self.recorded_files)
        for index, text in enumerate(self.functions):
            try:
                each = term(text)
            except ValueError as error:
                fix = self._with(index, f"{text.partition('=')[0]}=1")
                yield "functions", f"{text}: {error}", fix
                continue
            if each.is_file and each.name in recorded:
                pass
            elif each.is_file:
                try:
                    user_code.named_file(each.name, text)
                except ConfigError as error:
                    yield "functions", f"{error.what}: {error.why}", error.fix
            elif each.name not in NAMES:
                names = f"{', '.join(NAMES)}, and FILE.py:FUNCTION"
                meant = nearest_word(each.name, NAMES) or "exact"
                yield (
                    "functions",
                    f"there is no reward {each.name}; the names are {names}",
                    self._with(index, f"{meant}={each.weight:g}"),
                )
            elif wrong := verifiers.problem(each.name, each.argument):
                fix = self._with(index, f"{wrong[1]}={each.weight:g}")
                yield "functions", f"{text}: {wrong[0]}", fix
            if (first := places.setdefault(each.label, index)) != index:
                yield "functions", f"{each.label} is named twice", self._with(first)

    def _with(self, index: int, *terms: str) -> str:
        """Return the flag that has these terms in place of one, and all others as they are."""
        every = *self.functions[:index], *terms, *self.functions[index + 1 :]
        return f"{FUNCTIONS_FLAG}{','.join(every)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def term(text: str) -> Term:
    """Return the reward that `NAME[:ARGUMENT][=WEIGHT]` names. Raises ValueError for a weight."""
    label, equals, number = text.rpartition("=")
    if label.partition(":")[0] == PATTERN and not _is_number(number):
        label, equals = "", ""  # the pattern has a =
    weight = 1.0
    if equals:
        try:
            weight = float(number)
        except ValueError as error:
            raise ValueError(f"the weight {number!r} is no number") from error
        if not math.isfinite(weight) or weight == 0:
            raise ValueError(f"the weight {number} is 0 or not finite")
    else:
        label = text
    if file := _FILE.fullmatch(label):
        return Term(f"{Path(file[1]).name}:{file[2]}", file[1], file[2], weight)
    name, _, argument = label.partition(":")
    return Term(label, name, argument, weight)
