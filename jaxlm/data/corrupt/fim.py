"""Fill in the middle: documents rearranged so that a left-to-right model learns to write between two texts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.corrupt.rows import Ids, Key, Piece, left_to_right
from jaxlm.data.corrupt.spans import OURS, Edges, inside
from jaxlm.data.tokenizer import Tokenizer

SLOTS = 128  # of a row, for which one document can be rearranged
ADDED = 3  # sentinels of a rearranged document
SPLIT = 6  # ids more that text may need where it is cut within ids


# Prefix, middle and suffix: ours and those of Qwen and CodeGemma, of StarCoder, of SantaCoder, of DeepSeek Coder.
FORMS = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)


class Marks(NamedTuple):
    """The ids that stand before each part."""

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
    """The share `rate` of the pieces, each cut at two places into prefix, middle and suffix, in one of two orders.

    PSM: `<prefix> p <suffix> s <middle> m`; with probability `spm` SPM: `<prefix> <suffix> s <middle> p m`. Everything is
    trained on, from left to right. A begin and an end of text stay where they are; where the piece is not a document's
    end, the middle just ends.

    The places are drawn uniformly: between ids, or with a `tokenizer` between characters, whose three parts are then
    encoded anew, as prompts will be; where a piece is not text, as it begins within a character, between its ids, and likewise
    where the tokenizer puts a space in front of all that it encodes. A piece
    that does not find the free slots for its three marks, and for ids that were split, stays as it is.

    Source: Bavarian et al. 2022, arXiv:2207.14255, section 3 (SPM as its second variant, for training with both), with
    their context-level FIM: after the cutting into rows.
    """
    draw = key.draws()
    found = {}
    # In an order that is drawn: no piece is nearer to the free slots.
    for number in draw.permutation(len(ids)).tolist():
        found[number] = piece = ids[number]
        wanted, order = draw.random(2)
        if wanted >= rate:
            continue
        begin, end = inside(piece, edges)
        parts = _parts(piece[begin:end], draw, tokenizer)
        placed = np.concatenate(
            [piece[:begin], *_ordered(parts, marks, is_spm=order < spm), piece[end:]]
        )
        added = len(placed) - len(piece)
        if added <= free:
            found[number] = placed.astype(np.int32)
            free -= added
    return [left_to_right(found[number]) for number in range(len(ids))]


def room(sequence: int, *, is_split: bool) -> int:
    """Slots that a row leaves free: for one rearranged document in each 128."""
    return -(-sequence // SLOTS) * (ADDED + (SPLIT if is_split else 0))


def _ordered(parts: list[Ids], marks: Marks, *, is_spm: bool) -> list[Ids]:
    prefix, middle, suffix = parts
    before, between, after = (np.array([mark]) for mark in marks)
    if is_spm:
        return [before, after, suffix, between, prefix, middle]
    return [before, prefix, after, suffix, between, middle]


def _parts(ids: Ids, draw: np.random.Generator, tokenizer: Tokenizer | None) -> list[Ids]:
    """Prefix, middle and suffix."""
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
    """The marks of a tokenizer: ours or, of an imported model, its own."""
    known = tokenizer.reserved
    return next(
        (Marks(*map(known.__getitem__, form)) for form in FORMS if known.keys() >= set(form)), None
    )
