"""Work of XLA for CPU besides matmuls, in FLOPs of float32 matmuls of the same time.

The figures are those of small models on one core with 512-bit vectors (scripts/LOG.md, 2026-11-27).
They scale with the speed of matmuls, as both are bound by the vector units. Free of JAX.
"""

from jaxlm.models.config import ModelConfig
from jaxlm.models.cost import model_cost

TRAINED_SCORE = 1400.0  # of attention: mask, softmax and their gradients
READ_SCORE = TRAINED_SCORE / 3  # of a forward pass
CACHED_NUMBER = 60.0  # of the KV cache that a token sees: its matmuls have one row
DRAWN_ID = 4200.0  # noise and log-probability of an id that may be drawn


def scores_per_token(decoder: ModelConfig, length: int) -> float:
    """Return the scores of attention per token of a row: hidden ones are computed too."""
    return sum(
        block.attention.heads * min(block.attention.window or length, length)
        for block in (*decoder.layers, *decoder.heads)
    )


def step(decoder: ModelConfig, length: int) -> float:
    """Return the work of a step per token of a row."""
    return TRAINED_SCORE * scores_per_token(decoder, length)


def forward(decoder: ModelConfig, length: int) -> float:
    """Return the work of a forward pass per token of a row."""
    return READ_SCORE * scores_per_token(decoder, length)


def token(decoder: ModelConfig, keys: int) -> float:
    """Return the work of drawing the next id of a row that has some keys."""
    numbers = model_cost.cache_bytes(decoder, keys, element_bytes=1)
    return CACHED_NUMBER * numbers + DRAWN_ID * decoder.vocab
