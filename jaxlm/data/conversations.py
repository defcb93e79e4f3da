"""Conversations of records: messages for a chat template, and the weight of each turn."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

Kind = Literal["text", "chat", "completion", "pairs", "labeled", "steps", "prompts"]
PREFERENCES: tuple[Kind, ...] = (
    "pairs",
    "labeled",
    "steps",
)  # answers that are compared, or judged
Message = dict[str, Any]
Entry = tuple[str, tuple[str, ...]]  # name that a kind reads, and the fields of its value
Fields = tuple[Entry, ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
}
OWN_KEYS = {"from", "value", "train", "weight"}  # of a turn, not for the template
MAX_DEPTH = 64  # of the JSON of tools and tool calls

# Records of another form; a share of data.max_dropped is tolerated.
NO_MESSAGES = "without messages"
NO_FIELD = "without a field of data.kind"
OTHER_FORM = "with messages of another form"
UNKNOWN_ROLE = "with an unknown role"
NO_TEXT_PART = "with a part that is no text"
BAD_WEIGHT = "with a weight that is no number"
BAD_MARGIN = "with a margin that is no number"
BAD_LABEL = "with a label other than true or false"
BROKEN = (
    *(NO_MESSAGES, NO_FIELD, OTHER_FORM, UNKNOWN_ROLE, NO_TEXT_PART, BAD_WEIGHT),
    *(BAD_MARGIN, BAD_LABEL),
)
REFUSED = "refused by the chat template"
NO_MASK = "rendered without a place of each answer"
# Conversations without anything to learn; any number is left out.
NO_ANSWER = "without an assistant turn"
EMPTY_TURN = "with an empty turn"
UNTRAINED = "without a trained turn"
TOO_LONG = "longer than a row"
TOO_SHORT = "of one token"
EQUAL = "with equal answers"
NO_STEP_END = "with a step that ends in no token of its own"
NO_CHOICE = "rated as a tie, or skipped"
OTHER_PROMPT = "with different prompts"

ONE_A_LINE = (
    "one conversation a line: "
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)


class ChatFields(NamedTuple):
    """Form of the records, the roles whose turns are trained, and other names of fields."""

    kind: Kind
    roles: tuple[str, ...] = ("assistant",)
    fields: Fields = ()


class Rejected(Exception):
    """A record that cannot be used: the reason under which it is counted, why, and a fix."""

    def __init__(self, reason: str, why: str, fix: str = ONE_A_LINE):
        super().__init__(f"{reason}: {why}")
        self.reason, self.why, self.fix = reason, why, fix


class LabeledStep(NamedTuple):
    """A step of an answer, and its label."""

    text: str
    is_right: bool


class Goal(NamedTuple):
    """The known answer to a prompt, if any, and what else a reward function reads."""

    answer: str | None
    info: Any


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages as a chat template reads them, and the weight of each.

    `is_plain` is a prompt and its completion as text, without a template. `side` is 1 for an
    answer that was chosen, or judged good, -1 for the other kind, and 0 for a conversation without
    a judgment. `rejected` is the other conversation of a pair, and `margin` the difference of their
    rewards, if it is known. `steps` are those of the last answer, joined by line ends. `goal` is of
    a prompt, which has no answer yet.
    """

    messages: Sequence[Message]
    weights: Sequence[float]
    tools: Sequence[Any] | None = None
    is_plain: bool = False
    side: int = 0
    margin: float = 0.0
    rejected: "Conversation | None" = None
    steps: Sequence[LabeledStep] = ()
    goal: Goal | None = None

    @property
    def has_more(self) -> bool:
        """If it is a pair, has tools, or messages have more than role and content."""
        is_more = bool(self.tools or self.steps) or any(
            len(message) > 2 for message in self.messages
        )
        return is_more or self.rejected is not None

    def mapped(self, change: Callable[[str], str]) -> "Conversation":
        """Return the conversation with each of its texts changed."""
        messages = [_mapped(message, change) for message in self.messages]
        rejected = self.rejected and self.rejected.mapped(change)
        steps = [each._replace(text=change(each.text)) for each in self.steps]
        tools = map_strings(self.tools, change)
        return dataclasses.replace(
            self, messages=messages, tools=tools, rejected=rejected, steps=steps
        )

    @property
    def text(self) -> str:
        """Return the contents, one after another."""
        return "\n".join(message["content"] or "" for message in self.messages)

    @property
    def prompt(self) -> str:
        """Return what precedes the first answer to a user, as JSON, or all turns without a user.

        A split keeps equal prompts together. A greeting or a system message alone is no prompt.
        """
        roles = [message["role"] for message in self.messages]
        end = len(roles)
        if self.goal is None and "user" in roles:
            first = roles.index("user")
            end = first + [*roles[first:], "assistant"].index("assistant")
        return json.dumps(self.messages[:end], sort_keys=True)


