import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import DataError
from jaxlm.data.batch import Tokens
from jaxlm.evals import loss
from jaxlm.models.backbone import Hidden

ROWS, LENGTH, VOCAB = 23, 6, 11
RNG = np.random.default_rng(1)
TABLE = (RNG.normal(size=(VOCAB, VOCAB)) * 2).astype(np.float32)
BYTES = RNG.integers(0, 5, VOCAB).astype(np.int32)


class Bigram:
    """Scores the next id by the present one."""

    config = SimpleNamespace(has_ring=False)

    def __init__(self, table):
        self.table = table

    def read(self, batch, *, key, dealt):
        values = jax.nn.one_hot(batch.tokens, VOCAB)
        return Hidden(values, None, {}, values)

    def logits(self, hidden):
        return hidden @ self.table


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


def result(size, chunk=None):
    step = jax.jit(loss.build(Bigram, BYTES, chunk=chunk))
    return loss.evaluate(
        lambda batch: step(jnp.asarray(TABLE), batch), batches(size), jax.device_put
    )


def test_the_record_is_that_of_a_float64_reference():
    logits = TABLE.astype(np.float64)[IDS[0]]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -(np.take_along_axis(log_p, IDS[1][..., None], -1)[..., 0] * WEIGHTS).sum()
    tokens, size = int(WEIGHTS.sum()), int(BYTES[IDS[1]][WEIGHTS > 0].sum())
    record = result(7).record()
    assert (record["tokens"], record["bytes"]) == (tokens, size)
    assert record["loss_nats"] == pytest.approx(nll / tokens, rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert record["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-6)
    assert record["token_accuracy"] == pytest.approx(
        ((log_p.argmax(-1) == IDS[1]) * WEIGHTS).sum() / tokens
    )


@pytest.mark.parametrize(("size", "chunk"), [(1, None), (7, None), (64, None), (7, 5)])
def test_any_batch_size_gives_the_same_totals(size, chunk):
    ours, whole = result(size, chunk), result(ROWS)
    assert (ours.tokens, ours.bytes, ours.correct, ours.weight) == (
        whole.tokens,
        whole.bytes,
        whole.correct,
        whole.weight,
    )
    assert ours.nll == pytest.approx(whole.nll, rel=1e-6)
    assert ours.reliability.count == whole.reliability.count


def test_a_set_without_tokens_is_refused():
    with pytest.raises(DataError, match="nothing to evaluate"):
        loss.evaluate(lambda batch: pytest.fail("never called"), [], jax.device_put)
