import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core.errors import DataError
from jaxlm.data.batch import Tokens
from jaxlm.data.loader import shuffled
from jaxlm.evals import loss
from jaxlm.evals.loss import Reliability, bin_sums
from jaxlm.models.backbone import Hidden

ROWS, LENGTH, VOCAB = 23, 6, 11
RNG = np.random.default_rng(1)
TABLE = (RNG.normal(size=(VOCAB, VOCAB)) * 2).astype(np.float32)
BYTES = RNG.integers(0, 5, VOCAB).astype(np.int32)


class Bigram(nnx.Module):
    """Scores the next id by the present one."""

    config = SimpleNamespace(has_ring=False)

    def __init__(self, table):
        self.table = nnx.Param(table)

    def read(self, batch, *, key, parts):
        values = jax.nn.one_hot(batch.tokens, VOCAB)
        return Hidden(values, None, {}, values)

    def logits(self, hidden):
        return hidden @ self.table[...]


IDS = RNG.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
WEIGHTS = (RNG.random((ROWS, LENGTH)) < 0.7).astype(np.float32)


def batches(size):
    ones = np.ones((size, LENGTH), np.int32)
    for at in range(0, ROWS, size):
        pad = [(0, size - len(IDS[0, at : at + size])), (0, 0)]
        tokens, targets, weights = (
            np.pad(x[at : at + size], pad) for x in (IDS[0], IDS[1], WEIGHTS)
        )
        yield Tokens(tokens=tokens, targets=targets, weights=weights, segments=ones, positions=ones)


def result(size, chunk=None, microbatches=1):
    step = jax.jit(loss.build(Bigram, BYTES, chunk=chunk, microbatches=microbatches))
    return loss.evaluate(
        lambda batch: step(jnp.asarray(TABLE), batch), batches(size), jax.device_put
    )


