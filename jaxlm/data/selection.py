"""Which part of a corpus is for training and which is held out."""

import dataclasses
import hashlib
import re
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Selection:
    """All of a corpus, or one side of a split.

    A split by `documents` puts a document on one side by the sha256 of its text, so it never moves and two copies never
    part. A split by `tail` holds out the last share of each document's characters: for corpora of one long text.
    """

    split: Literal["none", "documents", "tail"] = "none"
    share: float = 0.0
    held_out: bool = False

    def take(self, text: str) -> str:
        """The part of a document on this side; empty where there is none."""
        if self.split == "none":
            return text
        if self.split == "tail":
            cut = int(len(text) * (1.0 - self.share))
            return text[cut:] if self.held_out else text[:cut]
        value = (
            int.from_bytes(
                hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big"
            )
            / 2**64
        )
        return text if (value < self.share) == self.held_out else ""


_SHARE = re.compile(r"(tail:)?([0-9.]+)%")


def held_out(entry: str) -> tuple[Selection, Selection] | None:
    """The (train, validation) sides that an entry of `data.validation` such as "5%" or "tail:10%" names; None for a glob."""
    match = _SHARE.fullmatch(entry)
    if match is None:
        return None
    split: Literal["documents", "tail"] = "tail" if match[1] else "documents"
    share = float(match[2]) / 100
    return Selection(split, share, False), Selection(split, share, True)
