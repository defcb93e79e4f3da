"""The engine: results do not depend on other requests, and equal those of other ways."""

import dataclasses
import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import backend
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.core.random import key
from jaxlm.data.batch import Tokens
from jaxlm.data.tokenizer import Bytes
from jaxlm.generate import decode, sampling, slots
from jaxlm.generate.draft import Lookup
from jaxlm.generate.engine import COMPILED, Engine, EngineSettings, check_supported
from jaxlm.generate.requests import QueueFull, Request, joined
from jaxlm.generate.rows import RowSettings, Sampling, draw_rows
from jaxlm.models.build import Blueprint
from jaxlm.models.families.deepseek import DeepSeekV2
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mistral
from jaxlm.models.families.phi3 import Phi3
from jaxlm.models.families.t5 import T5
from jaxlm.nn.rotary import LongScaling
from jaxlm.objectives import loss
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.rl.rollout import RolloutSampler, RolloutSizes
from tests.models.parameters import draw_params

TOKENIZER = Bytes()
SIZES = {"vocab": TOKENIZER.size, "width": 32, "depth": 2, "heads": 4}
CONTEXT = 48
FAMILIES = {
    "llama": Llama(**SIZES, kv_heads=2),
    "gpt2": GPT2(**SIZES, max_positions=CONTEXT),
    "mistral": Mistral(**SIZES, kv_heads=2, window=12),
    "deepseek_v2": DeepSeekV2(
        **SIZES, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8, experts=4, top_k=2, shared=32
    ),
}


def made(family="llama", compute="float32"):
    blueprint = Blueprint(
        FAMILIES[family].build(), Precision.of(PrecisionConfig(compute=compute)).exact
    )
    return blueprint, draw_params(blueprint, std=0.1)


def started(family="llama", compute="float32", of=None, draft=None, **more):
    """Its KV cache has blocks of 8 slots; `of` are a model and its parameters, by default made."""
    sizes = {"rows": 3, "context": CONTEXT, "chunk": 8, "prefix_bytes": 20_000, **more}
    settings = EngineSettings(**sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "BLOCK", 8)
        engine = Engine(*(of or made(family, compute)), TOKENIZER, settings, draft=draft)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def engine():
    built = started()
    yield built
    built.close()


def test_each_program_that_reads_the_weights_is_compiled_once():
    compiled = []

    def add(event, duration_secs, fun_name="", **more):
        if event == COMPILED:
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        with jax.set_mesh(mesh.build(MeshConfig(), jax.devices()[:1])):
            started().close()
    finally:
        jax.monitoring.unregister_event_duration_listener(add)
    # There are programs that draw in all slots, and in the first ones.
    for name, count in {"draw": 2, "score": 1, "read": 1}.items():
        assert compiled.count(f"jit({name})") == count, compiled


def closed(rows, compute):
    """An engine of heads of 64, and the function that returns the text of a compiled program."""
    config = Llama(vocab=TOKENIZER.size, width=128, depth=1, heads=2, kv_heads=2).build()
    blueprint = Blueprint(config, Precision.of(PrecisionConfig(compute=compute)))
    settings = EngineSettings(rows=rows, context=256)
    engine = Engine(blueprint, draw_params(blueprint, std=0.1), TOKENIZER, settings)
    engine.close()
    calls = dict(engine._largest_calls())
    return engine, lambda program: program.lower(*calls[program]).compile().as_text()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_no_pass_converts_a_cache(compute):
    """XLA converts arrays for products, and for writes, that it has only in another dtype."""
    engine, compiled = closed(8, compute)
    caches = {leaf.shape for leaf in jax.tree.leaves(engine._state.cache.layers)}
    assert caches == {(8, 2, 128, 64)}
    for program in (engine.programs.draw, engine.programs.draw_few, engine.programs.read):
        text = compiled(program)
        assert "[8,2,128,64]" in text
        assert not re.search(r"\[8,2,128,64\]\S* (convert|bitcast-convert)\(", text)


def request(seed, **changes):
    """A request in which everything depends on its seed."""
    draw = random.Random(seed)
    length = draw.randrange(1, 30)
    drawn = Request(
        ids=tuple(draw.randrange(40, TOKENIZER.size) for _ in range(length)),
        max_tokens=draw.randrange(1, 12),
        seed=seed,
        top=draw.choice([None, 3]),
        is_prompt_scored=draw.random() < 0.3,
        sampling=Sampling(
            temperature=draw.choice([0, 0.7, 1.5]),
            top_k=draw.choice([None, 5, 50]),
            top_p=draw.choice([None, 0.9]),
            min_p=draw.choice([None, 0.02]),
            repetition=draw.choice([1, 1.2]),
            presence=draw.choice([0, 0.3]),
            bias=draw.choice([(), ((70, 3.0),)]),
        ),
    )
    return dataclasses.replace(drawn, **changes)


