"""Records become conversations, or the reason and the fix are named."""

import json

import pytest

from jaxlm.data.conversations import (
    BAD_WEIGHT,
    EMPTY_TURN,
    NO_ANSWER,
    NO_FIELD,
    NO_MESSAGES,
    NO_TEXT_PART,
    OTHER_FORM,
    UNKNOWN_ROLE,
    UNTRAINED,
    Rejected,
    parse,
)

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PAIR = [USER, ANSWER]
DEEP = json.loads("[" * 500 + "]" * 500)


def read(record, kind="chat", roles=("assistant",)):
    return parse(record, kind, roles)


def test_messages_keep_what_a_template_may_read():
    call = {"function": {"name": "add", "arguments": {}}}
    record = {
        "messages": [
            {"role": "system", "content": ""},
            {**USER, "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_calls": None},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}, "c"], "train": None},
        ],
        "tools": '[{"name": "add"}]',
    }
    conversation = read(record)
    assert conversation.messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "bc"},
    ]
    assert conversation.weights == [0, 0, 1, 0, 1]
    assert conversation.tools == [{"name": "add"}]


@pytest.mark.parametrize("is_nested", [True, False])
def test_arguments_of_a_tool_as_json_text_are_an_object(is_nested):
    def message(arguments):
        call = {"name": "add", "arguments": arguments}
        calls = [{"id": "1", "function": call} if is_nested else call]
        turn = {"role": "assistant", "content": None, "tool_calls": calls}
        return read({"messages": [USER, turn]}).messages[1]

    assert message('{"a": [1, "x"]}') == message({"a": [1, "x"]})
    for text in ("[1]", "not JSON", "[" * 100_000):
        assert message(text) == message(text) != message({})


def test_sharegpt_and_messages_are_the_same_conversation():
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert read(record) == read({"messages": PAIR})


def test_a_turn_may_have_a_weight_of_its_own():
    turns = [USER, {**ANSWER, "weight": 0.5}, {**USER, "train": True}, {**ANSWER, "train": False}]
    assert read({"messages": turns}).weights == [0, 0.5, 1, 0]
    assert read({"messages": PAIR}, roles=("user", "assistant")).weights == [1, 1]


def test_prompt_and_completion_are_texts_or_messages():
    plain = read({"prompt": "a", "completion": "b", "weight": 2}, "completion")
    assert (plain.is_plain, plain.weights) == (True, [0, 2])
    earlier = [USER, ANSWER, USER]
    chat = read({"prompt": earlier, "completion": [ANSWER]}, "completion")
    assert (chat.is_plain, chat.weights) == (False, [0, 0, 0, 1])
    assert read({"prompt": [USER], "completion": "b"}, "completion").messages == PAIR


def test_conversations_with_one_prompt_have_the_same_prompt():
    one = read({"messages": [*PAIR, USER, ANSWER]})
    assert one.prompt == read({"messages": [USER, {**ANSWER, "content": "c"}]}).prompt
    assert one.prompt != read({"messages": [{**USER, "content": "c"}, ANSWER]}).prompt


@pytest.mark.parametrize(
    ("record", "reason", "why"),
    [
        ("text", NO_MESSAGES, "it is a str, not an object"),
        ({"text": "a"}, NO_MESSAGES, "its fields are text"),
        ({"prompt": "a", "completion": "b"}, NO_MESSAGES, "it has prompt and completion"),
        ({"messages": "a"}, OTHER_FORM, "messages is a str, not a list of turns"),
        ({"messages": ["a"]}, OTHER_FORM, "turn 0 is a str, not an object"),
        ({"messages": [{**USER, "content": 3}]}, OTHER_FORM, "the content of turn 0 is a int"),
        ({"messages": PAIR, "tools": {}}, OTHER_FORM, "tools is a dict, not a list"),
        ({"messages": PAIR, "tools": "{"}, OTHER_FORM, "tools is text that is not JSON"),
        (
            {"messages": [USER, {**ANSWER, "role": "bot"}]},
            UNKNOWN_ROLE,
            "turn 1 has the role 'bot'",
        ),
        ({"messages": [{"role": ["user"], "content": ""}]}, UNKNOWN_ROLE, "turn 0 has the role"),
        ({"messages": [{}]}, UNKNOWN_ROLE, "turn 0 has no role; its fields are none"),
        (
            {"messages": [USER, {"speaker": "a", "text": "b"}]},
            UNKNOWN_ROLE,
            "turn 1 has no role; its fields are speaker, text",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "image", "image": "x"}]}]},
            NO_TEXT_PART,
            "a part of turn 0 is 'image'",
        ),
        ({"messages": [USER, {**ANSWER, "train": 1}]}, BAD_WEIGHT, "train is 1"),
        ({"messages": [USER, {**ANSWER, "weight": float("nan")}]}, BAD_WEIGHT, "weight is nan"),
        ({"messages": [USER, {**ANSWER, "weight": -1}]}, BAD_WEIGHT, "weight is -1"),
        ({"messages": [{**USER, "content": [[[]]]}]}, NO_TEXT_PART, "a part of turn 0 is 'list'"),
        ({"messages": PAIR, "tools": [DEEP]}, OTHER_FORM, "tools is nested deeper than 64"),
        ({"messages": [{**USER, "x": DEEP}]}, OTHER_FORM, "turn 0 is nested deeper than 64"),
        ({"messages": []}, NO_ANSWER, "its roles are"),
        ({"messages": [USER]}, NO_ANSWER, "its roles are user"),
        ({"messages": [USER, {**ANSWER, "train": False}]}, UNTRAINED, "every turn has weight 0"),
        ({"messages": [USER, {**ANSWER, "content": " "}]}, EMPTY_TURN, "turn 1, of assistant"),
        ({"messages": [{**USER, "content": None}, ANSWER]}, EMPTY_TURN, "turn 0, of user"),
    ],
)
def test_a_record_that_is_no_conversation_is_rejected(record, reason, why):
    with pytest.raises(Rejected) as caught:
        read(record)
    assert caught.value.reason == reason
    assert why in caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize(
    ("record", "reason", "fix"),
    [
        ({"prompt": "a"}, NO_FIELD, "one object a line"),
        ({"messages": PAIR}, NO_FIELD, "--config.data.kind=chat"),
        ({"prompt": 1, "completion": "b"}, OTHER_FORM, "one object a line"),
        ({"prompt": "a", "completion": ""}, EMPTY_TURN, "one conversation a line"),
        ({"prompt": "a", "completion": "b", "train": False}, UNTRAINED, "one conversation a line"),
    ],
)
def test_a_record_without_prompt_and_completion_is_rejected(record, reason, fix):
    with pytest.raises(Rejected) as caught:
        read(record, "completion")
    assert caught.value.reason == reason
    assert caught.value.fix.startswith(fix)
