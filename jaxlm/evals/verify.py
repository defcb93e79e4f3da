"""Comparison of answers with references, as text or as numbers, without evaluating anything.

Example:
  >>> last_number("2 * 600.25 = 1200.5 #### $1,200.50"), last_number("about 1e5")
  (Decimal('1200.50'), None)
  >>> is_match("number", "so it is 72.0", "60 + 12 = 72 #### 72")
  True
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

Check = Literal["exact", "number"]

MAX_DIGITS = 4300  # of a number, Python's own limit for the conversion of text to int
MARK = "####"  # in front of the final answer in GSM8K
# A longest run of letters, digits, commas and periods. A minus after one of these, or after a
# bracket, subtracts.
_WORD = re.compile(
    r"(?:(?<![\w.,)\]}])(?P<minus>[-\u2212])\$?)?"
    r"(?P<word>[\w.,]+(?:(?<=[0-9.][eE])[-+][\w.,]+)?)"
)
_NUMBER = re.compile(r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?|\.[0-9]+")


class Score(NamedTuple):
    """Shares of answers that equal their reference, and that ended before the limit of tokens.

    `standard_error` is that of `exact_match`, over prompts; None for a single prompt.
    `marked_share` is the share with the mark of a final answer; None if no reference has one.
    """

    exact_match: float
    standard_error: float | None
    ended_share: float
    marked_share: float | None


def is_match(check: Check, answer: str, reference: str) -> bool:
    """Return if an answer equals its reference.

    Args:
      check: `exact` compares the texts without white space around them, `number` the values of
        `last_number`.
      answer: the answer.
      reference: the reference; without a number nothing equals it as a number.
    """
    if check == "exact":
        return answer.strip() == reference.strip()
    expected = last_number(reference)
    return expected is not None and last_number(answer) == expected


def last_number(text: str) -> Decimal | None:
    """Return the first number after the last `####`, else the last number; None without one.

    A number has ASCII digits, perhaps in groups of three with commas, and perhaps a decimal point
    and a minus. A word with anything else, such as 1e5, 12kg, 1,23 or 1.2.3, is no number.
    """
    _, mark, marked = text.rpartition(MARK)
    if mark and (numbers := _numbers(marked)):
        return numbers[0]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Decimal]:
    numbers = []
    for match in _WORD.finditer(text):
        word = match["word"].rstrip(".,").lstrip(",")
        digits = word.replace(",", "")
        if _NUMBER.fullmatch(word) and len(digits.replace(".", "")) <= MAX_DIGITS:
            numbers.append(Decimal(f"-{digits}" if match["minus"] else digits))
    return numbers


def last_turn(
    ids: Int[np.ndarray, "n"],
    weights: Float[np.ndarray, "n"],
    ends: Sequence[int],
    table: Sequence[bytes],
) -> tuple[int, str]:
    """Return the start and the text of the last trained turn; no text if nothing is trained.

    Args:
      ids: ids of a conversation.
      weights: weight of each.
      ends: ids that end a turn.
      table: bytes of each id.
    """
    trained = weights > 0
    while trained.any():
        stop = int(np.flatnonzero(trained)[-1]) + 1
        start = int(np.flatnonzero([True, *~trained[:stop]])[-1])
        borders = [int(place) + start for place in np.flatnonzero(np.isin(ids[start:stop], ends))]
        turns = list(zip([start, *(place + 1 for place in borders)], [*borders, stop], strict=True))
        # Control tokens and white space may follow the token that ends a turn.
        for begin, end in reversed(turns):
            text = b"".join(table[i] for i in ids[begin:end]).decode("utf-8", "replace")
            if text.strip():
                return begin, text
        trained = trained[:start]
    return 0, ""


def score(
    matches: Bool[np.ndarray, "P S"],
    ended: Bool[np.ndarray, "P S"],
    marked: Bool[np.ndarray, "P S"] | None = None,
) -> Score:
    """Return the score of S answers to each of P prompts.

    Answers to one prompt are not independent, so the standard error is that of the means by prompt.
    """
    means = matches.mean(axis=1)
    error = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    marked_share = None if marked is None else float(marked.mean())
    return Score(float(means.mean()), error, float(ended.mean()), marked_share)
