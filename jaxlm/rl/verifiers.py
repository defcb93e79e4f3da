"""Rewards that compare a completion with the answer of its prompt, without running anything.

Each is a pure function of a sample. A verifier gives 1 or 0; a penalty gives a value from -1 to 0,
so that an empty completion earns nothing. What cannot be scored raises Unscorable.

Example:
  >>> right = Sample("60 + 12 =", "it is 72.", "#### 72", None, 0, "eos_token", 4)
  >>> number(right, ""), exact(right, ""), ended(right, "")
  (1.0, 0.0, 0.0)
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxlm.evals import verify

TAGS = "think/answer"
_CHOICE = re.compile(
    r"(?:.*\b(?:answer|choice)(?: is|:)\s*)?\(?([A-Z])\)?[.)]?", re.IGNORECASE | re.DOTALL
)
_ANSWER = re.compile(r"\(?([A-Za-z])\)?\.?")
_TAG = re.compile(r"[A-Za-z]\w*(?:/[A-Za-z]\w*)*")


class Sample(NamedTuple):
    """A completion of a prompt, as rewards receive it.

    Args:
      prompt: text of the prompt.
      completion: text that was drawn, without the token that ended it.
      answer: reference of the prompt; None without one.
      info: any further field of the prompt, as JSON.
      seed: seed of a reward that draws.
      reason: `eos_token`, or `length` if the limit of tokens ended it.
      tokens: number of tokens drawn.
    """

    prompt: str
    completion: str
    answer: str | None
    info: Any
    seed: int
    reason: Literal["eos_token", "length"]
    tokens: int


class Unscorable(Exception):
    """A sample has no score; the text is the reason."""


Verifier = Callable[[Sample, str], float]


def exact(sample: Sample, argument: str) -> float:
    """Return 1 if the completion is the answer, without white space around both."""
    return float(sample.completion.strip() == _answer(sample).strip())


def number(sample: Sample, argument: str) -> float:
    """Return 1 if the last number, or the first after `####`, is that of the answer."""
    if verify.last_number(_answer(sample)) is None:
        raise Unscorable("the answer has no number")
    return float(verify.is_match("number", sample.completion, _answer(sample)))


def choice(sample: Sample, argument: str) -> float:
    """Return 1 if the last line is the answer's letter, or ends with it after "answer is".

    A line with several letters earns nothing.
    """
    answer = _ANSWER.fullmatch(_answer(sample).strip())
    if answer is None:
        raise Unscorable("the answer is no letter")
    lines = sample.completion.strip().splitlines()
    chosen = _CHOICE.fullmatch(lines[-1].strip()) if lines else None
    return float(chosen is not None and chosen[1].upper() == answer[1].upper())


def json_value(sample: Sample, argument: str) -> float:
    """Return 1 if the completion is JSON that equals the answer; true is not 1."""
    try:
        expected = json.loads(_answer(sample))
    except (ValueError, RecursionError) as error:
        raise Unscorable("the answer is no JSON") from error
    try:
        return float(_same(json.loads(sample.completion), expected))
    except (ValueError, RecursionError):
        return 0.0


def form(sample: Sample, argument: str) -> float:
    """Return 1 if the completion is one part in each tag, in order, with words or digits in it.

    The argument names the tags, such as `think/answer`.
    """
    parts = [rf"<{name}>(.*?)</{name}>" for name in (argument or TAGS).split("/")]
    match = re.fullmatch(r"\s*" + r"\s*".join(parts) + r"\s*", sample.completion, re.DOTALL)
    texts = match.groups() if match else ("",)
    return float(all(re.search(r"\w", text) and "<" not in text for text in texts))


def length(sample: Sample, argument: str) -> float:
    """Return 0 up to the tokens of the argument, then falling to -1 at twice as many."""
    limit = int(argument)
    return max(min(limit - sample.tokens, 0) / limit, -1.0)


def ended(sample: Sample, argument: str) -> float:
    """Return -1 if the limit of tokens ended the completion, else 0."""
    return -1.0 if sample.reason == "length" else 0.0


VERIFIERS: Mapping[str, Verifier] = {
    "exact": exact,
    "number": number,
    "choice": choice,
    "json": json_value,
    "format": form,
    "length": length,
    "ended": ended,
}
NEED_ANSWER = ("exact", "number", "choice", "json")


def problem(name: str, argument: str) -> tuple[str, str] | None:
    """Return why the argument of a verifier is wrong, and one that is right; None if it is."""
    if name == "length":
        is_right = argument.isascii() and argument.isdecimal() and int(argument[:9]) > 0
        return None if is_right else ("length needs a number of tokens", "length:256")
    if name == "format":
        is_right = not argument or _TAG.fullmatch(argument) is not None
        return None if is_right else ("its tags are names with / between", f"format:{TAGS}")
    if name == "regex":
        try:
            re.compile(argument)
        except re.error as error:
            return f"its pattern is wrong: {error}", "regex"
        return None
    return (f"{name} has no argument", name) if argument else None


def _answer(sample: Sample) -> str:
    if sample.answer is None:
        raise Unscorable("the prompt has no answer")
    return sample.answer


def _same(value: Any, expected: Any) -> bool:
    """Return whether two values of JSON are equal; NaN equals nothing."""
    if isinstance(expected, dict) and isinstance(value, dict):
        names = value.keys() == expected.keys()
        return names and all(_same(value[name], expected[name]) for name in expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    is_nan = isinstance(value, float) and math.isnan(value)
    return not is_nan and bool(value == expected)
