"""Reference losses of a text: byte frequencies, token frequencies and file compressors.

Example:
  >>> bits_per_byte(b"abab" * 100)["unigram"]
  1.0
"""

import bz2
import gzip
import lzma

import numpy as np

from jaxlm.core.errors import JaxlmError
from jaxlm.data.loader import Loader
from jaxlm.data.shards import AnyShards

COUNTED_TOKENS, COUNTED_DOCUMENTS = 2**20, 2048  # for token frequencies: a second at most
MEASURED_BYTES = 2**25  # xz -9e takes about a second for each MB


def stored_text(shards: AnyShards, limit: int = MEASURED_BYTES) -> bytes:
    """Return the first `limit` bytes of the text of some shards: documents in order, joined."""
    table = shards.tokenizer.table
    text = bytearray()
    for start in range(0, shards.documents, 1024):
        lengths = shards.lengths(start, min(start + 1024, shards.documents))
        for document, length in enumerate(lengths.tolist(), start):
            text += b"".join(map(table.__getitem__, shards.read(document, 1, length - 1).tolist()))
            if len(text) >= limit:
                return bytes(text[:limit])
    return bytes(text)


def unigram_nats(train: AnyShards, text: AnyShards, limit: int = COUNTED_TOKENS) -> float | None:
    """Return nats per token of `text` under the token frequencies of `train`, each count plus one.

    Both are sampled: `limit` tokens of documents at even distances. The first token of a document
    is not predicted. Return None if there is no token.
    """
    known, counts = _frequencies(train, limit), _frequencies(text, limit)
    if not counts.sum():
        return None
    share = (known + 1) / (known.sum() + len(known))
    return float(-(counts * np.log(share)).sum() / counts.sum())


def unigram_of(train: Loader, text: Loader | None) -> float | None:
    """Return `unigram_nats` of the text of a loader.

    Return None without a text, if not every token of it is predicted, or if a shard is damaged.
    """
    if text is None or not text.predicts_all:
        return None
    try:
        return unigram_nats(train.shards, text.shards)
    except JaxlmError:  # a damaged shard, which the loader handles
        return None


def _frequencies(shards: AnyShards, limit: int) -> np.ndarray:
    """Count each id as a target in about `limit` tokens of the documents; float64[V]."""
    counts = np.zeros(shards.tokenizer.size)
    chosen = np.unique(np.linspace(0, shards.documents - 1, COUNTED_DOCUMENTS).astype(np.int64))
    longest = max(limit // len(chosen), 1)
    for document in chosen.tolist():
        (length,) = shards.lengths(document, document + 1).tolist()
        ids = shards.read(document, 1, min(length, 1 + longest))
        counts += np.bincount(ids, minlength=len(counts))
    return counts


def bits_per_byte(text: bytes) -> dict[str, float]:
    """Return compressed bits per byte of `text` by method; empty for an empty text.

    `unigram` is the entropy of the text's own byte frequencies, as if known beforehand.
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
