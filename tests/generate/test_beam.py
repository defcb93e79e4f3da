"""Beam search equals one written out in NumPy over the full forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.generate import beam, decode
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from tests.models.parameters import draw_params

VOCAB, END, PAD, LENGTH = 12, 2, 0, 6
PROMPTS = [[5, 6, 7], [8], [9, 10]]


@pytest.fixture(scope="module")
def model():
    blueprint = Blueprint(
        Llama(vocab=VOCAB, width=32, depth=1, heads=4, kv_heads=2).build(), Precision.float32()
    )
    params = draw_params(blueprint, 3, std=0.06)

    @jax.jit
    def forward(tokens):
        model = blueprint.merge(params)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        logits = model.logits(model.hidden(tokens, positions=positions).values)[0]
        return jax.nn.log_softmax(logits)

    def scores(ids):
        padded = jnp.asarray([ids + [PAD] * (10 - len(ids))], jnp.int32)
        return np.asarray(forward(padded)[len(ids) - 1], np.float64)

    return blueprint, params, scores


def searched(scores, prompt, beams, penalty):
    """(score, ids) of the best, and of each token its log-probability."""
    going_on, ended = [(0.0, [], [])], []
    for size in range(1, LENGTH + 1):
        every = sorted(
            (
                (total + score, [*ids, token], [*each, score])
                for total, ids, each in going_on
                for token, score in enumerate(scores(prompt + ids))
            ),
            key=lambda text: -text[0],
        )[: 2 * beams]
        done = [text[1][-1] == END or size == LENGTH for text in every]
        ended += [
            (total / size**penalty, ids, each)
            for (total, ids, each), is_done in zip(every[:beams], done, strict=False)
            if is_done
        ]
        ended = sorted(ended, key=lambda text: -text[0])[:beams]
        going_on = [text for text, is_done in zip(every, done, strict=True) if not is_done][:beams]
        if not going_on:
            break
        if len(ended) == beams and going_on[0][0] / size**penalty <= ended[-1][0]:
            break
    return ended[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(("beams", "penalty"), [(2, 1.0), (4, 0.0), (3, 2.0)])
def test_the_best_text_is_that_of_the_search_written_out(model, beams, penalty):
    blueprint, params, scores = model
    run = beam.build(
        blueprint.merge, beams=beams, length_penalty=penalty, max_tokens=LENGTH, ends=[END], pad=PAD
    )
    padded = np.array([prompt + [PAD] * (3 - len(prompt)) for prompt in PROMPTS], np.int32)
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    out = jax.tree.map(np.asarray, jax.jit(run)(params, padded, lengths, None))
    texts = []
    for row, prompt in enumerate(PROMPTS):
        _, ids, each = searched(scores, prompt, beams, penalty)
        count = out.length[row]
        assert out.ids[row, :count].tolist() == ids
        assert set(out.ids[row, count:].tolist()) <= {PAD}
        np.testing.assert_allclose(out.log_probabilities[row, :count], each, atol=2e-5)
        assert out.reason[row] == (decode.END if ids[-1] == END else decode.LENGTH)
        texts.append(ids)
    if penalty == 0.0:  # where short texts win, some are
        assert min(map(len, texts)) < LENGTH
