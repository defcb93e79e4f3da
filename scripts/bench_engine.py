"""Tokens of the engine against those of one batch: processor time of both, by turns.

    python scripts/bench_engine.py --turns=3

A GPT-2 of 110M random parameters and 8 prompts of 64 tokens. `equal` draws as many tokens for each
prompt; `geometric` has more prompts, whose answers have geometric lengths: batches of 8 wait for
their longest answer, and the engine refills a slot at once. `grammar` is the engine with the same
lengths as `equal`, in a string of JSON: it draws one token in a call of the device.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.data.tokenizer import Bytes
from jaxlm.generate import decode, sampling
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.grammar import Grammar, GrammarCompiler, GrammarSource
from jaxlm.generate.requests import Request
from jaxlm.generate.rows import Sampling
from jaxlm.models.build import Blueprint
from jaxlm.models.families.gpt2 import GPT2

ROWS = 8
Arm = Callable[[], int]  # returns the number of tokens


def batches(
    blueprint: Blueprint, params: Any, prompts: np.ndarray, lengths: np.ndarray, temperature: float
) -> Arm:
    """`decode`, as `jaxlm generate` uses it, a batch at a time, each as long as its longest.

    Args:
      blueprint: the model.
      params: its parameters.
      prompts: ids of the prompts.
      lengths: number of new tokens of each.
      temperature: divisor of the logits.
    """
    draw = functools.partial(sampling.draw, temperature=temperature)
    parts = decode.build(
        blueprint.merge, draw, max_tokens=int(lengths.max()), ends=(), pad=0
    ).compiled()
    ready = parts.prepare(params)
    keys = jax.random.split(jax.random.key(0), ROWS)
    reads = jnp.full((ROWS,), prompts.shape[1])

    def run() -> int:
        for first in range(0, len(prompts), ROWS):
            part = slice(first, first + ROWS)
            state = parts.start(ready, jnp.asarray(prompts[part]), reads, keys)
            state = parts.decode_until(ready, state, keys, jnp.int32(lengths[part].max()))
            np.asarray(decode.collect(state).ids)
        return int(lengths.sum())

    return run


class Words(Bytes):
    """Ids of bytes, and of words of letters up to a size of the vocabulary."""

    def __init__(self, size: int):
        super().__init__()
        random = np.random.default_rng(0)
        letters = random.integers(97, 123, (size - len(self.table), 6), np.uint8)
        self.table = [*self.table, *(bytes(row[: 2 + row[5] % 5]) for row in letters)]


def refilled(
    engine: Engine,
    prompts: np.ndarray,
    lengths: np.ndarray,
    temperature: float,
    grammar: Grammar | None = None,
) -> Arm:
    """The engine, with a request for each prompt.

    Args:
      engine: the engine.
      prompts: ids of the prompts.
      lengths: number of new tokens of each.
      temperature: divisor of the logits.
      grammar: limits the ids of each.
    """
    requests = [
        Request(
            ids=tuple(ids.tolist()),
            max_tokens=int(length),
            seed=number,
            sampling=Sampling(temperature=temperature),
            grammar=grammar,
        )
        for number, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    def run() -> int:
        return sum(len(each.ids) for each in engine.complete(requests))

    return run


def main() -> None:
    """Print each turn, then the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer, or their mean")
    parser.add_argument("--requests", type=int, default=48, help="with geometric lengths")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    model = GPT2(
        vocab=args.vocab,
        width=args.width,
        depth=args.depth,
        heads=args.width // 64,
        max_positions=args.context,
    )
    blueprint = Blueprint(model.build(), Precision.of(PrecisionConfig(compute="float32")))
    params = jax.jit(blueprint.init)(jax.random.key(0))
    random = np.random.default_rng(0)
    room = args.context - args.prompt
    lengths = {
        "equal": np.full((ROWS,), args.new),
        "geometric": np.minimum(random.geometric(1 / args.new, args.requests), room),
    }
    tokenizer = Words(args.vocab)
    settings = EngineSettings(rows=ROWS, context=args.context)
    engine = Engine(blueprint, params, tokenizer, settings)
    engine.warm_up()
    schema = json.dumps({"type": "string", "minLength": 100 * args.context})
    with GrammarCompiler(tokenizer, args.vocab) as compiler:
        grammar = compiler.compile(GrammarSource("json", schema), tokenizer.ends)
    arms: dict[str, Arm] = {}
    for name, each in lengths.items():
        prompts = random.integers(3, args.vocab, (len(each), args.prompt), np.int32)
        arms[f"{name}, batches"] = batches(blueprint, params, prompts, each, args.temperature)
        arms[f"{name}, engine"] = refilled(engine, prompts, each, args.temperature)
        if name == "equal":
            arms["equal, grammar"] = refilled(engine, prompts, each, args.temperature, grammar)
    for run in arms.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(args.turns):
        for name, run in arms.items():
            before, begun = time.process_time(), time.perf_counter()
            tokens = run()
            used, seconds = time.process_time() - before, time.perf_counter() - begun
            rates[name].append(tokens / used)
            print(
                f"turn {turn + 1}  {name:<20}{tokens / used:8.1f} tokens a second of processor"
                f"{tokens / seconds:8.1f} by the clock",
                flush=True,
            )
    medians = {name: statistics.median(each) for name, each in rates.items()}
    for name in lengths:
        pairs = zip(rates[f"{name}, engine"], rates[f"{name}, batches"], strict=True)
        medians[f"{name}, ratio"] = statistics.median(ours / batch for ours, batch in pairs)
    pairs = zip(rates["equal, grammar"], rates["equal, engine"], strict=True)
    medians["grammar over engine"] = statistics.median(one / other for one, other in pairs)
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
