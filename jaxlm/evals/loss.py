"""Loss, perplexity, bits per byte, accuracy and calibration on a validation set.

Example:
  >>> Reliability(count=[3, 1], confidence=[0.5, 0.9], accuracy=[0.5, 0.5]).expected_error
  0.1
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.core.errors import DataError
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Model
from jaxlm.objectives.loss import score
from jaxlm.ops.cross_entropy import TokenScores
from jaxlm.parallel import pipeline

BINS = 15


def bin_sums(confidence: Array, correct: Array, weights: Array) -> Array:
    """Return weight, weighted confidence and accuracy of BINS bins (i / BINS, (i + 1) / BINS].

    A confidence that is not a number is in the first bin, and makes the error not a number.
    """
    index = jnp.clip(jnp.ceil(confidence.ravel() * BINS) - 1, 0, BINS - 1)
    index = jnp.where(jnp.isnan(index), 0, index)
    inside = (index[:, None] == jnp.arange(BINS, dtype=index.dtype)[None]).astype(jnp.float32)
    weight = weights.ravel()
    parts = jnp.stack([weight, weight * confidence.ravel(), weight * correct.ravel()])
    return (parts[:, :, None] * inside[None]).sum(1)


@dataclasses.dataclass(frozen=True)
class Reliability:
    """The bins of a reliability diagram: token weight, mean confidence and accuracy of each."""

    count: list[float]
    confidence: list[float]
    accuracy: list[float]

    @classmethod
    def of(cls, sums: np.ndarray) -> "Reliability":
        """Compute the diagram from bin sums; an empty bin has confidence and accuracy 0."""
        count, confidence, correct = np.asarray(sums, np.float64)
        filled = np.maximum(count, 1e-300)
        return cls(count.tolist(), (confidence / filled).tolist(), (correct / filled).tolist())

    @property
    def expected_error(self) -> float:
        """Return the expected calibration error, sum_b (n_b / n) |accuracy_b - confidence_b|.

        Source: Guo et al. 2017, arXiv:1706.04599, equation 5, with its 15 bins.
        """
        gaps = zip(self.count, self.confidence, self.accuracy, strict=True)
        total = sum(self.count)
        return sum(n * abs(accuracy - sure) for n, sure, accuracy in gaps) / total if total else 0.0


class Sums(NamedTuple):
    """Sums over one batch, on the device. Counts are exact: a batch has under 2**24 tokens."""

    nll: Array
    text_nll: Array  # of targets that represent bytes, so without the end of a document
    weight: Array
    correct: Array
    tokens: Array  # number of targets with a weight above zero
    bytes: Array  # bytes that these represent
    more_bytes: Array  # bytes times weights, less bytes: 0 if all weights are 1
    rows: Array  # see _row_sums
    bins: Array  # see bin_sums


class TokenizerPrefix(NamedTuple):
    """Bytes that a tokenizer puts before a text: `size` bytes in the token after id `after`."""

    after: int
    size: int


def build(
    merge: Callable[[Any], Model],
    token_bytes: np.ndarray,
    *,
    chunk: int | None = None,
    microbatches: int = 1,
    prefix: TokenizerPrefix | None = None,
) -> Callable[[Any, Tokens], Sums]:
    """Return the function (params, batch) -> Sums, to be jitted.

    Args:
      merge: function of the parameters that builds the model.
      token_bytes: bytes that each id represents, [V].
      chunk: tokens whose logits are in memory at a time; None for all.
      microbatches: parts of the batch, computed one after the other.
      prefix: bytes of the tokenizer that are not in the text.
    """
    summed = sums_function(token_bytes, prefix)

    def step(params: Any, batch: Tokens) -> Sums:
        def scored(part: Tokens) -> TokenScores:
            return score(merge(params), part, None, chunk)[0]

        return summed(pipeline.map_microbatches(scored, batch, microbatches), batch)

    return step


def sums_function(
    token_bytes: np.ndarray, prefix: TokenizerPrefix | None = None
) -> Callable[[TokenScores, Tokens], Sums]:
    """Return the function (scores of all targets, batch) -> Sums; arguments as of `build`."""
    table = np.asarray(token_bytes, np.int32)

    def summed(scores: TokenScores, batch: Tokens) -> Sums:
        counted = batch.weights > 0
        weights = jnp.where(counted, batch.weights, 0.0)
        nll = jnp.where(counted, scores.nll * weights, 0.0)
        sizes = jnp.where(counted, jnp.asarray(table)[batch.targets], 0)
        is_text = sizes > 0
        if prefix is not None:
            is_first = is_text & (batch.tokens == prefix.after)
            sizes = sizes - jnp.where(is_first, prefix.size, 0)
        return Sums(
            nll=nll.sum(),
            text_nll=jnp.where(is_text, nll, 0.0).sum(),
            weight=weights.sum(),
            correct=(scores.correct * weights).sum(),
            tokens=counted.sum(dtype=jnp.int32),
            bytes=sizes.sum(dtype=jnp.int32),
            more_bytes=jnp.where(counted, sizes * (weights - 1), 0.0).sum(),
            rows=_row_sums(nll.sum(-1), weights.sum(-1)),
            bins=bin_sums(scores.confidence, scores.correct, weights),
        )

    return summed


def _row_sums(nll_b: Array, weight_b: Array) -> Array:
    """Return [m, sum e^2, sum e w, sum w^2] over rows, with e = nll - m w and m = sum nll / sum w.

    Residuals of the batch's own mean are small numbers: float32 keeps their squares, while
    sum nll^2 - m^2 sum w^2 would cancel.
    """
    mean = nll_b.sum() / jnp.maximum(weight_b.sum(), 1e-30)
    error_b = nll_b - mean * weight_b
    return jnp.stack([mean, (error_b**2).sum(), (error_b * weight_b).sum(), (weight_b**2).sum()])


def _moved(rows: np.ndarray, mean: float) -> np.ndarray:
    """Return the sums of `_row_sums` with another mean: e' = e + (m - mean) w."""
    old_mean, squares, products, weights = rows
    shift = old_mean - mean
    squares = squares + 2 * shift * products + shift**2 * weights
    return np.array([mean, squares, products + shift * weights, weights])


