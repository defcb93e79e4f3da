"""Conversations as documents of ids and weights, encoded batch by batch in several processes."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxlm.core.errors import DataError
from jaxlm.data import chat_processes
from jaxlm.data.ascii_words import processors
from jaxlm.data.chat_encoder import (
    BatchEncoder,
    ChatEncoder,
    Encoded,
    EncodedBatch,
    Item,
    encoded,
    positions,
)
from jaxlm.data.records import Document, LeftOut

BATCH = 256  # conversations that are rendered by one request; even, so that it has whole pairs
FEW = 16  # batches that take less time than other processes need to start
MOST_PROCESSES = 4  # reading and writing, in this one, take a quarter of the time of encoding
PROBED = 1000  # conversations among which a single refused one is tolerated


def encode(
    encoder: ChatEncoder,
    documents: Iterable[Document],
    left_out: LeftOut,
    figures: Counter[str],
) -> Iterator[Encoded]:
    """Yield ids and weights of each conversation, and of both of a pair, in their order.

    More than `FEW` batches are encoded by other processes, one for each processor and at most
    `MOST_PROCESSES`, with the same result.

    Args:
      encoder: settings of the encoding.
      documents: conversations.
      left_out: counts of conversations left out, by reason.
      figures: counts of turns and tokens of those yielded.

    Raises:
      DataError: if too many are refused by the template, or one is too long and `overlong` is
        `error`.
      PeerLost: if a process that encodes was killed.
    """
    remaining = (item for each in documents for item in _items(each))
    batches = iter(lambda: list(itertools.islice(remaining, BATCH)), [])
    first = list(itertools.islice(batches, FEW + 1))
    seen = refused = 0
    error: DataError | None = None

    def check(*, is_all: bool = False) -> None:
        """Raise DataError if the template refused too many conversations so far."""
        if error is not None and refused > encoder.max_refused * max(seen, 0 if is_all else PROBED):
            raise DataError(
                error.what,
                where=error.where,
                why=f"{error.why}; {refused} of the {seen} conversations so far "
                f"are refused, data.max_dropped = {encoder.max_refused:g} of them may be",
                fix=error.fix,
            )

    results: Iterator[tuple[Sequence[Item], EncodedBatch]]
    with contextlib.ExitStack() as stack:
        if len(first) <= FEW:
            alone = stack.enter_context(BatchEncoder(encoder))
            results = ((batch, alone.encode(batch)) for batch in first)
        else:
            pool = chat_processes.Pool(encoder, min(processors(), MOST_PROCESSES))
            results = stack.enter_context(pool).encode(itertools.chain(first, batches))
        for batch, result in results:
            seen += len(batch)
            refused += result.refused
            error = error or result.error
            check()
            for number, reason in result.left_out:
                document, _ = batch[number]
                left_out.add(reason, document.file, document.record)
            figures.update(result.figures)
            if encoder.answers == "pairs":
                ids = [each for _, each, _ in result.used]
                longest = map(positions, zip(ids[::2], ids[1::2], strict=True))
                figures["longest_pair"] = max(figures["longest_pair"], *longest, 0)
            for number, *each in result.used:
                yield encoded(batch[number], *each)
    check(is_all=True)


def _items(document: Document) -> Sequence[Item]:
    """Return the conversation of a document, or both of its pair, each with its own text."""
    conversation = document.conversation
    if conversation is None:
        return []
    if conversation.rejected is None:
        return [(document, conversation)]
    both = (conversation, conversation.rejected)
    return [(document._replace(text=each.text), each) for each in both]
