"""Masked language modeling: some ids are hidden and predicted from all others.

Example:
  >>> from jaxlm.data.tokenizer import Characters
  >>> WordNumbers(Characters("ab "))(np.array([40, 41, 42, 40])).tolist()
  [0, 0, 1, 2]
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from jaxlm.data.corrupt.rows import ChangedPiece, Ids, RowKey
from jaxlm.data.tokenizer import Tokenizer

MASK_TOKENS = "<|mask|>", "[MASK]", "<mask>"  # ours, BERT's, RoBERTa's


class WordNumbers:
    """Numbers the words of ids; a word begins after or with white space, a special token is one."""

    def __init__(self, tokenizer: Tokenizer):
        self._opens = np.array([entry[:1].isspace() or not entry for entry in tokenizer.table])
        self._closes = np.array([entry[-1:].isspace() or not entry for entry in tokenizer.table])

    def __call__(self, ids: Ids) -> Ids:
        """Return the number of the word of each id."""
        begins = self._opens[ids]
        begins[1:] |= self._closes[ids[:-1]]
        return np.cumsum(begins) - begins[:1].astype(np.int64)


def mask_tokens(
    ids: Sequence[Ids],
    free: int,
    key: RowKey,
    *,
    rate: float,
    hidden: float,
    random: float,
    mask: int,
    is_text: Bool[np.ndarray, "vocab"],
    is_fixed: bool,
    words: WordNumbers | None,
) -> list[ChangedPiece]:
    """Draw each id, or whole word, with probability `rate`, and predict the drawn ids in place.

    A drawn id is read as `mask` with probability `hidden`, as a random text id with probability
    `random`, and otherwise as itself. The id after a piece's last slot has no slot, so it is never
    read, hidden or predicted.

    Args:
      rate: probability of being drawn.
      hidden: share of the drawn ids that is read as `mask`.
      random: share of the drawn ids that is read as a random id.
      mask: the mask id.
      is_text: ids of text; others are never drawn.
      is_fixed: draw the same in every epoch (static masking).
      words: numbers the words for whole-word masking; None draws ids.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.1 (80, 10 and 10 of
    100); dynamic masking Liu et al. 2019, arXiv:1907.11692, section 4.1. BERT draws a fixed number
    of ids a row; here each is drawn independently, as in Hugging Face's collator. Its whole words
    end at punctuation too, ours only at white space.
    """
    rng = key.rng(is_fixed=is_fixed)
    ordinary = np.flatnonzero(is_text)

    def hide(piece: Ids) -> ChangedPiece:
        count = len(piece)
        units = np.arange(count) if words is None else words(piece)
        drawn: Bool[np.ndarray, "n"] = (rng.random(count) < rate)[units] & is_text[piece]
        fate = rng.random(count)
        noise = ordinary[rng.integers(len(ordinary), size=count, dtype=np.int32)]
        read = np.where(fate < hidden, mask, np.where(fate < hidden + random, noise, piece))
        return ChangedPiece(
            tokens=np.where(drawn, read, piece).astype(np.int32),
            targets=piece,
            weights=drawn.astype(np.float32),
            positions=np.arange(count, dtype=np.int32),
            visible_until=np.full(count, count - 1, np.int32),
        )

    return [hide(piece[:-1]) for piece in ids]


def mask_id(tokenizer: Tokenizer) -> int | None:
    """Return the mask id of a tokenizer: ours or an imported model's own; None without one."""
    known = tokenizer.reserved
    return next((known[name] for name in MASK_TOKENS if name in known), None)