def check_schedules(engine, requests, count):
    """Require of each request the result that it has alone, in several orders of arrival.

    Alone it has many passes in a call of the device, and one otherwise.
    """
    ends = tuple(range(40, 60))
    requests = [dataclasses.replace(each, ends=ends[: 10 * (each.seed % 3)]) for each in requests]
    alone = [engine.complete([each])[0] for each in requests]
    compiled = engine.counters.compiles
    for schedule in range(count):
        draw = random.Random(schedule)
        order, deltas, others = [*range(len(requests))], [[] for _ in requests], []
        draw.shuffle(order)
        while order or not engine.is_idle:
            while order and draw.random() < 0.5:
                number = order.pop()
                engine.submit(requests[number], deltas[number].append)
            if draw.random() < 0.1:
                others.append(engine.submit(request(1000 + draw.randrange(50)), [].append))
            if others and draw.random() < 0.3:
                engine.cancel(others.pop())
            engine.tick()
        assert [joined(each) for each in deltas] == alone, schedule
    assert engine.counters.compiles == compiled


def test_a_result_has_the_same_bits_in_any_company_and_nothing_compiles(engine):
    before = engine.counters.compiles
    check_schedules(engine, [request(seed) for seed in range(8)], 10)
    assert engine.counters.compiles == before == 0


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_has_the_same_bits_in_200_schedules(family, compute):
    built = started(family, compute)
    check_schedules(built, [request(seed) for seed in range(24)], 200)
    built.close()


def counted(engine, monkeypatch):
    """Count the calls of the programs that draw in all slots, and in the first ones."""
    calls = {"draw": 0, "draw_few": 0}

    def counting(name):
        program = getattr(engine.programs, name)

        def call(*inputs):
            calls[name] += 1
            return program(*inputs)

        return call

    programs = dataclasses.replace(engine.programs, **{name: counting(name) for name in calls})
    monkeypatch.setattr(engine, "programs", programs)
    return calls


def test_few_requests_are_drawn_by_the_programs_of_the_first_slots(engine, monkeypatch):
    """A request in a later slot is drawn by those of all slots until it ends."""
    monkeypatch.setattr(engine, "draws_few", True)
    calls = counted(engine, monkeypatch)
    lengths = (3, 5, 8)  # of requests in the slots 0 to 2
    for seed, length in enumerate(lengths[:2]):
        engine.submit(Request(ids=(50 + seed,), max_tokens=length, seed=seed), [].append)
    while not engine.is_idle:
        engine.tick()
    assert calls == {"draw": 0, "draw_few": 5}
    for seed, length in enumerate(lengths):
        engine.submit(Request(ids=(50 + seed,), max_tokens=length, seed=seed), [].append)
    while not engine.is_idle:
        engine.tick()
    assert calls == {"draw": 8, "draw_few": 5}


@pytest.mark.parametrize(("name", "draft"), [("draw_few", None), ("draw_few_guessed", Lookup(3))])
def test_programs_of_the_first_slots_with_other_bits_are_not_used(name, draft, monkeypatch):
    """Some processor may sum the products of few rows in another order."""
    engine, are_used = started(draft=draft), []
    same = {"draw_few": engine.programs.draw, "draw_few_guessed": engine.programs.draw_guessed}

    def rounded(*inputs):
        state, drawn = same[name](*inputs)
        scores = drawn.scores._replace(top=drawn.scores.top * (1 + 2**-23))
        return state, drawn._replace(scores=scores)

    monkeypatch.setattr(slots, "compile_at_once", lambda calls: None)
    for changes in (same, same | {name: rounded}):
        programs = dataclasses.replace(engine.programs, **changes)
        monkeypatch.setattr(engine, "programs", programs)
        engine.warm_up()
        are_used.append(engine.draws_few)
    assert are_used == [True, False]
    if draft is None:
        calls = counted(engine, monkeypatch)
        engine.complete([request(2)])
        assert not calls["draw_few"]
        assert calls["draw"]
    engine.close()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_products_of_the_first_slots_have_no_other_rows(compute, tmp_path, monkeypatch):
    """But for weights in float32 on an AMD with AVX-512: see `row_product`."""
    monkeypatch.setattr(backend, "CPUINFO", tmp_path / "cpuinfo")
    backend.CPUINFO.write_text(backend.AVX2)
    engine, compiled = closed(13, compute)  # products of two slots may be padded to 8 rows

    def shapes(program):
        products = re.findall(r" = \w+\[([\d,]+)\]\S* dot\(", compiled(program))
        return [{int(size) for size in each.split(",")} for each in products]

    all_slots, few = shapes(engine.programs.draw), shapes(engine.programs.draw_few)
    assert len(all_slots) == len(few) >= 10
    assert all(13 in each for each in all_slots)
    assert not any(13 in each for each in few)


