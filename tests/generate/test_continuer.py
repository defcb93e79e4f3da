"""Continuations of many prompts: by the engine and in passes, of any number, in any order."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from jaxlm.generate import continuer, engine
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.continuer import Ask, Continuer, chunk_of
from jaxlm.generate.engine import COMPILED, EngineSettings
from jaxlm.generate.sampler import Sampler
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from tests.generate.test_engine import CONTEXT, TOKENIZER, made

LIMITS = GenerateConfig(prompts=(), max_tokens=12, stop=("\n", *"abcdefghijklm"))
SIZES = EngineSettings(rows=3, context=CONTEXT, chunk=16, prefix_bytes=2**20)


def asked(count):
    """Greedy and drawn continuations; every other prompt begins as the one before it."""
    draw = random.Random(0)
    ids = [draw.randrange(40, TOKENIZER.size) for _ in range(30)]
    starts = [[*ids[: 17 + number // 2], 60 + number] for number in range(count)]
    return [Ask(each, number, 0.9 * (number % 3)) for number, each in enumerate(starts)]


@pytest.fixture(scope="module")
def model():
    with jax.set_mesh(mesh.build(MeshConfig(), jax.devices()[:1])):
        yield made()


def test_texts_are_those_of_passes_in_any_order_and_compile_once(model, monkeypatch):
    blueprint, params = model
    asks, events = asked(11), []
    listener = lambda event, *_, **__: events.append(event)  # noqa: E731
    built = Continuer(blueprint, TOKENIZER, SIZES, LIMITS)
    texts = built.texts(params, asks)
    assert len({each.finish_reason for each in texts}) > 1
    assert all(each.log_probabilities is None for each in texts)
    order = np.random.default_rng(0).permutation(len(asks))[:7]
    others = jax.tree.map(lambda leaf: 2 * leaf, params)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        some = built.texts(params, [asks[number] for number in order])
        of_others = built.texts(others, asks)
        assert built.texts(params, []) == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert events.count(COMPILED) == 0
    assert some == [texts[number] for number in order]
    assert of_others != texts
    monkeypatch.setattr(continuer, "is_supported", lambda _: False)
    in_passes = Continuer(blueprint, TOKENIZER, dataclasses.replace(SIZES, rows=4), LIMITS)
    assert in_passes.texts(params, asks) == texts
    assert in_passes.texts(others, asks[:2]) == of_others[:2]


def test_a_prompt_that_is_read_both_ways_is_continued_as_by_the_sampler(model):
    blueprint, params = model
    asks = [each._replace(temperature=0.0) for each in asked(4)]
    both = Continuer(blueprint, TOKENIZER, SIZES, LIMITS, both_ways=True).texts(params, asks)
    config = dataclasses.replace(LIMITS, temperature=0.0)
    sampler = Sampler(config, blueprint, TOKENIZER, both_ways=True)
    ids = [each.ids for each in asks]
    keys = [jax.random.key(0)] * len(asks)
    assert [each.ids for each in both] == [
        each.ids for each in sampler.continue_rows(params, ids, keys)
    ]
    assert both != Continuer(blueprint, TOKENIZER, SIZES, LIMITS).texts(params, asks)


def test_a_mesh_that_splits_batches_has_passes(model):
    blueprint, _ = model
    assert engine.is_supported(blueprint)
    with jax.set_mesh(mesh.build(MeshConfig(), jax.devices()[:2])):
        assert not engine.is_supported(blueprint)


def test_prompts_are_read_in_chunks_of_their_size():
    cases = ([1], [17, 900], [15, 17, 18], [16, 18, 33], [40, 41], [500])
    assert [chunk_of(each) for each in cases] == [16, 64, 16, 32, 64, 64]
