"""Grammars: every whole text is one of the grammar, and none can stop the process."""

import contextlib
import json
import random
import time

import jsonschema
import pytest

from jaxlm.data.tokenizer import Bytes
from jaxlm.generate import grammar
from jaxlm.generate.grammar import (
    MAX_TEXT,
    GrammarCompiler,
    GrammarRefused,
    GrammarSource,
    allowed_ids,
)
from jaxlm.generate.requests import Request, joined
from jaxlm.generate.rows import Sampling
from tests.generate.test_engine import CONTEXT, request, started

TOKENIZER = Bytes()
DIGITS = {"type": "string", "pattern": "^[0-9]{1,3}$"}
SCHEMAS = [
    {"enum": ["yes", "no"]},
    {"type": "object", "properties": {"a": DIGITS}, "required": ["a"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "integer", "minimum": -20, "maximum": 300},
]
SCHEMAS[1]["additionalProperties"] = False


@pytest.fixture(scope="module")
def compiler():
    with GrammarCompiler(TOKENIZER, TOKENIZER.size + 30) as made:
        yield made


def walk(matcher, seed=0, steps=400):
    """Draw ids that the matcher allows; return their text, or None without an end."""
    draw, text = random.Random(seed), []
    for _ in range(steps):
        token = draw.choice(allowed_ids(matcher.mask()))
        if not matcher.accept(token):
            return None
        if token in TOKENIZER.ends:
            return TOKENIZER.decode(text)
        text.append(token)
        if matcher.is_complete:
            return TOKENIZER.decode(text)
    return None


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_random_texts_of_a_schema_are_valid(compiler, schema):
    compiled = compiler.compile(GrammarSource("json", json.dumps(schema)), TOKENIZER.ends)
    texts = [walk(compiled.start(), seed) for seed in range(40)]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_white_space_of_json_is_bounded(compiler):
    """A small model would otherwise write it until its last token."""
    matcher = compiler.compile(GrammarSource("json", "{}"), TOKENIZER.ends).start()
    (space,) = TOKENIZER.encode(" ")
    assert matcher.accept(*TOKENIZER.encode("["))
    count = 0
    while space in allowed_ids(matcher.mask()):
        assert matcher.accept(space)
        count += 1
    assert 0 < count <= 40


def test_choices_are_literal_texts(compiler):
    choices = ['a b\n\t.*"\\é', "x|y", "(", "^x$"]
    compiled = compiler.compile(GrammarSource("choice", json.dumps(choices)), TOKENIZER.ends)
    assert {walk(compiled.start(), seed) for seed in range(40)} == {*choices}


def test_a_lark_grammar_and_an_expression_limit_the_whole_text(compiler):
    lark = GrammarSource("lark", 'start: "a" (" b" | " c")~2 "."')
    texts = {walk(compiler.compile(lark, TOKENIZER.ends).start(), seed) for seed in range(40)}
    assert texts == {"a b b.", "a b c.", "a c b.", "a c c."}
    regex = compiler.compile(GrammarSource("regex", "a{2,4}"), TOKENIZER.ends)
    assert {walk(regex.start(), seed) for seed in range(40)} == {"aa", "aaa", "aaaa"}


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "[0-9", "unclosed character class"),
        ("json", '{"type": "nope"}', "Invalid type: nope"),
        ("json", "[", "EOF"),
        ("json", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("json", '{"$ref": "http://127.0.0.1:1/a"}', "does not fetch"),
        ("lark", 'start: "a" b', 'unknown name: "b"'),
        ("regex", "a" * (MAX_TEXT + 1), f"more than {MAX_TEXT}"),
    ],
)
def test_a_wrong_grammar_is_refused_with_its_reason(compiler, kind, text, reason):
    with pytest.raises(GrammarRefused) as refused:
        compiler.compile(GrammarSource(kind, text), TOKENIZER.ends)
    assert reason in str(refused.value)
    assert len(str(refused.value)) <= 500


def rules(count):
    """Rules that refer to each other, each may begin a text."""
    starts = " | ".join(f"r{i}" for i in range(count))
    lines = (f'r{i}: "a" r{(i + 1) % count} | "b"' for i in range(count))
    return f"start: {starts}\n" + "\n".join(lines)


def definitions(count, **more):
    nested = {
        f"{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}}
        for i in range(count)
    }
    last = {f"{count}": {"type": "null"}}
    return json.dumps({"$defs": nested | last, "$ref": "#/$defs/0"}, separators=(",", ":"))


