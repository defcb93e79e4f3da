"""Drafts: the text is that without one, in any company, and guesses are accepted."""

import contextlib
import dataclasses
import random

import jax.numpy as jnp
import pytest

from jaxlm.generate import draft
from jaxlm.generate.draft import DraftBalance, DraftModel, Lookup
from jaxlm.generate.grammar import GrammarCompiler, GrammarSource
from jaxlm.generate.requests import joined
from jaxlm.generate.rows import Sampling
from tests.generate.test_engine import (
    CONTEXT,
    FAMILIES,
    TOKENIZER,
    check_schedules,
    made,
    request,
    started,
)


def engine_with(*args, **more):
    """An engine that is closed at the end."""
    return contextlib.closing(started(*args, **more))


@pytest.fixture(scope="module")
def engine():
    with engine_with(draft=Lookup(3)) as built:
        yield built


@pytest.fixture(scope="module")
def drafted():
    """An engine whose draft is the model itself."""
    with engine_with(draft=DraftModel(*made(), guesses=3)) as built:
        yield built


@pytest.fixture(scope="module")
def plain():
    built = started()
    yield built
    built.close()


@pytest.fixture(autouse=True)
def always_on(monkeypatch):
    monkeypatch.setattr(draft, "WINDOW", 2**60)


def repeated(seed, **changes):
    """A request whose prompt repeats itself, so that guesses are likely to stand."""
    draw = random.Random(seed)
    part = [draw.randrange(40, TOKENIZER.size) for _ in range(draw.randrange(1, 4))]
    ids = tuple((part * 12)[: draw.randrange(4, 24)])
    bias = tuple((token, 20.0) for token in part)
    asked = request(seed, ids=ids, max_tokens=draw.randrange(8, CONTEXT - len(ids)))
    sampling = dataclasses.replace(asked.sampling, bias=bias)
    return dataclasses.replace(asked, **{"sampling": sampling} | changes)


def check_texts(built, plain, requests):
    """Require the ids of an engine without a draft, and the scores but for the last bits."""
    for one, other in zip(built.complete(requests), plain.complete(requests), strict=True):
        assert (one.ids, one.text, one.reason) == (other.ids, other.text, other.reason)
        for mine, theirs in zip(one.scores, other.scores, strict=True):
            assert mine.log_probability == pytest.approx(theirs.log_probability, abs=1e-4)


def test_texts_are_those_without_a_draft_and_guesses_are_accepted(engine, plain):
    requests = [*map(repeated, range(12)), *map(request, range(12))]
    before = dataclasses.replace(engine.counters)
    check_texts(engine, plain, requests)
    counters = engine.counters
    assert counters.accepted_tokens - before.accepted_tokens > 20
    assert counters.guessed_tokens > counters.accepted_tokens
    # A guess stands only after those before it.
    assert list(counters.accepted) == sorted(counters.accepted, reverse=True)
    assert counters.drafts >= counters.accepted[0] > counters.accepted[2] > 0
    drawn = counters.drawn_tokens - before.drawn_tokens
    assert counters.passes - before.passes < drawn


def test_a_result_has_the_same_bits_in_any_company_and_nothing_compiles(engine):
    requests = [*map(repeated, range(4)), *map(request, range(4, 8))]
    check_schedules(engine, requests, 10)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_has_the_same_bits_in_200_schedules(family, compute):
    with engine_with(family, compute, draft=Lookup(3)) as built:
        requests = [*map(repeated, range(12)), *map(request, range(12, 24))]
        check_schedules(built, requests, 200)
        assert built.counters.accepted_tokens > 0


def test_a_row_with_a_grammar_takes_no_guesses(engine, plain):
    with GrammarCompiler(TOKENIZER, TOKENIZER.size) as compiler:
        grammar = compiler.compile(GrammarSource("regex", "(ab){6}"), TOKENIZER.ends)
        asked = request(3, grammar=grammar, ends=TOKENIZER.ends, max_tokens=20, sampling=Sampling())
        before = engine.counters.guessed_tokens
        (result,) = engine.complete([asked])
    assert (result.text, engine.counters.guessed_tokens) == ("ab" * 6, before)


def test_a_draft_that_does_not_pay_is_turned_off_and_logged(monkeypatch, plain):
    lines = []
    with engine_with(draft=Lookup(3), say=lines.append) as built:
        monkeypatch.setattr(draft, "WINDOW", 40)
        built._balance.ratio = 0.5
        built.complete([*map(request, range(8))])
        assert (built.is_drafting, lines) == (True, [])
        built._balance.ratio = 5.0
        requests = [repeated(seed) for seed in range(8)]
        check_texts(built, plain, requests)
        assert not built.is_drafting
        (line,) = lines
        assert line.startswith("the draft is off: ")
        guessed = built.counters.guessed_tokens
        check_texts(built, plain, requests)
        assert built.counters.guessed_tokens == guessed
        assert built.counters.compiles == 0


def test_a_stream_has_several_ids_a_tick_and_the_text_is_the_same(engine, plain):
    deltas = []
    sampling = Sampling(temperature=0, bias=((70, 50.0),))
    asked = repeated(2, max_tokens=20, sampling=sampling)
    engine.submit(asked, deltas.append)
    ticks = 0
    while not engine.is_idle:
        engine.tick()
        ticks += 1
    assert ticks < 20
    assert joined(deltas).ids == plain.complete([asked])[0].ids


def test_the_balance_compares_tokens_with_time(monkeypatch):
    monkeypatch.setattr(draft, "WINDOW", 10)
    balance = DraftBalance(1.5)
    assert balance.pays(9, 0)
    assert balance.pays(1, 5)
    assert not balance.pays(10, 4)
    assert balance.loss.startswith("the draft is off: 1.40 tokens a pass, which takes 1.50 times")


def test_guesses_of_a_row_are_its_own():
    lookup = Lookup(3)
    state = lookup.empty(2, 8, 4, None)
    one = jnp.array([5, 6, 7, 5, 6, 9, 9, 9])
    state = state._replace(ids=jnp.stack([one, one[::-1]]), length=jnp.array([5, 1]))
    assert state.guess(lookup.guesses)[0].tolist() == [7, 5, 6]


def test_texts_are_those_without_a_draft_run_and_one_like_the_model_is_right(drafted, plain):
    before = dataclasses.replace(drafted.counters)
    check_texts(drafted, plain, [request(seed, top=3) for seed in range(16)])
    guessed = drafted.counters.guessed_tokens - before.guessed_tokens
    accepted = drafted.counters.accepted_tokens - before.accepted_tokens
    drawn = drafted.counters.drawn_tokens - before.drawn_tokens
    assert guessed == 3 * (drawn - accepted)
    assert accepted > drawn / 2
    check_schedules(drafted, [request(seed) for seed in range(6)], 6)
    before = drafted.counters.passes
    asked = request(4, max_tokens=17, ends=(), sampling=Sampling(temperature=1.0))
    assert drafted.complete([asked])[0].ids == plain.complete([asked])[0].ids
    assert drafted.counters.passes - before == 5  # of four tokens, and one


@pytest.mark.slow
def test_texts_do_not_depend_on_a_draft_of_another_model(plain):
    with engine_with(draft=DraftModel(*made("mistral"), guesses=3)) as built:
        check_texts(built, plain, [request(seed, top=3) for seed in range(24)])
        check_schedules(built, [request(seed) for seed in range(12)], 60)
        assert built.counters.accepted_tokens < built.counters.guessed_tokens
