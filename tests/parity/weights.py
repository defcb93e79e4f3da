"""Weights that need no file: made from their names, the same for transformers and for us."""

import zlib

import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.models.families import gpt2, llama, mixtral
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mixtral import Mixtral

VOCAB, WIDTH, DEPTH, HEADS, LENGTH = 61, 32, 3, 4, 17

FAMILIES = {
    "gpt2": GPT2(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, context=32),
    "llama": Llama(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, kv_heads=2, hidden=48),
    "qwen3": Llama(
        vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, kv_heads=2, head_dim=12, hidden=48, qk_norm=True
    ),
    "mixtral": Mixtral(
        vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, kv_heads=2, experts=4, top_k=2, hidden=48
    ),
}  # fmt: skip
KEYS = {"gpt2": gpt2.KEYS, "llama": llama.KEYS, "qwen3": llama.KEYS, "mixtral": mixtral.KEYS}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32, about 0.15 in size, one more for the scale of a norm."""
    seed = zlib.crc32(name.encode()) % 10_000
    count = np.arange(int(np.prod(shape)), dtype=np.float64)
    values = 0.2 * np.sin(count * (1.0 + seed / 10_000) + seed)
    is_scale = len(shape) == 1 and name.endswith("weight")
    return (values + is_scale).astype(np.float32).reshape(shape)


def tokens() -> np.ndarray:
    """Two rows of ids."""
    return (np.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCAB).astype(np.int32)


def ours(family: str, shapes, named):
    """Our tree, filled from arrays by their Hugging Face names through the family's table."""

    def leaf(path, shape):
        name, layout = KEYS[family][path]
        layers = range(DEPTH) if path.startswith("stack/") else (None,)
        parts = [_taken(named[name.format(i=i)], layout) for i in layers]
        return jnp.asarray(np.stack(parts) if "{i}" in name else parts[0]).reshape(shape.shape)

    return tree.map_with_path(leaf, shapes)


def theirs(family: str, gradients) -> dict[str, np.ndarray]:
    """A tree of ours as arrays by Hugging Face name, laid out as there."""
    out: dict[str, np.ndarray] = {}
    for path, array in tree.leaves(gradients).items():
        name, layout = KEYS[family][path]
        for i in range(DEPTH) if "{i}" in name else (0,):
            part = np.asarray(array[i] if "{i}" in name else array)
            kind = layout.partition("[")[0]
            if kind in ("out,in", "in,out"):
                ins = WIDTH if part.shape[0] == WIDTH and not path.endswith("out/weight") else None
                part = part.reshape(ins, -1) if ins else part.reshape(-1, part.shape[-1])
            elif kind == "out":
                part = part.reshape(-1)
            if layout.endswith(",in"):
                part = part.swapaxes(-1, -2)
            key = name.format(i=i)
            # The thirds of GPT-2's query, key and value come in that order, as do the halves of an expert's gate and up.
            order = int(layout[layout.index("[") + 1]) if "[" in layout else 0
            pieces = out.setdefault(key, {})  # type: ignore[arg-type]
            pieces[order] = part
    return {
        key: np.concatenate([p[k] for k in sorted(p)], axis=_cut(p[0])) for key, p in out.items()
    }


def _taken(array: np.ndarray, layout: str) -> np.ndarray:
    if "[" in layout:
        piece, count = layout[layout.index("[") + 1 : layout.index("]")].split("/")
        array = np.split(array, int(count), axis=_cut(array))[int(piece)]
    return array.swapaxes(-1, -2) if layout.endswith(",in") else array


def _cut(array: np.ndarray) -> int:
    """The axis of the outputs in all that lies side by side: GPT-2's "out" and "in,out", and "expert,out,in"."""
    return min(1, array.ndim - 1)
