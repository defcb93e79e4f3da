"""Prompts without an answer, whose answers are sampled from the model and rewarded."""

import json
import math
from typing import Any, NamedTuple

from jaxlm.data import conversations
from jaxlm.data.conversations import (
    EMPTY_TURN,
    NO_MESSAGES,
    OTHER_FORM,
    Conversation,
    Goal,
    Rejected,
)

ONE_PROMPT = 'one prompt a line: {"prompt": "34+58=", "answer": "92"}'


class Prompt(NamedTuple):
    """A prompt as a reward function reads it: text, known answer, and anything else.

    `is_plain` is of a text that is continued as it is, without a chat template.
    """

    text: str
    answer: str | None
    info: Any
    is_plain: bool = False


def parse(record: Any) -> Conversation:
    """Return the prompt of a record as a conversation without an answer.

    Args:
      record: value of a line or row: `prompt`, a text or messages, `answer`, a text or a number,
        and `info`, any JSON. A text is continued as it is; messages are rendered by the chat
        template, with the header of the next answer.

    Raises:
      Rejected: if the record cannot be used.
    """
    if not isinstance(record, dict):
        raise Rejected(NO_MESSAGES, conversations.described(record), ONE_PROMPT)
    prompt = record.get("prompt")
    if prompt is None:
        raise conversations.no_field(record, "prompt", ONE_PROMPT)
    goal = Goal(_answer(record.get("answer")), record.get("info"))
    if isinstance(prompt, str):
        if not prompt.strip():
            raise Rejected(EMPTY_TURN, "the prompt is empty", ONE_PROMPT)
        messages = [{"role": "user", "content": prompt}]
        return Conversation(messages, [0.0], is_plain=True, goal=goal)
    if not isinstance(prompt, list) or not prompt:
        raise Rejected(OTHER_FORM, "the prompt is no text and no list of messages", ONE_PROMPT)
    return conversations.unanswered(prompt, record.get("tools"), goal)


def serialized(prompt: Prompt) -> bytes:
    """Return a prompt as a line of a file."""
    return json.dumps(prompt._asdict()).encode() + b"\n"


def read(content: bytes) -> list[Prompt]:
    """Return the prompts of the lines of a file."""
    return [Prompt(**json.loads(line)) for line in content.splitlines()]


def _answer(answer: Any) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        if math.isfinite(answer):
            return str(answer)
        raise Rejected(OTHER_FORM, f"answer is {answer}", ONE_PROMPT)
    raise Rejected(OTHER_FORM, f"answer is a {type(answer).__name__}", ONE_PROMPT)
