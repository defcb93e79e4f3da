"""Structured output: whole texts of requests with a grammar, as clients of OpenAI see them."""

import json
import re
import threading

import jsonschema
import openai
import pytest

import jaxlm
from tests.generate.test_grammar import BOMBS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "1+2?"}]


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.base, api_key="none", max_retries=0) as made:
        yield made


def answer(client, **more):
    settings = {"model": "run", "messages": MESSAGES, "max_tokens": 100, "seed": 1}
    return client.chat.completions.create(**settings | more)


def complete(client, **more):
    return client.completions.create(
        model="run", prompt="1+2?", **{"max_tokens": 30, "seed": 1} | more
    )


def test_answers_with_a_schema_parse_and_are_the_same_in_a_stream(client):
    whole = 0
    for seed in range(6):
        (choice,) = answer(client, seed=seed, response_format=FORMAT).choices
        stream = answer(client, seed=seed, response_format=FORMAT, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in stream)
        assert text == choice.message.content
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
            whole += 1
    assert whole >= 3


@pytest.mark.slow
def test_texts_are_those_of_generate_in_python(client, trained):
    model = jaxlm.load(trained)
    settings = {"max_tokens": 100, "temperature": 1.0, "seed": 1}
    (mine,) = model.generate("1+2?", chat=True, json_schema=SCHEMA, **settings)
    (choice,) = answer(client, response_format=FORMAT).choices
    assert mine.text == choice.message.content
    (mine,) = model.generate("1+2?", regex="[a-z]{9}", **settings)
    form = {"structured_outputs": {"regex": "[a-z]{9}"}}
    (choice,) = complete(client, max_tokens=100, extra_body=form).choices
    assert mine.text == choice.text


def test_each_form_of_a_grammar_limits_the_text(client):
    for form, expected in (
        ({"regex": "[xyz]{2}-[0-9]"}, "[xyz]{2}-[0-9]"),
        ({"choice": ["red", "blue (dark)"]}, r"red|blue \(dark\)"),
        ({"grammar": 'start: "n=" NUMBER\nNUMBER: /[0-9]{1,3}/'}, "n=[0-9]{1,3}"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"type": "null"}'}, "null"),
    ):
        choices = complete(client, n=3, extra_body={"structured_outputs": form}).choices
        for each in choices:
            assert re.fullmatch(expected, each.text), form
            assert each.finish_reason == "stop"
    (choice,) = complete(
        client, max_tokens=2, extra_body={"response_format": {"type": "json_object"}}
    ).choices
    assert choice.text.startswith("{")


def test_a_grammar_goes_together_with_scores_stops_and_bias(client):
    form = {"structured_outputs": {"regex": "[abc]{9}"}}
    (plain,) = complete(client, temperature=0, logprobs=2, extra_body=form).choices
    assert len(plain.text) == 9
    assert plain.logprobs.tokens == [*plain.text]
    assert sum(len(each) for each in plain.logprobs.top_logprobs) >= 18
    other = {"structured_outputs": {"regex": "[xyz]"}}
    (short,) = complete(client, temperature=0, logprobs=2, extra_body=other).choices
    tops = [each.logprobs.top_logprobs[0] for each in (plain, short)]
    assert tops[0] == tops[1]  # of the model itself
    (stopped,) = complete(client, temperature=0, stop=plain.text[4], extra_body=form).choices
    assert stopped.text == plain.text[: plain.text.index(plain.text[4])]
    (biased,) = complete(client, logit_bias={str(40 + ord("b")): 100}, extra_body=form).choices
    assert biased.text == "b" * 9


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"response_format": {"type": "xml"}}, 422, "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, 422, "needs an object schema"),
        (
            {"response_format": {"type": "text", "jsonschema": {}}},
            400,
            "nearest one is json_schema",
        ),
        ({"structured_outputs": {"regexp": "a"}}, 400, "nearest one is regex"),
        ({"structured_outputs": {"regex": "["}}, 400, "unclosed character class"),
        ({"structured_outputs": {"json": {"type": "x"}}}, 400, "Invalid type"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, 422, "takes one of them"),
        ({"structured_outputs": {"choice": []}}, 422, "not empty"),
        ({"structured_outputs": {"grammar": 5}}, 422, "grammar must be a text"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, 400, "more than 65536"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, 422, "ends with an end token"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            422,
            "two grammars",
        ),
    ],
)
def test_a_wrong_grammar_is_refused_with_its_field(client, more, status, words):
    with pytest.raises(openai.APIStatusError) as refused:
        complete(client, extra_body=more)
    assert refused.value.status_code == status
    assert words in refused.value.body["message"]
    assert refused.value.body["param"] in {*more, "ignore_eos", "jsonschema", "regexp"}


def test_v16_grammars_that_explode_change_no_other_request(client, running):
    def plain():
        return complete(client, temperature=1.0, logprobs=1, max_tokens=20).choices[0]

    expected, statuses = plain(), []

    def explode(source):
        kind = {"lark": "grammar"}.get(source.kind, source.kind)
        body = {"structured_outputs": {kind: source.text}}
        try:
            complete(client, max_tokens=10, extra_body=body)
            statuses.append(200)
        except openai.APIStatusError as error:
            statuses.append(error.status_code)

    threads = [threading.Thread(target=explode, args=(each,)) for each in BOMBS.values()]
    compiled = running.engine.counters.compiles
    for thread in threads:
        thread.start()
    while any(each.is_alive() for each in threads):
        assert plain() == expected
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 400}
    assert len(statuses) == len(BOMBS)
    assert running.engine.counters.compiles == compiled
    assert running.engine.is_idle
