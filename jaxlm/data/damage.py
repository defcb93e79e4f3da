"""Going on around token shards that cannot be read (`data.damaged=skip`): nothing that is left out goes uncounted."""

from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data.batch import Tokens
from jaxlm.data.shards import Damaged

# A document, the first of its ids that could not be read, and their number; and what is wrong.
Loss = tuple[tuple[int, int, int], Damaged]


def told(
    stream: Iterator[tuple[Tokens, Callable[[], Iterator[Loss]]]],
    tokens: int,
    most: float,
    warn: Callable[[str], None],
) -> Iterator[Tokens]:
    """The batches of a stream that gives tokens no weight where they could not be read.

    Each such piece is told once, with all so far. `stream` has with each batch what finds its losses again.

    Raises:
      DataError: where more than the share `most` of the set's `tokens` was lost.
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
                    f"not trained on: {piece[2]} tokens of {damage.where} ({damage.why}); {total} tokens in {len(lost)} "
                    f"pieces so far, {total / tokens:.2g} of all"
                )
                if total > most * tokens:
                    raise DataError(
                        "too much of the training data is damaged",
                        where=damage.where,
                        why=f"{total} of {tokens} tokens could not be read; data.max_dropped = {most:g} of them may be lost",
                        fix=f"{damage.fix.splitlines()[0]}\n--config.data.max_dropped=1    # goes on whatever is lost",
                    ) from damage
        yield batch
