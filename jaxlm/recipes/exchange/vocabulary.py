"""Tokens added to an imported model: their ids, and embedding rows with the mean of the others."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxlm.checkpoint.hub_tensors import Reader, Slices
from jaxlm.core.errors import CommandError
from jaxlm.data.hub_tokenizer import Imported

# Axis of the vocabulary of each leaf that has one.
AXES = {"embedding/table": 0, "unembedding/weight": 1, "head/bias": 0}
CHUNK = 4096  # rows read at a time for a mean


def add_tokens(tokenizer: Imported, tokens: Sequence[str]) -> Imported:
    """Return the tokenizer with `tokens` after its own; added tokens are matched before all others.

    Raises:
      CommandError: if a token is empty or already exists.
    """
    if not tokens:
        return tokenizer
    import tokenizers

    built = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    for number, token in enumerate(tokens):
        if not token or token in tokens[:number] or built.token_to_id(token) is not None:
            raise CommandError(
                f"{token!r} is not a new token",
                where=f"--add_token={token}",
                why="it is empty"
                if not token
                else "the tokenizer has it, or the command names it twice",
                fix="leave it out",
            )
    built.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    return Imported(
        built.to_str().encode(),
        before=tokenizer.before,
        after=tokenizer.after,
        ends=tokenizer.ends,
        where="--add_token",
    )


@dataclasses.dataclass
class MeanInitRows:
    """Reads leaves like `Reader`; rows of ids from `known` on are the mean of the rows before.

    These include rows of the embedding that have no id in the tokenizer. The mean is taken in
    float64,
    over a part of the rows at a time, and rounded once.

    Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models".
    """

    reader: Reader
    known: int

    def __post_init__(self) -> None:
        self._means: dict[str, np.ndarray] = {}

    def leaf(
        self, path: str, shape: tuple[int, ...], within: Slices, dtype: np.dtype
    ) -> np.ndarray:
        """Return the part `within` a leaf."""
        if path not in AXES:
            return self.reader.leaf(path, shape, within, dtype)
        axis = AXES[path]
        cuts = [slice(*cut.indices(size)[:2]) for cut, size in zip(within, shape, strict=True)]
        first, stop = cuts[axis].start, cuts[axis].stop
        read = max(first, min(stop, self.known))
        mean = self._mean(path, shape, dtype)[(*cuts[:axis], *cuts[axis + 1 :])]
        size = [cut.stop - cut.start for cut in cuts]
        size[axis] = stop - read
        new = np.broadcast_to(np.expand_dims(mean, axis), size)
        if read == first:
            return np.ascontiguousarray(new)
        cuts[axis] = slice(first, read)
        return np.concatenate((self.reader.leaf(path, shape, tuple(cuts), dtype), new), axis)

    def _mean(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if path not in self._means:
            axis = AXES[path]
            total = np.zeros((*shape[:axis], *shape[axis + 1 :]))
            cuts = [slice(0, size) for size in shape]
            for first in range(0, self.known, CHUNK):
                cuts[axis] = slice(first, min(first + CHUNK, self.known))
                part = self.reader.leaf(path, shape, tuple(cuts), np.dtype(np.float32))
                total = total + part.sum(axis, dtype=np.float64)
            self._means[path] = (total / self.known).astype(dtype)
        return self._means[path]
