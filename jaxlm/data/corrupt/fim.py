"""Fill in the middle: documents rearranged so that a causal model learns to infill."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.corrupt.rows import Ids, Key, Piece, left_to_right
from jaxlm.data.corrupt.spans import OURS, Edges, inside
from jaxlm.data.tokenizer import Tokenizer

SLOTS = 128  # of a row, for each document that can be rearranged
ADDED = 3  # sentinels of a rearranged document
SPLIT = 6  # more ids that text may need if it is cut inside of ids


# Prefix, middle and suffix: ours (also Qwen, CodeGemma), StarCoder, SantaCoder, DeepSeek Coder.
FORMS = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)


class Marks(NamedTuple):
    """Ids in front of each part."""

    prefix: int
    middle: int
    suffix: int


def infills(
    ids: Sequence[Ids],
    free: int,
    key: Key,
    *,
    rate: float,
    spm: float,
    marks: Marks,
    tokenizer: Tokenizer | None,
    edges: Edges = OURS,
) -> list[Piece]:
    """Cut the share `rate` of the pieces into prefix, middle and suffix, and reorder these.

    PSM: `<prefix> p <suffix> s <middle> m`; SPM: `<prefix> <suffix> s <middle> p m`. All tokens are
    trained on, from left to right. Begin and end of text stay in place; if a piece does not end its
    document, the middle just ends.

    The cuts are uniform: between ids, or with a `tokenizer` between characters, whose three parts
    are encoded again, as prompts will be. Cuts are between ids if a piece is not valid text, or if
    the tokenizer puts a space in front of what it encodes. A piece stays unchanged if the free
    slots do not hold its three special ids and the ids added by splitting.

    Args:
      ids: ids of each piece.
      free: free slots of the row.
      key: key of the row.
      rate: share of the pieces.
      spm: probability of SPM.
      marks: special ids.
      tokenizer: cuts between characters; None cuts between ids.
      edges: begin and end ids of documents.

    Source: Bavarian et al. 2022, arXiv:2207.14255, section 3 (SPM as its second variant, for
    training with both), with their context-level FIM: after cutting into rows.
    """
    draw = key.draws()
    pieces = {}
    # Random order, so that no piece is favored by the free slots.
    for number in draw.permutation(len(ids)).tolist():
        pieces[number] = piece = ids[number]
        is_drawn, order = draw.random(2)
        if is_drawn >= rate:
            continue
        begin, end = inside(piece, edges)
        parts = _parts(piece[begin:end], draw, tokenizer)
        placed = np.concatenate(
            [piece[:begin], *_ordered(parts, marks, is_spm=order < spm), piece[end:]]
        )
        added = len(placed) - len(piece)
        if added <= free:
            pieces[number] = placed.astype(np.int32)
            free -= added
    return [left_to_right(pieces[number]) for number in range(len(ids))]


def room(sequence: int, *, is_split: bool) -> int:
    """Return the free slots of a row: enough to rearrange one document in each 128 slots."""
    return -(-sequence // SLOTS) * (ADDED + (SPLIT if is_split else 0))


def _ordered(parts: list[Ids], marks: Marks, *, is_spm: bool) -> list[Ids]:
    prefix, middle, suffix = parts
    before, between, after = (np.array([mark]) for mark in marks)
    if is_spm:
        return [before, after, suffix, between, prefix, middle]
    return [before, prefix, after, suffix, between, middle]


def _parts(ids: Ids, draw: np.random.Generator, tokenizer: Tokenizer | None) -> list[Ids]:
    """Return prefix, middle and suffix."""
    if tokenizer is not None and not tokenizer.lead and tokenizer.is_text[ids].all():
        try:
            text = b"".join(tokenizer.table[i] for i in ids.tolist()).decode()
        except UnicodeDecodeError:
            pass
        else:
            low, high = np.sort(draw.integers(0, len(text) + 1, 2)).tolist()
            texts = [text[:low], text[low:high], text[high:]]
            return [np.array(part, np.int32) for part in tokenizer.encode_many(texts)]
    low, high = np.sort(draw.integers(0, len(ids) + 1, 2)).tolist()
    return [ids[:low], ids[low:high], ids[high:]]


def marks(tokenizer: Tokenizer) -> Marks | None:
    """Return the special ids of a tokenizer: ours or an imported model's own."""
    known = tokenizer.reserved
    return next(
        (Marks(*map(known.__getitem__, form)) for form in FORMS if known.keys() >= set(form)), None
    )