def parse(record: Any, kind: Kind, roles: Sequence[str]) -> Conversation:
    """Return the conversation of a record.

    Args:
      record: value of a line or row: `messages` of role and content, `conversations` of from and
        value (ShareGPT), with `tools`; or `prompt` and `completion`, texts or messages.
      kind: `chat` or `completion`.
      roles: roles whose turns have weight 1, unless a turn has `train` or `weight`.

    Raises:
      Rejected: if the record cannot be used.
    """
    if not isinstance(record, dict):
        raise Rejected(NO_MESSAGES, described(record))
    parts = _completion(record) if kind == "completion" else _chat(record)
    if all(isinstance(part, str) for part in parts):
        prompt, completion = parts
        return _plain(prompt, completion, record)
    messages: list[Message] = []
    weights: list[float] = []
    for number, part in enumerate(parts):
        is_prompt = kind == "completion" and number == 0
        for turn in _turns(part, "user" if is_prompt else "assistant"):
            message = _message(turn, len(messages))
            messages.append(message)
            weights.append(0.0 if is_prompt else _weight(turn, message["role"] in roles))
    if not any(message["role"] == "assistant" for message in messages):
        raise Rejected(NO_ANSWER, f"its roles are {', '.join(m['role'] for m in messages)}")
    if not any(weights):
        raise Rejected(UNTRAINED, "every turn has weight 0", "--config.data.roles=assistant")
    for number, (message, weight) in enumerate(zip(messages, weights, strict=True)):
        is_free = message["role"] in ("system", "developer", "tool") and not weight
        if _is_empty(message) and not is_free:
            raise Rejected(EMPTY_TURN, f"turn {number}, of {message['role']}, has no text")
    return Conversation(messages, weights, _tools(record.get("tools")))


def unanswered(turns: Sequence[Any], tools: Any, goal: Goal) -> Conversation:
    """Return the conversation of messages that the model answers.

    Raise Rejected if the messages cannot be used, or end with an answer.
    """
    messages = [_message(turn, number) for number, turn in enumerate(turns)]
    if messages[-1]["role"] == "assistant":
        why = "the last turn of the prompt is of assistant"
        raise Rejected(OTHER_FORM, why, "leave out the answer of the last turn")
    if _is_empty(messages[-1]) and messages[-1]["role"] != "tool":
        raise Rejected(EMPTY_TURN, "the last turn of the prompt has no text")
    return Conversation(messages, [0.0] * len(messages), _tools(tools), goal=goal)


def _chat(record: dict[str, Any]) -> tuple[Any, ...]:
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            if not isinstance(record[key], list):
                why = f"{key} is a {type(record[key]).__name__}, not a list of turns"
                raise Rejected(OTHER_FORM, why)
            return (record[key],)
    if "prompt" in record and "completion" in record:
        raise Rejected(NO_MESSAGES, "it has prompt and completion", "--config.data.kind=completion")
    raise Rejected(
        NO_MESSAGES,
        described(record),
        "--config.data.kind=text" if "text" in record else ONE_A_LINE,
    )


def described(record: Any) -> str:
    """Return what a record of another form is, for errors: its fields, or its type without any."""
    if isinstance(record, dict):
        return f"its fields are {', '.join(map(str, record)) or 'none'}"
    return f"it is a {type(record).__name__}, not an object"


def no_field(record: dict[str, Any], missing: str, fix: str) -> Rejected:
    """Return the error of a record without a field that its kind needs."""
    return Rejected(NO_FIELD, f"it has no {missing}; {described(record)}", fix)


def _completion(record: dict[str, Any]) -> tuple[Any, Any]:
    prompt, completion = record.get("prompt"), record.get("completion")
    form = 'one object a line: {"prompt": "...", "completion": "..."}'
    if prompt is None or completion is None:
        missing = "prompt" if prompt is None else "completion"
        is_chat = "messages" in record or "conversations" in record
        fix = "--config.data.kind=chat" if is_chat else form
        raise no_field(record, missing, fix)
    if not all(isinstance(part, str | list) for part in (prompt, completion)):
        raise Rejected(OTHER_FORM, "prompt and completion are texts or lists of messages", form)
    return prompt, completion


