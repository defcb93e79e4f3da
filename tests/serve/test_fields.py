"""Bodies of requests: any bytes are either a call or an error that names the problem."""

import dataclasses
import json
import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxlm.data.chat import ChatTemplate
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.corrupt.fim import FIM_TOKENS
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.tokenizer import Bytes
from jaxlm.generate.grammar import GrammarCompiler
from jaxlm.serve import api
from jaxlm.serve.fields import Fields, RefusedRequest, parse

TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
VALID = {
    "model": "run",
    "prompt": ["a", "b"],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "n": 2,
    "best_of": 2,
    "seed": 5,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": 2,
    "top_logprobs": 2,
    "logit_bias": {"50": 1.5},
    "echo": True,
    "suffix": "c",
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "timeout": 5,
    "ignore_eos": False,
    "response_format": {"type": "text"},
    "structured_outputs": {"regex": "[ab]+"},
    "user": "me",
}
VALUES = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 1.5, -0.0, 1e300, "", "a", "\x00"),
    *("\u20ac" * 50, [], [[]], [0], [[1, 2], [3]], ["a", 1], [None], [True], [1.5], {}),
    *({"a": 1}, {"include_usage": 1}, {"-1": 1}, {"999": "x"}, {"__proto__": {}}),
    *({"role": "user"}, [{"role": 1, "content": 2}], [{"role": "user", "content": None}]),
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": "a", "tool": 1}],
    *(
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
    ),
    *({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
    *({"json": {}}, {"json": "{"}, {"choice": ["a"]}, {"choice": [""]}, {"grammar": "x"}),
    *({"regex": "["}, {"regex": 1}, {"json_object": 1}, {"regex": "a", "json": {}}),
]
# Fields that one of the two routes alone has, or reads otherwise.
OTHERS = {
    api.completion: {"messages", "top_logprobs"},
    api.chat_completion: {"prompt", "echo", "suffix", "logprobs", "top_logprobs"},
}


@pytest.fixture(scope="module")
def served():
    tokenizer = Bytes()
    template = ChatTemplate(TEMPLATE, {}, is_trusted=True)
    with GrammarCompiler(tokenizer, tokenizer.size) as grammars:
        yield api.Served(
            name="run",
            digest="0" * 64,
            step=1,
            tokenizer=tokenizer,
            chat=ChatTokenizer(tokenizer, template),
            is_infilling=True,
            vocab=tokenizer.size,
            context=64,
            grammars=grammars,
        )


def outcome(body, served, read):
    refused = None
    try:
        call = read(Fields(parse(body)), served)
        api.check_ids(call, served)
    except RefusedRequest as error:
        refused = error
    if refused is not None:
        assert refused.status in (400, 404, 422)
        assert json.dumps(refused.as_json())
        return None
    for each in call.requests:
        assert 0 < each.size <= served.context
        assert all(0 <= token < served.vocab for token in each.ids)
        assert 0 <= each.seed < 2**32
    return call


def test_v3_v7_bodies_of_any_form_are_a_call_or_a_refusal(served):
    draw = random.Random(0)
    calls = 0
    for _ in range(1000):
        read = draw.choice([*OTHERS])
        fields = {
            name: draw.choice(VALUES) if draw.random() < 0.1 else value
            for name, value in VALID.items()
            if draw.random() < (0.02 if name in OTHERS[read] else 0.5)
        }
        body = bytearray(json.dumps(fields).encode())
        if draw.random() < 0.2:
            body[draw.randrange(len(body))] = draw.randrange(256)
        calls += outcome(bytes(body), served, read) is not None
    assert calls > 20


def test_v7_special_tokens_that_a_user_writes_stay_text(served):
    body = json.dumps({"messages": [{"role": "user", "content": "<|eos|>"}]}).encode()
    call = outcome(body, served, api.chat_completion)
    assert 2 not in call.requests[0].ids
    body = json.dumps({"prompt": "<|eos|>", "max_tokens": 3}).encode()
    assert 2 not in outcome(body, served, api.completion).requests[0].ids


def test_a_role_that_no_training_has_is_refused(served):
    fields = Fields(parse(b'{"messages": [{"role": "usr", "content": "a"}]}'))
    with pytest.raises(RefusedRequest, match="system, developer, user, assistant, tool, not 'usr'"):
        api.chat_completion(fields, served)


def test_a_suffix_is_put_before_the_middle(served):
    body = json.dumps({"prompt": "a", "suffix": "b", "max_tokens": 2}).encode()
    (request,) = outcome(body, served, api.completion).requests
    names = served.names
    shown = [names.get(token) or served.tokenizer.decode([token]) for token in request.ids]
    assert shown == ["<|bos|>", "<|fim_prefix|>", "a", "<|fim_suffix|>", "b", "<|fim_middle|>"]


@pytest.mark.parametrize("is_special", [True, False])
def test_a_suffix_has_the_marks_of_training_and_no_space_of_the_tokenizer_in_front(
    served, is_special
):
    """`jaxlm import --add_token` and the files of Qwen have marks that are not special."""
    built = tokenizers.Tokenizer(models.BPE({"\u2581": 0, "a": 1, "b": 2, "\n": 3}, []))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    built.add_special_tokens(["<s>"])
    built.add_tokens([AddedToken(name, special=is_special) for name in FIM_TOKENS[0]])
    tokenizer = ImportedTokenizer(built.to_str().encode(), before=[4], after=[4])
    assert tokenizer.lead == " "
    served = dataclasses.replace(served, tokenizer=tokenizer, vocab=tokenizer.size)
    body = json.dumps({"prompt": "a", "suffix": "b", "max_tokens": 2}).encode()
    (request,) = outcome(body, served, api.completion).requests
    prefix, middle, suffix = (tokenizer.reserved[name] for name in FIM_TOKENS[0])
    assert request.ids == (4, prefix, 0, 1, suffix, 2, middle)