class EvaluatedRows(NamedTuple):
    """Number of evaluated rows, and of the rows from which they were drawn."""

    rows: int
    of: int


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Totals over a set, and the metrics computed from them."""

    nll: float
    text_nll: float
    weight: float
    correct: float
    tokens: int
    bytes: int
    more_bytes: float  # bytes times weights, less bytes
    squares: float  # over rows, of (nll - loss x weight)
    reliability: Reliability
    sample: EvaluatedRows | None = None

    @property
    def loss_stderr(self) -> float | None:
        """Return the standard error of the loss for all rows, nats; None if all were read.

        n of N rows are drawn without replacement, and the loss is a ratio of sums over rows:
        sqrt((1 - n/N) n/(n-1) sum_r (nll_r - loss w_r)^2) / sum_r w_r. Tokens of a row are not
        assumed independent. A single row has no spread: None.

        Source: Cochran 1977, Sampling Techniques, 3rd edition, equation 6.9 (the ratio estimator).
        """
        if self.sample is None or not 1 < self.sample.rows < self.sample.of:
            return None
        n, of = self.sample
        return math.sqrt((1 - n / of) * n / (n - 1) * self.squares) / self.weight

    def record(self) -> dict[str, float | int | None]:
        """Return the metrics under their public names.

        `bits_per_byte` counts the nll of every target, also of the end of each document, which
        represents no byte: the cost of coding the documents one by one. `bits_per_byte_text` leaves
        out targets without bytes, as lm-evaluation-harness's rolling log-likelihood and nanochat
        do. In both a byte has the weight of its token. They are None if no bytes are known;
        perplexity is None if it overflows. `loss_stderr` is present if only a sample of the rows
        was read.
        """
        loss = self.nll / self.weight
        bits = math.log(2) * (self.bytes + self.more_bytes)
        error = self.loss_stderr
        return {
            "loss_nats": loss,
            **({} if error is None else {"loss_stderr": error}),
            "perplexity": math.exp(loss) if loss < 700 else None,
            "bits_per_byte": self.nll / bits if bits else None,
            "bits_per_byte_text": self.text_nll / bits if bits else None,
            "token_accuracy": self.correct / self.weight,
            "calibration_error": self.reliability.expected_error,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def evaluate(
    step: Callable[[Tokens], Sums],
    batches: Iterable[Tokens],
    put: Callable[[Tokens], Tokens],
    sample: EvaluatedRows | None = None,
) -> EvalResult:
    """Add up the sums of all batches on the host in float64: the batch size does not matter.

    Each batch is fetched after the next has been dispatched; `put` places it on the devices.
    `sample` is the part of the set that the batches are, None for the whole set.

    Raises:
      DataError: if no token has a weight.
    """
    totals: list[np.ndarray] = []
    pending: Sums | None = None
    for batch in batches:
        sums = step(put(batch))
        totals = _added(totals, pending)
        pending = sums
    totals = _added(totals, pending)
    if not totals or not totals[Sums._fields.index("weight")]:
        raise DataError(
            "there is nothing to evaluate",
            where="the validation set",
            why="no token of the set has a weight",
            fix="name more text in --config.data.validation",
        )
    nll, text_nll, weight, correct, tokens, size, more_bytes, rows, bins = totals
    return EvalResult(
        nll=float(nll),
        text_nll=float(text_nll),
        weight=float(weight),
        correct=float(correct),
        tokens=int(tokens),
        bytes=int(size),
        more_bytes=float(more_bytes),
        squares=max(0.0, float(_moved(rows, float(nll / weight))[1])),
        reliability=Reliability.of(bins),
        sample=sample,
    )


def _added(totals: list[np.ndarray], sums: Sums | None) -> list[np.ndarray]:
    """Add a batch to the totals; the row sums keep the mean of the first batch."""
    if sums is None:
        return totals
    values = [np.asarray(part, np.float64) for part in sums]
    if not totals:
        return values
    mean = float(totals[_ROWS][0])
    values[_ROWS] = _moved(values[_ROWS], mean)
    added = [total + part for total, part in zip(totals, values, strict=True)]
    added[_ROWS][0] = mean
    return added


_ROWS = Sums._fields.index("rows")