def _plain(prompt: str, completion: str, record: dict[str, Any]) -> Conversation:
    weight = _weight(record, True)
    if not completion:
        raise Rejected(EMPTY_TURN, "the completion is empty")
    if not weight:
        raise Rejected(UNTRAINED, "the completion has weight 0")
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return Conversation(messages, [0.0, weight], is_plain=True)


def _turns(part: Any, role: str) -> list[Any]:
    return [{"role": role, "content": part}] if isinstance(part, str) else part


def _message(turn: Any, number: int) -> Message:
    """Return a turn as templates read it: role, content as text or None, and further fields."""
    if not isinstance(turn, dict):
        raise Rejected(OTHER_FORM, f"turn {number} is a {type(turn).__name__}, not an object")
    spoken = turn.get("role", turn.get("from"))
    role = SHAREGPT.get(spoken, spoken) if isinstance(spoken, str) else spoken
    if role is None:
        raise Rejected(
            UNKNOWN_ROLE,
            f"turn {number} has no role; its fields are {', '.join(map(str, turn)) or 'none'}",
            'a turn is {"role": "user", "content": "..."}; data.fields does not rename its keys',
        )
    if role not in ROLES:
        raise Rejected(
            UNKNOWN_ROLE,
            f"turn {number} has the role {spoken!r}",
            f"use one of {', '.join(ROLES)}, or ShareGPT's {', '.join(SHAREGPT)}",
        )
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(_text_of(each, number) for each in content)
    if content is not None and not isinstance(content, str):
        why = f"the content of turn {number} is a {type(content).__name__}"
        raise Rejected(OTHER_FORM, why)
    # Rows of Parquet have every field of the schema, None where a turn has none.
    further = {k: v for k, v in turn.items() if k not in OWN_KEYS and v is not None}
    if isinstance(calls := further.get("tool_calls"), list):
        further["tool_calls"] = [_with_parsed_arguments(each) for each in calls]
    message = {**further, "role": role, "content": content}
    _check_depth(message, f"turn {number}")
    return message


def _with_parsed_arguments(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object, which templates print as JSON.

    OpenAI's API has them as JSON text, which a template would quote once more.
    """
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _with_parsed_arguments(function)}
    if isinstance(text := call.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(parsed := json.loads(text), dict):
                return call | {"arguments": parsed}
    return call


def _text_of(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
        kind = part.get("type", "nothing") if isinstance(part, dict) else type(part).__name__
        raise Rejected(
            NO_TEXT_PART,
            f"a part of turn {number} is {kind!r}; the model reads text only",
            "leave these records out, or replace the part by text",
        )
    return text


def _weight(turn: dict[str, Any], is_trained: bool) -> float:
    """Return the weight of a turn; fields that are None are absent, as in a row of Parquet."""
    train, weight = turn.get("train"), turn.get("weight")
    if train is not None and not isinstance(train, bool):
        raise Rejected(BAD_WEIGHT, f"train is {train!r}", '"train": false')
    if weight is not None and (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not math.isfinite(weight)
        or weight < 0
    ):
        raise Rejected(BAD_WEIGHT, f"weight is {weight!r}", '"weight": 0.5')
    if train is False:
        return 0.0
    return float(weight if weight is not None else train or is_trained)


def _is_empty(message: Message) -> bool:
    content = message["content"]
    return not (content and content.strip()) and not message.get("tool_calls")


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):  # columns of Parquet hold JSON
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise Rejected(OTHER_FORM, f"tools is text that is not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise Rejected(OTHER_FORM, f"tools is a {type(tools).__name__}, not a list")
    _check_depth(tools, "tools")
    return tools or None


def _check_depth(value: Any, name: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise Rejected(OTHER_FORM, f"{name} is nested deeper than {MAX_DEPTH}")
    for each in value.values() if isinstance(value, dict) else value or ():
        if isinstance(each, dict | list):
            _check_depth(each, name, depth + 1)


def _mapped(message: Message, change: Callable[[str], str]) -> Message:
    """Return a message with each of its texts changed, but not its role."""
    role, content = message["role"], message["content"]
    more = map_strings(message, change) if len(message) > 2 else {}
    return {**more, "role": role, "content": content and change(content)}


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each of its texts changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(each, change) for each in value]
    return value