def test_the_same_seed_gives_the_text_of_jaxlm_generate(engine):
    """Greedy and drawn, where the logits do not nearly tie: the shapes of the two differ."""
    blueprint, params = made()
    prompts = [request(seed).ids for seed in range(3)]
    padded = np.zeros((3, 32), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    allowed = jnp.asarray(TOKENIZER.token_bytes > 0)
    for settings in ({"temperature": 0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.8}):
        other = decode.build(
            blueprint.merge,
            functools.partial(sampling.draw, **settings),
            max_tokens=8,
            ends=(),
            pad=0,
            allowed=allowed,
        )
        keys = jnp.stack([key(seed, "sample") for seed in range(3)])
        expected = jax.jit(other)(params, padded, np.array([len(p) for p in prompts]), keys).ids
        requests = [
            Request(ids=ids, max_tokens=8, seed=seed, sampling=Sampling(**settings))
            for seed, ids in enumerate(prompts)
        ]
        assert [list(each.ids) for each in engine.complete(requests)] == expected.tolist()


def test_the_engine_draws_the_samples_of_a_rollout(engine):
    """The same key gives the same ids: both draw from one distribution by one rule of keys."""
    numbers, size = range(6), 10
    requests = [
        Request(
            ids=tuple(range(60, 65 + number)),
            max_tokens=size,
            sampling=Sampling(temperature=1.3),
            seed=number,
            ends=tuple(TOKENIZER.ends),
        )
        for number in numbers
    ]
    blueprint, params = made()
    sampler = RolloutSampler(blueprint, TOKENIZER, RolloutSizes(4, 12, size), 1.3)
    prompts = [np.array(each.ids, np.int32) for each in requests]
    drawn = sampler.draw(params, prompts, jnp.stack([key(n, "sample") for n in numbers]))
    for one, other in zip(engine.complete(requests), drawn, strict=True):
        ended = other.reason == "eos_token"
        assert (one.ids, one.reason) == (tuple(other.ids[: -1 if ended else None]), other.reason)


def test_scores_are_those_of_the_evaluation_step(engine):
    blueprint, params = made()
    asked = request(3, top=2, is_prompt_scored=True, max_tokens=10, sampling=Sampling())
    (result,) = engine.complete([asked])
    ids = np.array([*asked.ids, *result.ids], np.int32)
    ones = np.ones(len(ids) - 1, np.int32)
    fields = ids[:-1], ids[1:], ones.astype(np.float32), ones, np.arange(len(ids) - 1)
    batch = Tokens(*(jnp.asarray(each)[None] for each in fields))

    @jax.jit
    def evaluated(params):
        model = blueprint.merge(params)
        largest = jnp.abs(model(jnp.asarray(ids)[None])).max()
        return -loss.score(model, batch, None, 16)[0].nll[0], largest

    expected, largest = evaluated(params)
    scores = [each.log_probability for each in result.prompt_scores + result.scores]
    bound = 1e-6 * float(largest)
    np.testing.assert_allclose(scores, expected, atol=bound, rtol=0)
    assert [each.id for each in result.prompt_scores] == list(asked.ids[1:])
    assert all(len(each.top) == 2 and each.top[0][1] >= each.top[1][1] for each in result.scores)


def test_rows_are_drawn_as_by_one_setting_for_all():
    logits = 3 * jax.random.normal(jax.random.key(1), (2, 50))
    keys = jax.random.split(jax.random.key(2), 2)
    cases = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 4, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    ]
    draw, on = jax.jit(draw_rows), jnp.ones(2, bool)
    for first, second in zip(cases[::2], cases[1::2], strict=True):
        rows = [RowSettings.of(Sampling(**case)) for case in (first, second)]
        settings = RowSettings(*map(jnp.stack, zip(*rows, strict=True)))
        drawn = draw(logits, keys, settings, on)
        expected = [
            sampling.draw(logits, keys, **case)[i] for i, case in enumerate((first, second))
        ]
        assert drawn.tolist() == [int(each) for each in expected]


