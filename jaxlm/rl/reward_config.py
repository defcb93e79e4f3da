"""Settings of the rewards of reinforcement learning. Free of JAX.

Example:
  >>> [term(text) for text in ("number", "format:think/answer=0.1")]
  [Term(label='number', name='number', argument='', weight=1.0), Term(label='format:think/answer', \
name='format', argument='think/answer', weight=0.1)]
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.core.config import setting
from jaxlm.core.nearest import nearest_word
from jaxlm.rl import verifiers


class Term(NamedTuple):
    """A reward and its weight in the total; `label` is its name in records."""

    label: str
    name: str
    argument: str
    weight: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Functions that score a completion; the reward is their weighted sum."""

    functions: tuple[str, ...] = setting(
        (),
        "NAME=WEIGHT of each reward: exact, number, choice, json, format:TAGS, length:TOKENS, "
        "ended; the weight may be left out (1)",
    )
    tolerance: float = setting(
        0.05,
        "share of the samples of a step that may have no score; more end the run",
        low=0.0,
        high=1.0,
    )

    @property
    def terms(self) -> tuple[Term, ...]:
        """The rewards of `functions`. Raises ValueError if one has no weight."""
        return tuple(map(term, self.functions))

    @property
    def needs_answer(self) -> tuple[str, ...]:
        """Labels of the rewards that compare with the answer of a prompt."""
        return tuple(each.label for each in self.terms if each.name in verifiers.NEED_ANSWER)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield rewards that do not exist, and weights and arguments that are wrong."""
        labels = set()
        for text in self.functions:
            flag = "--config.reward.functions="
            try:
                each = term(text)
            except ValueError as error:
                yield "functions", f"{text}: {error}", f"{flag}{text.partition('=')[0]}=1"
                continue
            if each.name not in verifiers.VERIFIERS:
                names = ", ".join(verifiers.VERIFIERS)
                meant = nearest_word(each.name, verifiers.VERIFIERS) or "exact"
                yield (
                    "functions",
                    f"there is no reward {each.name}; the names are {names}",
                    (f"{flag}{meant}={each.weight:g}"),
                )
            elif wrong := verifiers.problem(each.name, each.argument):
                yield "functions", f"{text}: {wrong[0]}", f"{flag}{wrong[1]}={each.weight:g}"
            if each.label in labels:
                yield "functions", f"{each.label} is named twice", f"{flag}{text}"
            labels.add(each.label)


def term(text: str) -> Term:
    """Return the reward that `NAME[:ARGUMENT][=WEIGHT]` names. Raises ValueError for a weight."""
    label, equals, number = text.rpartition("=")
    weight = 1.0
    if equals:
        try:
            weight = float(number)
        except ValueError as error:
            raise ValueError(f"the weight {number!r} is no number") from error
        if not math.isfinite(weight) or weight == 0:
            raise ValueError(f"the weight {number} is 0 or not finite")
    name, _, argument = (label if equals else text).partition(":")
    return Term(label if equals else text, name, argument, weight)
