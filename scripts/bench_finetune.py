"""Seconds and bytes of a fine-tuning step: each adapter against the step of all weights.

    taskset -c 0 python scripts/bench_finetune.py --size=quickstart
    taskset -c 0 python scripts/bench_finetune.py --size=100m --arms=lora --json

All steps run in this process, on the same rows, in turns. `chat` is the step of all weights on rows
with half of the tokens trained. Seconds are of the processor, so that other programs count little.
The ratio is that of the least seconds of an arm and of `full`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_step import SIZES

from jaxlm.core import config, tree
from jaxlm.data.batch import Tokens
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.programs import without_data

ROOT = Path(__file__).parents[1]
ARMS = ("full", "chat", "lora", "qlora", "dora", "ia3", "bottleneck")


class Side:
    """The step of one arm, with its state."""

    def __init__(self, size: str, arm: str):
        tune = "full" if arm == "chat" else arm
        settings = [*SIZES[size].items(), ("tune.name", tune)]
        self.run: Run = config.load(Run, str(ROOT / "configs/quickstart.py"), settings).value
        vocab = int(self.run.model.vocab)
        self.engine = without_data(self.run, meshes.build(self.run.mesh), vocab)
        if self.engine.model.base:
            self.engine.base = jax.jit(self.engine.model.stored.init)(jax.random.key(0))
        self.state = self.engine.init_state()
        self.batch = self._batch(vocab, is_chat=arm == "chat")
        self.parameters = tree.count(self.state.params)
        self.bytes = tree.size_bytes((self.state.params, self.state.opt_state))

    def _batch(self, vocab: int, *, is_chat: bool) -> Tokens:
        draw, shape = np.random.default_rng(0), (self.run.train.batch, self.run.data.sequence)
        tokens = draw.integers(0, vocab, shape).astype(np.int32)
        positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        weights = np.ones(shape, np.float32)
        if is_chat:
            weights[:, : shape[1] // 2] = 0.0
        slots = tokens, np.roll(tokens, -1, 1), weights, np.ones_like(tokens), positions
        fields: Any = map(jnp.asarray, slots)
        return Tokens(*fields)

    def seconds(self, steps: int) -> float:
        """Return the processor's seconds of a step, the mean over `steps`."""
        begun = time.process_time()
        for _ in range(steps):
            self.state, _ = self.engine.step(self.state, self.batch, **self.engine.extra_inputs)
        jax.block_until_ready(self.state)
        return (time.process_time() - begun) / steps


def measure(size: str, arms: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Return seconds by round, and parameters and bytes of the state, of each arm."""
    setup.start()
    sides = {arm: Side(size, arm) for arm in dict.fromkeys(("full", *arms))}
    times: dict[str, list[float]] = {arm: [] for arm in sides}
    for side in sides.values():
        side.seconds(2)
    for _ in range(rounds):
        for arm, side in sides.items():
            times[arm].append(side.seconds(steps))
    full = times["full"]
    return {
        arm: {
            "parameters": side.parameters,
            "state_bytes": side.bytes,
            "seconds": statistics.median(times[arm]),
            "ratio": min(times[arm]) / min(full),
        }
        for arm, side in sides.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--arms", default=",".join(ARMS[1:]), help="arms, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each arm in a round; 5, or 1 at 100m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps = args.steps or (1 if args.size == "100m" else 5)
    result = measure(args.size, args.arms.split(","), args.rounds, steps)
    if args.json:
        print(json.dumps({"size": args.size, "arms": result}))
        return
    for arm, each in result.items():
        print(
            f"{arm:<11} {each['parameters']:>12,} parameters  {each['state_bytes'] / 2**20:8.2f} "
            "MiB"
            f"  {each['seconds'] * 1000:9.1f} ms  {each['ratio']:.3f} of full"
        )


if __name__ == "__main__":
    main()