def test_v22_a_canceled_request_frees_its_slot_within_one_tick(engine):
    deltas = [[] for _ in range(4)]
    tickets = [
        engine.submit(request(seed, max_tokens=12), each.append) for seed, each in enumerate(deltas)
    ]
    engine.tick()
    assert (engine.running, engine.waiting) == (3, 1)
    engine.cancel(tickets[0])
    engine.cancel(tickets[3])
    engine.tick()
    assert deltas[0][-1].reason == deltas[3][-1].reason == "cancelled"
    assert (engine.running, engine.waiting, engine.waiting_tokens) == (2, 0, 0)
    while not engine.is_idle:
        engine.tick()
    assert joined(deltas[1]) == engine.complete([request(1, max_tokens=12)])[0]


@pytest.mark.slow
def test_a_deadline_ends_a_request_with_the_text_so_far(engine, monkeypatch):
    deltas, clock = [], [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    engine.submit(request(1, max_tokens=12, deadline=5.0), deltas.append)
    for _ in range(6):
        engine.tick()
    clock[0] += 6
    engine.tick()
    assert joined(deltas).reason == "deadline"
    assert 0 < len(joined(deltas).ids) < 12


def test_a_call_of_many_passes_ends_when_a_slot_is_free_for_a_request_that_waits(engine):
    greedy = Sampling(temperature=0)
    lengths, deltas = (2, 9, 9, 3), []
    for seed, length in enumerate(lengths):
        asked = Request(ids=(50 + seed,), max_tokens=length, seed=seed, sampling=greedy)
        engine.submit(asked, deltas.append)
    before = engine.counters.passes
    engine.tick(passes=32)
    assert (engine.counters.passes - before, engine.running, engine.waiting) == (2, 2, 1)
    engine.tick(passes=32)
    assert (engine.counters.passes - before, engine.is_idle) == (9, True)
    assert sum(len(each.ids) for each in deltas) == sum(lengths)


def test_a_stream_waits_for_one_chunk_of_other_prompts_between_two_tokens(engine):
    """With 8 clients two chunks made longer gaps and drew fewer tokens (scripts/LOG.md)."""
    engine.submit(Request(ids=(50,), max_tokens=8, seed=3), lambda delta: None)
    for seed in range(2):
        ids = tuple(range(60 + seed, 85 + seed))
        engine.submit(Request(ids=ids, max_tokens=1, seed=seed), lambda delta: None)
    counts = []
    while not engine.is_idle:
        before = engine.counters.chunks, engine.counters.passes
        engine.tick()
        counts.append((engine.counters.chunks - before[0], engine.counters.passes - before[1]))
    assert counts[:4] == [(1, 1)] * 4, "more may be kept from other tests"
    assert all(chunks <= 1 and passes == 1 for chunks, passes in counts)


def test_a_text_ends_before_its_stop_and_no_delta_has_a_part_of_it(engine):
    whole = engine.complete([request(5, max_tokens=12, sampling=Sampling(temperature=0))])[0]
    raw = b"".join(TOKENIZER.table[each] for each in whole.ids)
    stop = raw[6:8]
    deltas = []
    asked = request(5, max_tokens=12, stop=(stop,), sampling=Sampling(temperature=0))
    engine.submit(asked, deltas.append)
    while not engine.is_idle:
        engine.tick()
    cut = raw[: raw.index(stop)]
    assert joined(deltas).text == cut.decode("utf-8", "replace")
    assert joined(deltas).reason == "stop_sequence"
    assert all(each.text for each in deltas[:-1])


def test_v26_a_row_that_is_not_finite_ends_alone_and_its_slot_is_clean(engine):
    requests = [request(seed, max_tokens=6) for seed in range(3)]
    expected = engine.complete(requests)
    deltas = [[] for _ in requests]
    for each, parts in zip(requests, deltas, strict=True):
        engine.submit(each, parts.append)
    for _ in range(12):
        engine.tick()
        if any(part for part in deltas[0]):
            break
    layers = jax.tree.map(lambda x: x.at[0].set(jnp.nan), engine._state.cache.layers)
    engine._state = engine._state._replace(cache=engine._state.cache._replace(layers=layers))
    while not engine.is_idle:
        engine.tick()
    results = [joined(each) for each in deltas]
    assert results[0].reason == "error"
    assert results[1:] == expected[1:]
    assert engine.complete(requests) == expected


def test_v26_a_failed_pass_ends_what_runs_and_a_second_one_is_raised(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("the pass failed")

    expected = engine.complete([request(2)])
    broken = dataclasses.replace(engine.programs, draw=fail, draw_few=fail)
    deltas = []
    engine.submit(request(2), deltas.append)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "programs", broken)
        for _ in range(5):
            engine.tick()
        assert joined(deltas).reason == "error"
        engine.submit(request(2), deltas.append)
        with pytest.raises(RuntimeError, match="the pass failed"):
            for _ in range(5):
                engine.tick()
    engine._state = engine.programs.empty()
    engine.counters.failures, engine.failure = 0, None
    assert engine.complete([request(2)]) == expected


def test_a_full_queue_and_a_request_that_does_not_fit_are_refused(engine, monkeypatch):
    monkeypatch.setattr(engine, "max_waiting", 40)
    engine.submit(request(0, ids=(50,) * 30, max_tokens=5), [].append)
    with pytest.raises(QueueFull) as refused:
        engine.submit(request(0, ids=(50,) * 30, max_tokens=5), [].append)
    assert refused.value.seconds >= 1
    with pytest.raises(ValueError, match="do not fit"):
        engine.submit(request(0, ids=(50,) * 30, max_tokens=30), [].append)
    while not engine.is_idle:
        engine.tick()
    (result,) = engine.complete([request(1, max_tokens=0, top=1, is_prompt_scored=True)])
    assert (result.ids, result.reason) == ((), "length")
    assert len(result.prompt_scores) == len(request(1).ids) - 1


def test_a_prompt_that_begins_as_an_earlier_one_has_the_same_bits_and_is_read_from_there(engine):
    """Only with the same salt; a prompt whose scores are returned is read as a whole."""
    first = request(1, ids=tuple(range(50, 80)), salt="a", is_prompt_scored=False)
    longer = request(2, ids=(*range(50, 75), 90, 91), salt="a", is_prompt_scored=False)
    engine.prefixes.clear()
    expected = engine.complete([longer])
    engine.prefixes.clear()

    def cached(each):
        before = engine.counters.cached_tokens
        engine.complete([each])
        return engine.counters.cached_tokens - before

    assert [cached(each) for each in (first, first, longer)] == [0, 24, 24]
    assert engine.complete([longer]) == expected
    assert cached(dataclasses.replace(longer, salt="b")) == 0
    assert cached(dataclasses.replace(longer, top=1, is_prompt_scored=True)) == 0
    for number in range(50):
        engine.complete([request(3, ids=(40 + number,) * 20, max_tokens=1)])
        assert engine.prefixes.size <= 20_000
    assert cached(first) == 0


def test_an_encoder_and_rotary_frequencies_of_the_length_are_refused():
    scaling = LongScaling(short=(1.0,) * 4, long=(2.0,) * 4, original=8)
    long = Phi3(vocab=40, width=32, depth=2, heads=4, rope_scaling=scaling)
    for family in (T5(**SIZES), long):
        blueprint = Blueprint(family.build(), Precision.float32())
        with pytest.raises(ConfigError, match="does not support this model"):
            Engine(blueprint, {}, TOKENIZER, EngineSettings())


def test_a_mesh_that_splits_batches_is_refused():
    blueprint = Blueprint(Llama(**SIZES).build(), Precision.float32())
    with jax.set_mesh(mesh.build(MeshConfig(data=2), jax.devices()[:2])):
        with pytest.raises(ConfigError, match="splits batches") as refused:
            check_supported(blueprint)
    assert refused.value.fix == "--cpu_devices=1"


def test_an_engine_that_owns_its_parameters_deletes_what_no_program_reads(engine):
    blueprint, params = made()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    settings = EngineSettings(rows=3, context=CONTEXT, chunk=8, keeps_params=False)
    owner = Engine(blueprint, params, TOKENIZER, settings, programs=engine.programs)
    owner.close()
    left = sum(leaf.nbytes for leaf in jax.tree.leaves(params) if not leaf.is_deleted())
    assert left < 0.4 * size
    assert owner.complete([request(1), request(2)]) == engine.complete([request(1), request(2)])
