"""Drafts: the text is that without one, in any company, and guesses are accepted."""

import contextlib
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.generate.draft import DraftHeads, DraftModel, Lookup, RowTokens
from jaxlm.generate.drafting import Drafting
from jaxlm.generate.grammar import GrammarCompiler, GrammarSource
from jaxlm.generate.requests import Request, joined
from jaxlm.generate.rows import Sampling
from jaxlm.models.build import Blueprint
from jaxlm.models.config import MtpConfig
from tests.generate.test_engine import (
    CONTEXT,
    FAMILIES,
    TOKENIZER,
    check_schedules,
    made,
    request,
    started,
)
from tests.models.parameters import draw_params


def engine_with(*args, **more):
    """An engine that is closed at the end."""
    return contextlib.closing(started(*args, **more))


@pytest.fixture(scope="module")
def engine():
    with engine_with(draft=Lookup(3)) as built:
        yield always(built)


@pytest.fixture(scope="module")
def drafted():
    """An engine whose draft is the model itself."""
    with engine_with(draft=DraftModel(*made(), guesses=3)) as built:
        yield always(built)


@pytest.fixture(scope="module")
def plain():
    built = started()
    yield built
    built.close()


def always(built):
    """Return the engine such that all its passes verify guesses: which do depends on the clock."""
    built.drafting.mode = "always"
    return built


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
        check_schedules(always(built), requests, 200)
        assert built.counters.accepted_tokens > 0


def test_a_row_with_a_grammar_takes_no_guesses(engine, plain):
    with GrammarCompiler(TOKENIZER, TOKENIZER.size) as compiler:
        grammar = compiler.compile(GrammarSource("regex", "(ab){6}"), TOKENIZER.ends)
        asked = request(3, grammar=grammar, ends=TOKENIZER.ends, max_tokens=20, sampling=Sampling())
        before = engine.counters.guessed_tokens
        (result,) = engine.complete([asked])
    assert (result.text, engine.counters.guessed_tokens) == ("ab" * 6, before)


def random_modes(monkeypatch, seed):
    """Let each call verify guesses or not at random, as a balance may decide at any time."""
    draw, inner = random.Random(seed), Drafting.next_call

    def next_call(self, *args):
        self.mode = draw.choice(["always", "never"])
        return inner(self, *args)

    monkeypatch.setattr(Drafting, "next_call", next_call)


def share_of_first_guesses(built, plain, requests):
    """Stream the requests, require the texts without a draft, and return which guesses stood."""
    before, deltas = dataclasses.replace(built.counters), [[] for _ in requests]
    for each, parts in zip(requests, deltas, strict=True):
        built.submit(each, parts.append)
    while not built.is_idle:
        built.tick()
    for parts, other in zip(deltas, plain.complete(requests), strict=True):
        assert (joined(parts).ids, joined(parts).text) == (other.ids, other.text)
    counters = built.counters
    assert 0 < counters.guessed_passes - before.guessed_passes < counters.passes - before.passes
    assert counters.compiles == before.compiles
    return (counters.accepted[0] - before.accepted[0]) / (counters.drafts - before.drafts)


def test_a_draft_that_comes_and_goes_reads_what_it_missed(engine, drafted, plain, monkeypatch):
    requests = [*map(repeated, range(8)), *map(request, range(8))]
    with monkeypatch.context() as patch:
        random_modes(patch, 5)
        share_of_first_guesses(engine, plain, requests)
        drafted.prefixes.clear()
        for _ in range(2):  # the second time with kept beginnings, some of them read by the draft
            assert share_of_first_guesses(drafted, plain, requests) > 0.8
    always(engine), always(drafted)


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


def test_guesses_of_a_row_are_its_own():
    lookup = Lookup(3)
    state = RowTokens(jnp.zeros((2, 8), jnp.int32), jnp.zeros((2,), jnp.int32))
    one = jnp.array([5, 6, 7, 5, 6, 9, 9, 9])
    state = state._replace(ids=jnp.stack([one, one[::-1]]), length=jnp.array([5, 1]))
    assert state.guess(lookup.guesses)[0].tolist() == [7, 5, 6]


def test_a_guess_is_what_followed_the_longest_end_where_it_last_stood_before():
    """The reference is a loop over places, on rows of few ids; a repetitive row continues so."""
    rng, number = np.random.default_rng(0), 5
    ids = rng.integers(1, 4, (60, 20)).astype(np.int32)
    count = rng.integers(1, 21, 60).astype(np.int32)
    ids[0, :6], count[0] = (1, 2, 3, 1, 2, 3), 6
    guesses = np.asarray(RowTokens(jnp.asarray(ids), jnp.asarray(count)).guess(number))
    assert guesses[0].tolist() == [1, 2, 3, 1, 2]
    checked = 0
    for row, size, guess in zip(ids.tolist(), count, guesses, strict=True):
        output = row[:size]
        for length in (3, 2, 1):
            places = [
                n for n in range(length, size) if output[n - length : n] == output[size - length :]
            ]
            if places:
                rest = output[places[-1] :]
                assert guess.tolist() == [rest[n % len(rest)] for n in range(number)]
                checked += 1
                break
    assert checked > 50