def test_the_record_is_that_of_a_float64_reference():
    logits = TABLE.astype(np.float64)[IDS[0]]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = -(np.take_along_axis(log_p, IDS[1][..., None], -1)[..., 0] * WEIGHTS).sum(-1)
    nll = rows.sum()
    tokens, size = int(WEIGHTS.sum()), int(BYTES[IDS[1]][WEIGHTS > 0].sum())
    record = result(7).record()
    assert (record["tokens"], record["bytes"]) == (tokens, size)
    assert record["loss_nats"] == pytest.approx(nll / tokens, rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert record["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-6)
    assert "loss_stderr" not in record  # nothing was left out
    squares = np.square(rows - nll / tokens * WEIGHTS.sum(-1)).sum()
    for batch in (1, 7, ROWS):  # each batch has a mean of its own
        assert result(batch).squares == pytest.approx(squares, rel=1e-5)
    assert record["token_accuracy"] == pytest.approx(
        ((log_p.argmax(-1) == IDS[1]) * WEIGHTS).sum() / tokens
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("size", "chunk", "microbatches"),
    [(1, None, 1), (7, None, 1), (64, None, 1), (7, 5, 1), (8, 5, 4)],
)
def test_any_batch_size_gives_the_same_totals(size, chunk, microbatches):
    ours, whole = result(size, chunk, microbatches), result(ROWS)
    assert (ours.tokens, ours.bytes, ours.correct, ours.weight) == (
        whole.tokens,
        whole.bytes,
        whole.correct,
        whole.weight,
    )
    assert ours.nll == pytest.approx(whole.nll, rel=1e-6)
    assert ours.reliability.count == whole.reliability.count


def of_rows(tokens, targets, weights=None, **settings):
    """The figures of a bigram model on rows, with each id as many bytes as its number."""
    ones = np.ones(np.shape(tokens), np.int32)
    weights = ones.astype(np.float32) if weights is None else weights
    batch = Tokens(np.array(tokens), np.array(targets), weights, segments=ones, positions=ones)
    step = jax.jit(loss.build(Bigram, np.arange(VOCAB), **settings))
    return loss.evaluate(
        lambda each: step(jnp.asarray(TABLE), each), [batch], jax.device_put
    ).record()


def nll_of(*pairs):
    logits = TABLE.astype(np.float64)
    return sum(math.log(np.exp(logits[a]).sum()) - logits[a, b] for a, b in pairs)


def test_bits_per_byte_have_the_end_of_a_document_and_those_of_the_text_have_not():
    """Two documents of 3 + 4 bytes, id 0 in front and behind: by hand."""
    record = of_rows([[0, 3, 0, 4]], [[3, 0, 4, 0]])
    text, ends = nll_of((0, 3), (0, 4)), nll_of((3, 0), (4, 0))
    assert record["bytes"] == 7
    assert record["loss_nats"] == pytest.approx((text + ends) / 4, rel=1e-5)
    assert record["perplexity"] == pytest.approx(math.exp((text + ends) / 4), rel=1e-5)
    assert record["bits_per_byte"] == pytest.approx((text + ends) / math.log(2) / 7, rel=1e-5)
    assert record["bits_per_byte_text"] == pytest.approx(text / math.log(2) / 7, rel=1e-5)


def test_bytes_have_the_weights_of_their_tokens():
    """Bits per byte do not depend on a factor of all weights, and follow those that differ."""
    tokens, targets = [[0, 3, 0, 4]], [[3, 0, 4, 0]]
    plain = of_rows(tokens, targets)
    quarter = of_rows(tokens, targets, np.full((1, 4), 0.25, np.float32))
    assert quarter["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-6)
    assert quarter["bytes"] == plain["bytes"] == 7
    uneven = of_rows(tokens, targets, np.array([[0.5, 0.5, 2, 2]], np.float32))
    bits = (0.5 * nll_of((0, 3), (3, 0)) + 2 * nll_of((0, 4), (4, 0))) / math.log(2)
    assert uneven["bits_per_byte"] == pytest.approx(bits / (0.5 * 3 + 2 * 4), rel=1e-5)


def test_bytes_that_a_tokenizer_puts_in_front_of_a_text_are_not_counted():
    record = of_rows([[0, 3, 5, 0]], [[3, 5, 0, 0]], prefix=loss.TokenizerPrefix(after=0, size=1))
    assert record["bytes"] == 3 + 5 - 1


POPULATION, DRAWN_ROWS, DRAWS = 300, 40, 200


def test_the_error_of_a_sample_is_the_spread_of_its_figure_over_other_samples():
    """Rows of one kind each, so that tokens of a row are similar, and of unequal weight."""
    rng = np.random.default_rng(3)
    kinds = rng.integers(0, VOCAB, (2, POPULATION, 1))
    tokens = np.where(rng.random((POPULATION, LENGTH)) < 0.8, kinds[0], IDS[0, 0])
    targets = np.where(rng.random((POPULATION, LENGTH)) < 0.8, kinds[1], IDS[1, 0])
    weights = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (POPULATION, 1))).astype(np.float32)
    ones = np.ones((20, LENGTH), np.int32)
    step = jax.jit(loss.build(Bigram, BYTES))

    def figures(seed, count):
        rows = [shuffled(n, POPULATION, (seed,)) for n in range(count)]
        batches = (
            Tokens(tokens[part], targets[part], weights[part], segments=ones, positions=ones)
            for part in (rows[n : n + 20] for n in range(0, count, 20))
        )
        return loss.evaluate(
            lambda batch: step(jnp.asarray(TABLE), batch),
            batches,
            jax.device_put,
            loss.EvaluatedRows(count, POPULATION),
        ).record()

    samples = [figures(seed, DRAWN_ROWS) for seed in range(DRAWS)]
    losses = np.array([each["loss_nats"] for each in samples])
    errors = np.array([each["loss_stderr"] for each in samples])
    assert math.sqrt((errors**2).mean()) == pytest.approx(losses.std(ddof=1), rel=0.25)
    whole = figures(0, POPULATION)
    assert "loss_stderr" not in whole
    inside = abs(losses - whole["loss_nats"]) < 2 * errors
    assert 0.88 < inside.mean() < 1
    assert figures(7, DRAWN_ROWS) == samples[7]  # bit for bit


def test_a_set_without_tokens_is_refused():
    with pytest.raises(DataError, match="nothing to evaluate"):
        loss.evaluate(lambda batch: pytest.fail("never called"), [], jax.device_put)


def test_the_error_is_that_of_a_hand_made_diagram():
    confidence = jnp.array([0.95, 0.99, 0.5, 0.5, 1.0, 0.9])
    correct = jnp.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    weights = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    result = Reliability.of(np.asarray(bin_sums(confidence, correct, weights)))
    assert result.count[14] == 3
    assert result.count[7] == 2
    assert sum(result.count) == 5
    expected = 3 / 5 * abs(2 / 3 - (0.95 + 0.99 + 1.0) / 3) + 2 / 5 * abs(0.5 - 0.5)
    assert result.expected_error == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("others", [[], [0.5]])
def test_confidences_that_are_not_numbers_have_an_error_that_is_none(others):
    """It was 0 if there was no other one: the best that a model can have."""
    confidence = jnp.array([jnp.nan, jnp.nan, *others])
    result = Reliability.of(np.asarray(bin_sums(confidence, confidence > 0, confidence < 2)))
    assert sum(result.count) == len(others)
    ones = jnp.ones(len(confidence))
    result = Reliability.of(np.asarray(bin_sums(confidence, 0 * ones, ones)))
    assert sum(result.count) == len(confidence)
    assert np.isnan(result.expected_error)


def test_nothing_has_no_error():
    assert Reliability.of(np.zeros((3, 15))).expected_error == 0.0
