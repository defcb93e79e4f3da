import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.generate import decode, sampling, text_stream
from jaxlm.generate.sampling import Penalties
from jaxlm.models.build import Blueprint
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from tests.models.parameters import draw_params

VOCAB, END, PAD = 40, 2, 0
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]


FAMILIES = {
    "llama": Llama(vocab=VOCAB, width=32, depth=2, heads=4, kv_heads=2),
    "gpt2": GPT2(vocab=VOCAB, width=32, depth=2, heads=4, max_positions=64),
}


def made(name):
    blueprint = Blueprint(FAMILIES[name].build(), Precision.float32())
    return blueprint, draw_params(blueprint, std=0.1)


@pytest.fixture(scope="module", params=FAMILIES)
def built(request):
    return made(request.param)


@pytest.fixture(scope="module")
def llama():
    return made("llama")


def program(blueprint, params, *, max_tokens=8, ends=(END,), temperature=0.0, **how):
    """Compiled continuation of prompts, for one number and length of prompts.

    Args:
      blueprint, params: the model.
      max_tokens: number of new tokens.
      ends: ids that end a text.
      temperature: temperature of the draws.
    """
    draw = functools.partial(sampling.draw, temperature=temperature)
    built = decode.build(blueprint.merge, draw, max_tokens=max_tokens, ends=ends, pad=PAD, **how)
    compiled = jax.jit(built)

    def run(prompts, seeds=(0, 1, 2)):
        padded = np.full((len(prompts), max(map(len, PROMPTS))), PAD, np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        keys = jnp.stack([jax.random.key(seed) for seed in seeds[: len(prompts)]])
        return jax.tree.map(np.asarray, compiled(params, padded, lengths, keys))

    return run


def rows(out):
    return [ids[:n].tolist() for ids, n in zip(out.ids, out.length, strict=True)]


def generate(blueprint, params, prompts, **how):
    return rows(program(blueprint, params, **how)(prompts))


def greedy(blueprint, params, prompt, count, known=0):
    """The full forward, a token at a time, padded so that one program does for all lengths.

    The first `known` tokens are read both ways.

    Args:
      blueprint, params: the model.
      prompt: ids of the prompt.
      count: number of new tokens.
      known: number of tokens that are read both ways.
    """

    @jax.jit
    def forward(params, tokens):
        model = blueprint.merge(params)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        reach = jnp.maximum(positions, known - 1)
        return model.logits(model.hidden(tokens, positions=positions, visible_until=reach).values)[
            0
        ]

    length = max(map(len, PROMPTS)) + count
    ids = list(prompt)
    for _ in range(count):
        tokens = jnp.asarray([ids + [PAD] * (length - len(ids))], jnp.int32)
        ids.append(int(forward(params, tokens)[len(ids) - 1].argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        (backend.AVX2, backend.AVX512, backend.INTEL, backend.AMX),
        (backend.AVX2, backend.AVX512, backend.INTEL),
        (backend.AVX2, backend.AVX512),
        (backend.AVX2,),
        (),
    ],
)
def test_a_batch_of_uneven_prompts_is_the_full_forward_of_each(built, words, tmp_path, monkeypatch):
    """In any layout of the weights, and with either factor of a product first."""
    monkeypatch.setattr(backend, "CPUINFO", tmp_path / "cpuinfo")
    backend.CPUINFO.write_text(" ".join(words))
    out = generate(*built, PROMPTS)
    assert out == [greedy(*built, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(row) for row in out}) == 3


@pytest.mark.slow
def test_prompts_are_read_both_ways_where_that_is_asked_for(llama):
    out = generate(*llama, PROMPTS[:1], both_ways=True)
    assert out == [greedy(*llama, PROMPTS[0], 8, known=len(PROMPTS[0]))]
    assert out != generate(*llama, PROMPTS[:1])


def test_a_row_ends_with_the_end_token_and_the_others_go_on(llama):
    whole = generate(*llama, PROMPTS, ends=())
    end = whole[0][2]
    out = generate(*llama, PROMPTS, ends=(end,))
    for row, full in zip(out, whole, strict=True):
        stop = full.index(end) + 1 if end in full else len(full)
        assert row == full[:stop]
    assert len(out[0]) <= 3


@pytest.mark.slow
def test_any_of_several_ends_ends_a_row(llama):
    whole = generate(*llama, PROMPTS, ends=())
    ends = (whole[0][4], whole[1][2])
    out = generate(*llama, PROMPTS, ends=ends)
    for row, full in zip(out, whole, strict=True):
        stop = next((n for n, i in enumerate(full, 1) if i in ends), len(full))
        assert row == full[:stop]
    assert (len(out[0]) <= 5, len(out[1]) <= 3) == (True, True)


@pytest.mark.slow
def test_ids_that_are_not_allowed_are_never_drawn(llama):
    allowed = jnp.asarray([i % 2 == 0 for i in range(VOCAB)])
    out = generate(*llama, PROMPTS, temperature=2.0, allowed=allowed, ends=())
    assert {i % 2 for row in out for i in row} == {0}


def test_a_seed_draws_the_same_text_alone_in_a_batch_and_at_any_place_in_it(llama):
    run = program(*llama, temperature=1.5, ends=())
    batch = rows(run(PROMPTS, (4, 5, 6)))
    assert batch == rows(run(PROMPTS[::-1], (6, 5, 4)))[::-1]
    assert batch[1:2] == rows(run(PROMPTS[1:2], (5,)))
    other = rows(run(PROMPTS, (4, 7, 6)))
    assert [a == b for a, b in zip(batch, other, strict=True)] == [True, False, True]


@pytest.fixture(scope="module")
def forward(llama):
    """Logits of the full forward in float64, padded so that one program does for all lengths."""
    blueprint, params = llama

    @jax.jit
    def compiled(tokens):
        model = blueprint.merge(params)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return model.logits(model.hidden(tokens, positions=positions).values)[0]

    def logits(ids):
        padded = jnp.asarray([ids + [PAD] * (16 - len(ids))], jnp.int32)
        return np.asarray(compiled(padded)[: len(ids)], np.float64)

    return logits


@pytest.mark.few(1)
@pytest.mark.parametrize("is_int8", [False, True])
def test_penalties_and_log_probabilities_are_those_of_the_numbers_written_out(
    llama, forward, is_int8
):
    """The reference is a float64 loop over the full forward.

    With an int8 cache log-probabilities are within 0.15 nats here.
    """
    penalties = Penalties(repetition=1.3, presence=0.2, frequency=0.4)
    out = program(*llama, penalties=penalties, ends=(), is_scored=True, is_int8=is_int8)(PROMPTS)
    for prompt, drawn, values in zip(PROMPTS, rows(out), out.log_probabilities, strict=True):
        every = forward(prompt + drawn)[len(prompt) - 1 : -1]
        exact = every - np.log(np.exp(every).sum(-1, keepdims=True))
        expected = exact[np.arange(len(drawn)), drawn]
        np.testing.assert_allclose(values, expected, atol=0.15 if is_int8 else 5e-5)
        for place, (chosen, logits) in enumerate(zip(drawn, every, strict=True)):
            for i in range(VOCAB):
                if i in prompt + drawn[:place]:
                    logits[i] = logits[i] / 1.3 if logits[i] > 0 else logits[i] * 1.3
                count = drawn[:place].count(i)
                logits[i] -= 0.2 * (count > 0) + 0.4 * count
            assert is_int8 or chosen == logits.argmax()


def test_a_row_stops_at_its_stop_and_others_go_on(llama):
    table = [bytes([97 + i % 26]) * (i % 3) for i in range(VOCAB)]
    whole = generate(*llama, PROMPTS, ends=())
    stop = b"".join(table[i] for i in whole[0])[3:6]
    states = jnp.asarray(text_stream.stop_automaton([stop], table))
    out = program(*llama, ends=(), stops=states, is_scored=True)(PROMPTS)
    for row, ids in enumerate(whole):
        texts = [b"".join(table[i] for i in ids[:n]) for n in range(len(ids) + 1)]
        first = next((n for n, text in enumerate(texts) if stop in text), None)
        count = len(ids) if first is None else first
        assert out.length[row] == count
        assert out.reason[row] == (decode.LENGTH if first is None else decode.STOP)
        assert out.ids[row].tolist() == ids[:count] + [PAD] * (len(ids) - count)
        assert not out.log_probabilities[row, count:].any()
    assert out.reason[0] == decode.STOP
    assert decode.LENGTH in out.reason


@pytest.mark.slow
def test_no_step_is_made_once_all_rows_have_ended(llama):
    made = []

    def draw(logits, keys):
        jax.debug.callback(lambda: made.append(1))
        return jnp.full(logits.shape[:1], END, jnp.int32)

    built = decode.build(llama[0].merge, draw, max_tokens=50, ends=(END,), pad=PAD)
    keys = jax.random.split(jax.random.key(0))
    out = jax.jit(built)(llama[1], jnp.ones((2, 4), jnp.int32), jnp.array([4, 2]), keys)
    jax.effects_barrier()
    assert (out.length.tolist(), out.reason.tolist(), len(made)) == ([1, 1], [decode.END] * 2, 1)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("is_prepared", [True, False])
def test_some_tokens_at_a_time_are_the_tokens_of_one_program(built, monkeypatch, is_prepared):
    """Weights that need no preparation, as on accelerators, are not copied."""
    monkeypatch.setattr(decode, "needs_relayout", lambda: is_prepared)
    blueprint, params = built
    whole = program(blueprint, params, temperature=1.3, ends=(END,), is_scored=True)(PROMPTS)
    draw = functools.partial(sampling.draw, temperature=1.3)
    how = dict(max_tokens=8, ends=(END,), pad=PAD, is_scored=True)
    parts = decode.build(blueprint.merge, draw, **how).compiled()
    ready = parts.prepare(params)
    assert (ready is params) == (not is_prepared)
    prompts = np.full((3, 5), PAD, np.int32)
    for row, prompt in zip(prompts, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    keys = jnp.stack([jax.random.key(seed) for seed in (0, 1, 2)])
    state = parts.start(ready, prompts, jnp.asarray([*map(len, PROMPTS)], jnp.int32), keys)
    for until in (2, 3, 6, 8):
        state = parts.decode_until(ready, state, keys, jnp.int32(until))
        collected = decode.collect(state)
        np.testing.assert_array_equal(collected.ids[:, :until], whole.ids[:, :until])
    # What is not an id comes of two programs, which add up in orders of their own.
    for ours, theirs in zip(collected, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5)
