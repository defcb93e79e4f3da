import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.generate import decode, sampling
from jaxlm.models.build import Blueprint
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama

VOCAB, END, PAD = 40, 2, 0
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def built(request):
    family = {
        "llama": Llama(vocab=VOCAB, width=32, depth=2, heads=4, kv_heads=2),
        "gpt2": GPT2(vocab=VOCAB, width=32, depth=2, heads=4, context=64),
    }[request.param]
    blueprint = Blueprint(family.build(), Precision.float32())
    params = jax.tree.map(lambda x: 5 * x, jax.jit(blueprint.init)(jax.random.key(0)))
    return blueprint, params


def generate(blueprint, params, prompts, *, max_tokens=8, end=END, temperature=0.0, seed=0, **how):
    longest = max(map(len, prompts))
    padded = np.full((len(prompts), longest), PAD, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    draw = functools.partial(sampling.draw, temperature=temperature)
    run = decode.build(blueprint.merge, draw, max_tokens=max_tokens, end=end, pad=PAD, **how)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    out = jax.jit(run)(params, padded, lengths, jax.random.key(seed))
    return [
        ids[:n].tolist() for ids, n in zip(np.asarray(out.ids), np.asarray(out.length), strict=True)
    ]


def greedy(blueprint, params, prompt, count, known=0):
    """The full forward, a token at a time; what follows is unseen padding, so that one program does for all lengths.

    The first `known` tokens are read both ways.
    """

    @jax.jit
    def forward(params, tokens):
        model = blueprint.merge(params)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        reach = jnp.maximum(positions, known - 1)
        return model.logits(model(tokens, positions=positions, reach=reach).values)[0]

    length = max(map(len, PROMPTS)) + count
    ids = list(prompt)
    for _ in range(count):
        tokens = jnp.asarray([ids + [PAD] * (length - len(ids))], jnp.int32)
        ids.append(int(forward(params, tokens)[len(ids) - 1].argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


def test_a_batch_of_uneven_prompts_is_the_full_forward_of_each(built):
    out = generate(*built, PROMPTS)
    assert out == [greedy(*built, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(row) for row in out}) == 3


def test_prompts_are_read_both_ways_where_that_is_asked_for(built):
    out = generate(*built, PROMPTS[:1], both_ways=True)
    assert out == [greedy(*built, PROMPTS[0], 8, known=len(PROMPTS[0]))]
    assert out != generate(*built, PROMPTS[:1])


def test_a_row_ends_with_the_end_token_and_the_others_go_on(built):
    whole = generate(*built, PROMPTS, end=-1)
    end = whole[0][2]
    out = generate(*built, PROMPTS, end=end)
    for row, full in zip(out, whole, strict=True):
        stop = full.index(end) + 1 if end in full else len(full)
        assert row == full[:stop]
    assert len(out[0]) <= 3


def test_ids_that_are_not_allowed_are_never_drawn(built):
    allowed = jnp.asarray([i % 2 == 0 for i in range(VOCAB)])
    out = generate(*built, PROMPTS, temperature=2.0, allowed=allowed, end=-1)
    assert {i % 2 for row in out for i in row} == {0}


def test_a_seed_draws_the_same_text_and_another_seed_another(built):
    first, again, other = (
        generate(*built, PROMPTS, temperature=1.5, seed=seed, end=-1) for seed in (0, 0, 1)
    )
    assert first == again != other
