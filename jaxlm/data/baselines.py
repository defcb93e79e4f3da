"""Yardsticks that everyone knows: what byte frequencies and file compressors need for the same text."""

import bz2
import gzip
import lzma

import numpy as np

from jaxlm.data.joined import AnyShards

MEASURED_BYTES = 2**25  # xz -9e takes about a second for each MB


def stored_text(shards: AnyShards, limit: int = MEASURED_BYTES) -> bytes:
    """The first `limit` bytes of the text behind some shards: documents end to end, in order of their files' paths."""
    table = shards.tokenizer.table
    text = bytearray()
    for start in range(0, shards.documents, 1024):
        lengths = shards.lengths(start, min(start + 1024, shards.documents))
        for document, length in enumerate(lengths.tolist(), start):
            text += b"".join(map(table.__getitem__, shards.read(document, 1, length - 1).tolist()))
            if len(text) >= limit:
                return bytes(text[:limit])
    return bytes(text)


def bits_per_byte(text: bytes) -> dict[str, float]:
    """Compressed bits for each byte of `text`, whole, by method; empty where there is no text.

    `unigram` is the entropy of the text's own byte frequencies, as if they were known beforehand.
    """
    if not text:
        return {}
    share = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
    share = share[share > 0]
    sizes = {
        "gzip -9": len(gzip.compress(text, 9, mtime=0)),
        "bz2 -9": len(bz2.compress(text, 9)),
        "xz -9e": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
    entropy = float(-(share * np.log2(share)).sum())
    return {"unigram": entropy} | {name: 8 * size / len(text) for name, size in sizes.items()}
