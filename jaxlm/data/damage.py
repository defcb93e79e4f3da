"""Training around damaged token shards (`data.damaged=skip`), with every loss counted."""

from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data.batch import Tokens
from jaxlm.data.shards import Damaged

# (document, first id that cannot be read, number of ids), and the error.
Loss = tuple[tuple[int, int, int], Damaged]


def told(
    stream: Iterator[tuple[Tokens, Callable[[], Iterator[Loss]]]],
    tokens: int,
    most: float,
    warn: Callable[[str], None],
) -> Iterator[Tokens]:
    """Yield the batches of a stream, and warn about each piece that could not be read.

    Args:
      stream: batches in which unreadable tokens have weight 0, each with a function that lists the
        unreadable pieces of the batch.
      tokens: tokens of the set.
      most: largest share of `tokens` that may be lost.
      warn: called once per lost piece, with the total.

    Raises:
      DataError: if more than the share `most` was lost.
    """
    lost: set[tuple[int, int, int]] = set()
    total = 0
    for batch, losses in stream:
        if np.any((batch.segments > 0) & (batch.weights == 0)):
            for piece, damage in losses():
                if piece in lost:
                    continue
                lost.add(piece)
                total += piece[2]
                warn(
                    f"not trained on: {piece[2]} tokens of {damage.where} ({damage.why}); {total} "
                    f"tokens in {len(lost)} pieces so far, {total / tokens:.2g} of all"
                )
                if total > most * tokens:
                    raise DataError(
                        "too much of the training data is damaged",
                        where=damage.where,
                        why=f"{total} of {tokens} tokens could not be read; data.max_dropped = "
                        f"{most:g} of them may be lost",
                        fix=f"{damage.fix.splitlines()[0]}\n"
                        "--config.data.max_dropped=1    # accepts any loss",
                    ) from damage
        yield batch
