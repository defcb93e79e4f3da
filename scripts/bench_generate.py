"""Tokens a second of greedy generation on CPU, against `generate` of transformers.

    python scripts/bench_generate.py --turns=3

Both sides take turns in one process, with the same weights. It needs torch and transformers (Python
3.11: the `parity` extra). A GPT-2 of 110M parameters, 8 prompts of 64 tokens, 128 new tokens each.
Both compile or warm up before they are timed. With w8a8 the linear layers of jaxlm have weights of
8 bits and products of integers, as after `jaxlm quantize --scheme=w8a8`; all else is in bfloat16.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax
import numpy as np
import torch
import transformers
from opened import opened

from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import Float, PrecisionConfig
from jaxlm.data.tokenizer import Bytes
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.requests import Request
from jaxlm.generate.rows import Sampling
from jaxlm.models.build import Blueprint
from jaxlm.tune import surgery
from jaxlm.tune.config import Quantized

Generate = Callable[[], np.ndarray]  # new ids [rows, tokens]


class Text(Bytes):
    """Every id is text, so that any may be drawn, as on the other side."""

    def __init__(self, size: int):
        super().__init__()
        self.table = [b"w "] * size


def ours(folder: Path, kind: str, prompts: np.ndarray, count: int) -> Generate:
    """The engine of `jaxlm generate`, with products of operands in `kind`, or of w8a8."""
    compute: Float = "float32" if kind == "float32" else "bfloat16"
    precision = Precision.of(PrecisionConfig(compute=compute))
    blueprint, params = opened(Folder(folder), precision)
    if kind == "w8a8":
        change = surgery.build(Quantized(base="w8a8"))
        assert change is not None
        key, plain = jax.random.key(0), blueprint
        blueprint = Blueprint(plain.config, precision, surgery=change)
        params = jax.jit(lambda base: surgery.adapted_params(plain, change, base, key))(params)
    settings = EngineSettings(rows=len(prompts), context=prompts.shape[1] + count)
    engine = Engine(blueprint, params, Text(blueprint.config.vocab), settings)
    greedy = Sampling(temperature=0.0)
    requests = [
        Request(ids=tuple(ids), max_tokens=count, sampling=greedy) for ids in prompts.tolist()
    ]

    def run() -> np.ndarray:
        return np.asarray([each.ids for each in engine.complete(requests)])

    return run


def theirs(folder: Path, dtype: str, prompts: np.ndarray, count: int) -> Generate:
    """transformers, with weights in `dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    ids = torch.tensor(prompts, dtype=torch.long)
    how = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)

    def run() -> np.ndarray:
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return out[:, prompts.shape[1] :].numpy()

    return run


# Arms of jaxlm, and the dtype of the arm of transformers that each is compared with.
COMPARED = {"float32": "float32", "bfloat16": "bfloat16", "w8a8": "bfloat16"}


def main() -> None:
    """Prints each turn, then the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    config = transformers.GPT2Config(
        vocab_size=args.vocab,
        n_embd=args.width,
        n_layer=args.depth,
        n_head=args.width // 64,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    prompts = np.random.default_rng(0).integers(3, args.vocab, (args.batch, args.prompt), np.int32)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        setup = prompts, args.new
        arms = {f"jaxlm {kind}": ours(folder, kind, *setup) for kind in COMPARED}
        others = dict.fromkeys(COMPARED.values())
        arms |= {f"transformers {dtype}": theirs(folder, dtype, *setup) for dtype in others}
        texts = {name: run() for name, run in arms.items()}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(args.turns):
            for name, run in arms.items():
                begun = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begun)
                rate = args.batch * args.new / seconds[name][-1]
                print(f"turn {turn + 1}  {name:<22}{rate:8.1f} tokens/s", flush=True)
    print(json.dumps(answer(texts, seconds, args.batch * args.new)))


def answer(
    texts: dict[str, np.ndarray], seconds: dict[str, list[float]], tokens: int
) -> dict[str, Any]:
    """Median rates, speed ratios turn by turn, and the equal share of the texts."""
    rates: dict[str, Any] = {name: tokens / statistics.median(s) for name, s in seconds.items()}
    for kind, dtype in COMPARED.items():
        key, other = f"jaxlm {kind}", f"transformers {dtype}"
        by_turn = [b / a for a, b in zip(seconds[key], seconds[other], strict=True)]
        rates[f"times as fast, {key}"] = statistics.median(by_turn)
        rates[f"same ids, {key}"] = float((texts[key] == texts[other]).mean())
    return rates


if __name__ == "__main__":
    main()
