"""Rows of text that layers read to be quantized, and the check that no report has that text."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError
from jaxlm.data.batch import Tokens
from jaxlm.data.loader import Loader
from jaxlm.recipes import setup
from jaxlm.recipes.use import evaluate
from jaxlm.recipes.use.load import LoadedRun

TRAIN = "train"  # the training rows of the run
TOKENS = 128 * 2048
BATCH_TOKENS = 4096  # of a pass through a layer
WINDOW = 32  # ids that two texts share by chance only where they quote the same
MOST_SHARED = 0.05  # of the calibration text: licenses and headers are in many files
_FACTOR = np.uint64(6364136223846793005)  # Knuth's multiplier: odd, and of full period


def read(
    opened: LoadedRun,
    patterns: Sequence[str],
    tokens: int,
    reported: Mapping[str, Loader],
    say: Log,
) -> list[Tokens]:
    """Return batches of about `tokens` tokens in rows of the run's length.

    Args:
      opened: the run.
      patterns: globs of text, or `train` for the run's own training rows.
      tokens: how many; less if the text has less.
      reported: the sets that the model is compared on.
      `say`: receives log lines.

    Raises:
      DataError: if the text is in a reported set.
    """
    length = opened.run.data.sequence
    size = max(1, BATCH_TOKENS // length)
    count = -(-tokens // (size * length))
    if tuple(patterns) == (TRAIN,):
        train = setup.open_data(opened.run, workdir=opened.workdir, say=say, warn=say).train
        rows = -(-train.shards.manifest.tokens // length)
        count = min(count, -(-rows // size))
        return [train.at(n, batch=size, rows=slice(0, size)) for n in range(count)]
    text = next(iter(evaluate.open_loaders(opened, patterns, length, say).values()))
    batches = list(text.evaluation(batch=size, limit=count))
    for name, loader in reported.items():
        share = shared(batches, loader.evaluation(batch=size))
        if share > MOST_SHARED:
            raise DataError(
                "the calibration text is in a set that is reported",
                where=f"--calibration={' '.join(patterns)}",
                why=f"{share:.0%} of its runs of {WINDOW} tokens are in {name}, and codes that fit "
                "it would look better there than elsewhere",
                fix=f"--calibration={TRAIN}",
            )
    return batches


def shared(batches: Iterable[Tokens], reported: Iterable[Tokens]) -> float:
    """Return the share of a text's tokens that are in runs of WINDOW ids of another text."""
    known = np.unique(
        np.concatenate([each[::WINDOW] for each in _all_windows(reported)] or [np.zeros(0)])
    )
    total = covered = 0
    for each in _all_windows(batches):
        total += len(each)
        covered += WINDOW * int(np.isin(each, known).sum())
    return min(1.0, covered / total) if total else 0.0


def _all_windows(batches: Iterable[Tokens]) -> Iterable[np.ndarray]:
    rows = (zip(np.asarray(b.tokens), np.asarray(b.segments), strict=True) for b in batches)
    for ids, segments in itertools.chain.from_iterable(rows):
        for segment in np.unique(segments[segments > 0]):
            yield _windows(ids[segments == segment])


def _windows(ids: np.ndarray) -> np.ndarray:
    """Return a hash of each run of WINDOW ids; of all ids if they are fewer."""
    size = min(WINDOW, len(ids))
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + 1, size)
    return windows @ _powers(size)  # modulo 2^64


@functools.cache
def _powers(size: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.multiply.accumulate(np.full(size, _FACTOR, np.uint64))