BOMBS = {
    "rules": GrammarSource("lark", rules(2000)),
    "a chain": GrammarSource(
        "lark", "start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(5000)) + 'r5000:"c"'
    ),
    "definitions": GrammarSource("json", definitions(900)),
    "properties": GrammarSource(
        "json",
        json.dumps(
            {"type": "object", "properties": {f"k{i}": {"type": "null"} for i in range(1200)}}
        ),
    ),
    "products": GrammarSource(
        "json",
        json.dumps(
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"type": "object", "properties": {f"a{i}b{j}": {}}} for j in range(8)
                        ]
                    }
                    for i in range(12)
                ]
            }
        ),
    ),
    "intersections": GrammarSource(
        "lark",
        "start: A\nA: " + " & ".join(f"/(.*{letter}.*){{7}}/" for letter in "abcdefghijklmnopqrst"),
    ),
    "repeats": GrammarSource("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "exact repeats": GrammarSource("regex", "(a{1000}){1000}"),
    "parentheses": GrammarSource("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "states": GrammarSource("regex", r"(.|\n)*a(.|\n){200}b(.|\n){200}"),
    "ambiguity": GrammarSource("lark", 'start: x x x x x x x x\nx: x x | "a" | ""'),
    "a long text": GrammarSource("json", '{"type": "string", "minLength": 1000000000}'),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.timeout(60)
def test_a_grammar_that_explodes_is_refused_or_limited(compiler, name):
    """Compiled in a thread of 8 MiB, the definitions and the chain end the process."""
    assert len(BOMBS[name].text) <= MAX_TEXT
    with contextlib.suppress(GrammarRefused):
        walk(compiler.compile(BOMBS[name], TOKENIZER.ends).start(), steps=100)
    assert walk(compiler.compile(GrammarSource("regex", "a"), TOKENIZER.ends).start()) == "a"


def test_a_slow_grammar_is_refused_at_the_deadline(monkeypatch):
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.01)
    with GrammarCompiler(TOKENIZER, TOKENIZER.size) as compiler:
        compiler._pool.submit(time.sleep, 1)
        with pytest.raises(GrammarRefused, match="not compiled in 0.01 s"):
            compiler.compile(GrammarSource("regex", "a"), TOKENIZER.ends)


def test_a_grammar_is_compiled_once_and_starts_anew(compiler):
    source = GrammarSource("regex", "abc")
    first = compiler.compile(source, TOKENIZER.ends)
    assert compiler.compile(GrammarSource("regex", "abc"), TOKENIZER.ends) is first
    matcher = first.start()
    assert matcher.accept(*TOKENIZER.encode("a"))
    assert allowed_ids(first.start().mask()) == TOKENIZER.encode("a")


@pytest.mark.parametrize("more", [0, 23, 24, 25, 56])
def test_a_mask_has_a_bit_for_each_id(more):
    """Also for 320 ids, which fill ten words."""
    with GrammarCompiler(TOKENIZER, TOKENIZER.size + more) as compiler:
        mask = compiler.compile(GrammarSource("regex", "[ab]"), TOKENIZER.ends).start().mask()
    assert len(mask) == -(-(TOKENIZER.size + more) // 32)
    assert allowed_ids(mask) == [*TOKENIZER.encode("ab")]


def test_a_grammar_at_its_limit_does_not_look_whole(compiler):
    """llguidance then allows the end token alone."""
    matcher = compiler.compile(BOMBS["rules"], TOKENIZER.ends).start()
    assert allowed_ids(matcher.mask()) == [*TOKENIZER.ends]
    assert not matcher.accept(TOKENIZER.ends[0])
    assert not matcher.is_complete


@pytest.fixture(scope="module")
def engine():
    built = started()
    yield built
    built.close()


def structured(compiler, seed):
    """A request with a schema, with other settings for each seed."""
    schema = SCHEMAS[seed % len(SCHEMAS)]
    source = GrammarSource("json", json.dumps(schema))
    drawn = Request(
        ids=tuple(random.Random(seed).randrange(40, TOKENIZER.size) for _ in range(1 + seed % 9)),
        max_tokens=CONTEXT - 10,
        sampling=Sampling(temperature=seed % 3 / 2, top_p=0.9 if seed % 2 else None),
        seed=seed,
        ends=TOKENIZER.ends,
        top=2 if seed % 2 else None,
        grammar=compiler.compile(source, TOKENIZER.ends),
    )
    return schema, drawn


@pytest.mark.parametrize("schedules", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_texts_with_schemas_parse_and_change_no_other_text(engine, schedules):
    with GrammarCompiler(TOKENIZER, engine.vocab) as compiler:
        asked = [structured(compiler, seed) for seed in range(8)]
        requests = [each for _, each in asked] + [request(seed) for seed in range(8)]
        alone = [engine.complete([each])[0] for each in requests]
        compiled, whole = engine.counters.compiles, 0
        for (schema, _), result in zip(asked, alone[:8], strict=True):
            if result.reason == "eos_token":
                jsonschema.validate(json.loads(result.text), schema)
                whole += 1
        assert whole >= 3
        for schedule in range(schedules):
            draw = random.Random(schedule)
            order, deltas = [*range(len(requests))], [[] for _ in requests]
            draw.shuffle(order)
            while order or not engine.is_idle:
                while order and draw.random() < 0.5:
                    number = order.pop()
                    engine.submit(requests[number], deltas[number].append)
                engine.tick(passes=draw.choice([1, 32]))
            assert [joined(each) for each in deltas] == alone, schedule
        assert engine.counters.compiles == compiled


def test_a_text_ends_when_nothing_can_follow_and_at_the_limit_of_its_grammar(engine):
    with GrammarCompiler(TOKENIZER, engine.vocab) as compiler:
        whole = compiler.compile(GrammarSource("regex", "[a-z]{3}"), TOKENIZER.ends)
        limited = compiler.compile(BOMBS["rules"], TOKENIZER.ends)
        settings = {"ids": (50,), "max_tokens": 9, "ends": TOKENIZER.ends}
        first, second, third = engine.complete(
            [
                Request(**settings, grammar=whole),
                Request(**settings, grammar=limited),
                Request(**settings | {"max_tokens": 2}, grammar=whole),
            ]
        )
    assert (len(first.text), first.reason) == (3, "eos_token")
    assert second.reason == "grammar"
    assert (len(third.text), third.reason) == (2, "length")
