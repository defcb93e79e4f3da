"""Prompts of validation conversations that are trained on."""

import hashlib
from collections.abc import Iterator, Sequence

from jaxlm.core.errors import DataError
from jaxlm.data import cache, formats
from jaxlm.data.parts import Part
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.text_digest import TextDigests

SHOWN = 60  # characters of a prompt in an error


def refuse_shared_prompts(
    train: Sequence[Part], validation: Sequence[Part], digests: TextDigests
) -> None:
    """Raise DataError if more than `max_dropped` of a set's conversations have a trained prompt.

    A prompt is `Conversation.prompt`. Files are read once, until one changes. A share that is held
    out of the training files has other prompts.
    """
    corpora = [part.corpus for part in train if part.corpus is not None and part.corpus.chat]
    for part in validation:
        if part.corpus is None or part.corpus.chat is None or part.selection.held_out:
            continue
        most = part.corpus.max_dropped
        read = {"train": [digests.of(each) for each in corpora], "set": digests.of(part.corpus)}
        folder = cache.folder(digests.root, "overlaps", most=most, **read)
        with cache.building(folder) as partial:
            if partial is not None:
                trained = {digest for each in train for digest, _ in _prompts(each)}
                _compare(part, list(_prompts(part)), trained, most)


def _compare(
    part: Part, prompts: list[tuple[bytes, Document]], trained: set[bytes], most: float
) -> None:
    both = [document for digest, document in prompts if digest in trained]
    if len(both) > most * len(prompts):
        why = f"{len(both)} of {len(prompts)} conversations of {part.setting} have such a prompt"
        raise DataError(
            "validation conversations have prompts that are trained on",
            where=formats.place(both[0].file, both[0].record),
            why=f"{why}; the first begins with {both[0].text[:SHOWN]!r}",
            fix="--config.data.validation=5%    # holds out prompts instead",
        )


def _prompts(part: Part) -> Iterator[tuple[bytes, Document]]:
    for document in part.documents(LeftOut()) if part.corpus is not None else ():
        if document.conversation is not None:
            prompt = document.conversation.prompt.encode("utf-8", "surrogatepass")
            yield hashlib.sha256(prompt).digest()[:16], document
