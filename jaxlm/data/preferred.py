"""Answers that were compared or judged: pairs, answers with a label, and with labels of steps."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxlm.data import conversations
from jaxlm.data.conversations import (
    BAD_LABEL,
    BAD_MARGIN,
    EMPTY_TURN,
    EQUAL,
    NO_CHOICE,
    NO_MESSAGES,
    OTHER_FORM,
    OTHER_PROMPT,
    Conversation,
    Kind,
    LabeledStep,
    Rejected,
)

ONE_PAIR = 'one pair a line: {"prompt": "...", "chosen": "...", "rejected": "..."}'
ONE_LABEL = 'one answer a line: {"prompt": "...", "completion": "...", "label": true}'
ONE_PROCESS = (
    'one answer a line: {"prompt": "...", "steps": ["...", "..."], "labels": [true, false]}'
)

NEEDED = {"labeled": ("prompt", "completion"), "steps": ("prompt",)}
FORMS: dict[str, str] = {"pairs": ONE_PAIR, "labeled": ONE_LABEL, "steps": ONE_PROCESS}


def parse(record: Any, kind: Kind, roles: Sequence[str]) -> Conversation:
    """Return the chosen conversation of a pair with the rejected one, or one with its labels.

    Args:
      record: value of a line or row. `pairs`: `chosen` and `rejected`, texts or messages, `prompt`,
        and `margin`. Without a prompt, it is the common beginning of both. `labeled`: `prompt` and
        `completion`, as of the kind `completion`, and `label`, true or false. `steps`: `prompt`,
        `steps`, a list of texts, and `labels`, one for each; TRL's `completions` are steps too.
      kind: `pairs`, `labeled` or `steps`.
      roles: roles whose turns are scored.

    Raises:
      Rejected: if the record cannot be used.
    """
    if not isinstance(record, dict):
        raise Rejected(NO_MESSAGES, conversations.described(record), FORMS[kind])
    for name in NEEDED.get(kind, ()):
        if record.get(name) is None:
            raise conversations.no_field(record, name, FORMS[kind])
    if kind == "labeled":
        conversation = conversations.parse(record, "completion", roles)
        return dataclasses.replace(conversation, side=_side(record.get("label")))
    if kind == "steps":
        return _with_steps(record, roles)
    prompt, *answers = _split(record)
    chosen, rejected = (
        conversations.parse(
            {"prompt": prompt, "completion": answer, "tools": record.get("tools")},
            "completion",
            roles,
        )
        for answer in answers
    )
    if chosen.messages == rejected.messages:
        raise Rejected(EQUAL, "chosen and rejected are the same", ONE_PAIR)
    return dataclasses.replace(
        chosen,
        side=1,
        margin=_margin(record.get("margin")),
        rejected=dataclasses.replace(rejected, side=-1),
    )


def _with_steps(record: dict[str, Any], roles: Sequence[str]) -> Conversation:
    """Return the conversation of an answer whose steps have labels."""
    texts, labels = record.get("steps", record.get("completions")), record.get("labels")
    if texts is None or labels is None:
        missing = "steps" if texts is None else "labels"
        raise conversations.no_field(record, missing, ONE_PROCESS)
    if not (isinstance(texts, list) and all(isinstance(each, str) for each in texts)):
        raise Rejected(OTHER_FORM, "steps is no list of texts", ONE_PROCESS)
    if not isinstance(labels, list) or len(labels) != len(texts):
        raise Rejected(BAD_LABEL, f"{len(texts)} steps need a label each", ONE_PROCESS)
    if not all(each.strip() for each in texts) or not texts:
        raise Rejected(EMPTY_TURN, "a step is empty" if texts else "it has no step")
    steps = [LabeledStep(text, _side(label) > 0) for text, label in zip(texts, labels, strict=True)]
    answer = {**record, "completion": "\n".join(texts)}
    conversation = conversations.parse(answer, "completion", roles)
    side = 1 if all(each.is_right for each in steps) else -1
    return dataclasses.replace(conversation, side=side, steps=steps)


def _split(record: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a record."""
    prompt, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
    if record.get("choice") in ("tie", "skip"):  # of `jaxlm rate`
        raise Rejected(NO_CHOICE, f"its choice is {record['choice']}", ONE_PAIR)
    if chosen is None or rejected is None:
        missing = "chosen" if chosen is None else "rejected"
        is_labeled = "completion" in record and "label" in record
        fix = "--config.data.kind=labeled" if is_labeled else ONE_PAIR
        raise conversations.no_field(record, missing, fix)
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise Rejected(OTHER_FORM, "chosen and rejected are texts, or lists of messages", ONE_PAIR)
    if not isinstance(prompt, str | list | None):
        raise Rejected(OTHER_FORM, "the prompt is no text and no list of messages", ONE_PAIR)
    if isinstance(chosen, str):
        return (*_split_texts(chosen, rejected),) if prompt is None else (prompt, chosen, rejected)
    if prompt is not None and not (_has_prompt(chosen) or _has_prompt(rejected)):
        return prompt, chosen, rejected
    shared = _common(chosen, rejected)
    first, second = chosen[shared:], rejected[shared:]
    if not shared or _has_prompt(first) or _has_prompt(second):
        raise Rejected(OTHER_PROMPT, f"after {shared} turns, a turn of no answer differs", ONE_PAIR)
    if not (first and second):
        raise Rejected(EMPTY_TURN, "one of the conversations is the beginning of the other")
    if isinstance(prompt, str) and prompt not in map(_content, chosen[:shared]):
        raise Rejected(OTHER_PROMPT, "no turn of chosen is its prompt", ONE_PAIR)
    return chosen[:shared], first, second


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the common beginning of two texts, up to the white space before they differ."""
    shared = _common(chosen, rejected)
    if not shared:
        raise Rejected(OTHER_PROMPT, "it has no prompt, and both texts begin differently", ONE_PAIR)
    if shared < min(len(chosen), len(rejected)):
        while shared and not chosen[shared - 1].isspace():
            shared -= 1
        shared = len(chosen[:shared].rstrip()) or _common(chosen, rejected)
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal first elements."""
    size = min(len(one), len(other))
    return next((n for n in range(size) if one[n] != other[n]), size)


def _has_prompt(turns: Sequence[Any]) -> bool:
    """Return whether a conversation begins with a turn that is no answer."""
    first = turns[0] if turns else None
    role: Any = first.get("role", first.get("from")) if isinstance(first, dict) else "assistant"
    return conversations.SHAREGPT.get(role, role) not in ("assistant", "tool")


def _content(turn: Any) -> Any:
    return turn.get("content", turn.get("value")) if isinstance(turn, dict) else None


def _side(label: Any) -> int:
    if isinstance(label, bool) or (isinstance(label, int | float) and label in (0, 1)):
        return 1 if label else -1
    raise Rejected(BAD_LABEL, f"label is {label!r}", ONE_LABEL)


def _margin(margin: Any) -> float:
    if margin is None:
        return 0.0
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise Rejected(BAD_MARGIN, f"margin is {margin!r}", '"margin": 1.0')
    return float(margin)
