"""Rows cut into shorter ones, for the first stages of a run."""

import numpy as np

from jaxlm.data.batch import Tokens


def cut(batch: Tokens, length: int) -> Tokens:
    """Each row [T] of a host's batch as T / length rows, in order; no token is lost, and a document goes on in the next.

    What a row begins with is its segment 1, at position 0: as if the row had been packed with that length. For rows as causal
    and mtp read them: of those that another objective has changed, a piece would lack what the rest tells, such as the span
    that belongs to a sentinel.
    """
    tokens, targets, weights, segments, positions = (
        np.asarray(field).reshape(-1, length) for field in batch[:5]
    )
    first = segments[:, :1]
    goes_on = segments == first
    positions = np.where(goes_on & (segments > 0), positions - positions[:, :1], positions)
    segments = np.where(segments > 0, segments - first + 1, 0).astype(np.int32)
    return Tokens(tokens, targets, weights, segments, positions.astype(np.int32))  # type: ignore[arg-type]
