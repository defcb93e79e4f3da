"""Sizes of scripts/bench_torch.py, jaxlm's settings for them, and the rows of all sides."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxlm.core import config
from jaxlm.models.cost import model_cost
from jaxlm.recipes.config import Run

LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model of either family, and the batch of a step."""

    family: Literal["gpt2", "llama"]
    depth: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int
    rows: int
    norm_eps: float = 1e-5
    rope_theta: float = 5e5

    @property
    def tokens_per_step(self) -> int:
        """Slots of the batch."""
        return self.rows * self.length


def _gpt2(depth: int, width: int, heads: int, vocab: int, length: int, rows: int) -> Size:
    return Size(
        family="gpt2",
        depth=depth,
        width=width,
        heads=heads,
        kv_heads=heads,
        hidden=4 * width,
        vocab=vocab,
        length=length,
        rows=rows,
    )


def _llama_1b(length: int, rows: int) -> Size:
    """The shape of Llama 3.2 1B, tied."""
    return Size(
        family="llama",
        depth=16,
        width=2048,
        heads=32,
        kv_heads=8,
        hidden=8192,
        vocab=128_256,
        length=length,
        rows=rows,
    )


# Those of a GPU have as many tokens a step at both lengths. 1B has half of GPT-2's: PyTorch keeps
# all activations and logits of 128,256 ids in float32, by a count by hand some 70 of the 139 GiB of
# an H200.
SIZES = {
    "gpt2-tiny": _gpt2(2, 64, 4, 128, 32, 4),
    "llama-tiny": Size(
        family="llama",
        depth=2,
        width=64,
        heads=4,
        kv_heads=2,
        hidden=128,
        vocab=128,
        length=32,
        rows=4,
    ),
    "0.8M": _gpt2(4, 128, 4, 128, 64, 12),
    "llama-0.8M": Size(
        family="llama",
        depth=4,
        width=128,
        heads=4,
        kv_heads=4,
        hidden=384,
        vocab=128,
        length=64,
        rows=12,
    ),
    "124M": _gpt2(12, 768, 12, 50_304, 256, 4),
    "gpt2-124M@2048": _gpt2(12, 768, 12, 50_304, 2048, 16),
    "gpt2-124M@8192": _gpt2(12, 768, 12, 50_304, 8192, 4),
    "llama-1B@2048": _llama_1b(2048, 8),
    "llama-1B@8192": _llama_1b(8192, 2),
}
OF_CPU = ("0.8M",)
OF_GPU = ("gpt2-124M@2048", "gpt2-124M@8192", "llama-1B@2048", "llama-1B@8192")


def settings_of(size: Size, precision: str) -> dict[str, Any]:
    """Return jaxlm's settings of a size, by path, with a constant learning rate.

    No remat, and all logits at once: `jaxlm plan --on=h200` gives every size of a GPU 25 to 56 GiB
    so, and more seconds a step with either.
    """
    settings: dict[str, Any] = {
        "model.family": size.family,
        "model.depth": size.depth,
        "model.width": size.width,
        "model.heads": size.heads,
        "model.kv_heads": size.kv_heads,
        "model.hidden": size.hidden,
        "model.vocab": size.vocab,
        "model.max_positions": size.length,
        "model.tied": True,
        "model.norm_eps": size.norm_eps,
        "data.sequence": size.length,
        "train.batch": size.rows,
        "train.steps": 1_000_000,
        "train.remat": "none",
        "train.stack": "auto",
        "loss.chunk": None,
        "objective.document_mask": False,  # PyTorch's side has no documents
        "precision.compute": precision,
        "schedule.name": "constant",
        "schedule.warmup": 0,
        "optim.name": "adamw",
        "optim.lr": LR,
        "optim.b1": BETAS[0],
        "optim.b2": BETAS[1],
        "optim.eps": EPS,
        "optim.weight_decay": DECAY,
        "optim.clip_norm": CLIP,
    }
    if size.family == "llama":
        settings["model.rope_theta"] = size.rope_theta
    return settings


def run_of(size: Size, precision: str, overrides: Sequence[tuple[str, str]] = ()) -> Run:
    """Return jaxlm's run of a size. Free of JAX.

    Raises:
      ConfigError: where an override is wrong.
    """
    pairs = [(path, str(value)) for path, value in settings_of(size, precision).items()]
    return config.load(Run, None, [*pairs, *overrides]).value


def costs(size: Size) -> tuple[int, float]:
    """Parameters, and model FLOPs of a token, attention at the causal half."""
    decoder = run_of(size, "float32").model.build()
    return model_cost.parameters(decoder), model_cost.flops_per_token(
        decoder, size.length, causal=True
    )


def batch(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Random ids int32[rows, length], and those that they predict."""
    shape = (size.rows, size.length + 1)
    ids = np.random.default_rng(0).integers(0, size.vocab, shape, np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()
