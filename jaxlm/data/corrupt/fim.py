"""Fill in the middle: documents rearranged so that a causal model learns to infill."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.corrupt.rows import ChangedPiece, Ids, RowKey, change_in_random_order, left_to_right
from jaxlm.data.corrupt.spans import DEFAULT_EDGES, Edges, text_range
from jaxlm.data.tokenizer import Tokenizer

SLOTS = 128  # of a row, for each document that can be rearranged
ADDED = 3  # sentinels of a rearranged document
SPLIT = 6  # more ids that text may need if it is cut inside of ids
# Prefix, middle and suffix: ours (also Qwen, CodeGemma), StarCoder, SantaCoder, DeepSeek Coder.
FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)


class FimIds(NamedTuple):
    """Ids in front of each part."""

    prefix: int
    middle: int
    suffix: int


def infill(
    ids: Sequence[Ids],
    free: int,
    key: RowKey,
    *,
    rate: float,
    spm: float,
    marks: FimIds,
    tokenizer: Tokenizer | None,
    edges: Edges = DEFAULT_EDGES,
) -> list[ChangedPiece]:
    """Cut the share `rate` of the pieces into prefix, middle and suffix, and reorder these.

    PSM: `<prefix> p <suffix> s <middle> m`; SPM: `<prefix> <suffix> s <middle> p m`. All tokens are
    trained on, from left to right. Begin and end of text stay in place; if a piece does not end its
    document, the middle just ends.

    The cuts are uniform: between ids, or with a `tokenizer` between characters, whose three parts
    are encoded again, as prompts will be. Cuts are between ids if a piece is not valid text, or if
    the tokenizer puts a space in front of what it encodes. A piece stays unchanged if the free
    slots do not hold its three special ids and the ids added by splitting.

    Args:
      rate: share of the pieces.
      spm: probability of SPM.
      marks: special ids.
      tokenizer: cuts between characters; None cuts between ids.

    Source: Bavarian et al. 2022, arXiv:2207.14255, section 3 (SPM as its second variant, for
    training with both), with their context-level FIM: after cutting into rows.
    """

    def rearrange(piece: Ids, free: int, rng: np.random.Generator) -> tuple[Ids, int]:
        is_drawn, order = rng.random(2)
        if is_drawn >= rate:
            return piece, 0
        begin, end = text_range(piece, edges)
        prefix, middle, suffix = _parts(piece[begin:end], rng, tokenizer)
        before, between, after = (np.array([mark]) for mark in marks)
        if order < spm:
            parts = [before, after, suffix, between, prefix, middle]
        else:
            parts = [before, prefix, after, suffix, between, middle]
        changed = np.concatenate([piece[:begin], *parts, piece[end:]])
        added = len(changed) - len(piece)
        return (changed.astype(np.int32), added) if added <= free else (piece, 0)

    return [left_to_right(piece) for piece in change_in_random_order(ids, free, key, rearrange)]


def reserved_slots(sequence: int, *, is_split: bool) -> int:
    """Return the free slots of a row: enough to rearrange one document in each 128 slots."""
    return -(-sequence // SLOTS) * (ADDED + (SPLIT if is_split else 0))


def _parts(ids: Ids, rng: np.random.Generator, tokenizer: Tokenizer | None) -> list[Ids]:
    """Return prefix, middle and suffix."""
    if tokenizer is not None and not tokenizer.lead and tokenizer.is_text[ids].all():
        try:
            text = b"".join(tokenizer.table[i] for i in ids.tolist()).decode()
        except UnicodeDecodeError:
            pass
        else:
            low, high = np.sort(rng.integers(0, len(text) + 1, 2)).tolist()
            texts = [text[:low], text[low:high], text[high:]]
            return [np.array(part, np.int32) for part in tokenizer.encode_many(texts)]
    low, high = np.sort(rng.integers(0, len(ids) + 1, 2)).tolist()
    return [ids[:low], ids[low:high], ids[high:]]


def fim_ids(tokenizer: Tokenizer) -> FimIds | None:
    """Return the special ids of a tokenizer: ours or an imported model's own."""
    known = tokenizer.reserved
    for tokens in FIM_TOKENS:
        if known.keys() >= set(tokens):
            return FimIds(*map(known.__getitem__, tokens))
    return None