@pytest.fixture(scope="module")
def with_heads():
    """An engine with two heads of its model, by their kind, and the model."""
    made_so_far = {}

    def of(kind):
        if kind not in made_so_far:
            blueprint, _ = made()
            config = dataclasses.replace(blueprint.config, mtp=MtpConfig(tokens=2, kind=kind))
            blueprint = Blueprint(config, Precision.of(PrecisionConfig(compute="float32")).exact)
            params = draw_params(blueprint, std=0.1)
            made_so_far[kind] = always(started(of=(blueprint, params), draft=DraftHeads(2)))
            made_so_far[kind].model = blueprint.merge(params)
        return made_so_far[kind]

    yield of
    for built in made_so_far.values():
        built.close()


def heads_alone(model, ids, allowed):
    """Return the likeliest allowed ids after each prefix of a text: [G, T], head k's in row k."""
    text = jnp.array([ids])
    positions, ones = jnp.arange(len(ids))[None], jnp.ones_like(text)

    @jax.jit
    def logits(text):
        stream = model.hidden(text, positions=positions).stream
        ahead = [(jnp.roll(text, -k, axis=1), positions + k < len(ids)) for k in (1, 2)]
        values, _ = model.mtp_hidden(stream, ahead, positions=positions, segments=ones)
        return jnp.stack([model.logits(each)[0] for each in values])

    return np.array(allowed)[np.asarray(logits(text))[..., np.array(allowed)].argmax(-1)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequential", "parallel"])
def test_texts_are_those_without_heads_which_guess_as_in_training(kind, with_heads, plain):
    """With caches, in chunks and after wrong guesses, heads compute what they do of whole texts."""
    built, allowed = with_heads(kind), (80, 81, 82)
    requests = [*map(request, range(8)), *map(repeated, range(8, 12))]
    check_texts(built, plain, requests)
    check_schedules(built, [request(seed) for seed in range(4)], 3)
    for seed, count in ((1, 2), (2, 9), (3, 25)):
        before = dataclasses.replace(built.counters)
        greedy = Sampling(temperature=0, bias=tuple((token, 1000.0) for token in allowed))
        prompt = request(seed).ids * 25
        asked = Request(ids=prompt[:count], max_tokens=CONTEXT - count, sampling=greedy)
        (result,) = built.complete([asked])
        text, newest = (*asked.ids, *result.ids), count - 1
        guesses, stood, passes = heads_alone(built.model, text, allowed), [0, 0], 0
        while newest < len(text) - 1:  # the newest id that the heads know in each pass
            passes, after, place = passes + 1, newest + 1, newest - 1
            for number in range(2):
                if after == len(text) - 1 or guesses[number, place] != text[after]:
                    break
                stood[number], after = stood[number] + 1, after + 1
            newest = after
        counters = built.counters
        assert counters.drafts - before.drafts == passes
        accepted = [a - b for a, b in zip(counters.accepted, before.accepted, strict=True)]
        assert (accepted, passes < len(result.ids)) == (stood, True)


def test_heads_guess_only_after_prompts_whose_stream_they_have_seen(with_heads, plain):
    built, drafting = with_heads("sequential"), with_heads("sequential").drafting
    asked = Request(ids=tuple(range(60, 61 + built.chunk)), max_tokens=12, top=1)
    (expected,) = plain.complete([asked])

    def drafts(read, drawn):
        """Return the guesses of a request, which is read in one mode and drawn in another."""
        before, parts = built.counters.drafts, []
        drafting.mode = read
        built.submit(asked, parts.append)
        built._admit()
        while built._read_chunk():
            pass
        drafting.mode = drawn
        while not built.is_idle:
            built.tick()
        assert joined(parts).ids == expected.ids
        return built.counters.drafts - before

    built.prefixes.clear()
    compiles = built.counters.compiles
    assert drafts("never", "always") == 0
    assert drafts("always", "always") > 0  # kept beginnings without a stream are read again
    cached = built.counters.cached_tokens
    assert drafts("never", "always") > 0
    assert built.counters.cached_tokens == cached + built.chunk
    assert built.counters.compiles == compiles
    always(built)


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
        check_texts(always(built), plain, [request(seed, top=3) for seed in range(24)])
        check_schedules(built, [request(seed) for seed in range(12)], 60)
        assert built.counters.accepted_tokens < built.counters.guessed_tokens
