"""Training on a CPU, beside PyTorch: the same GPT-2, the same optimizer, in turns on the same machine.

    python scripts/bench_torch.py --size=0.8M
    python scripts/bench_torch.py --size=124M --rounds=5

Needs the extra `parity` (Python 3.11). Every arm is a process of its own that is asked for some steps when it is its turn, so that
a slow spell of the machine meets all of them. jaxlm's step is that of `jaxlm train`, guard and metrics included. PyTorch's
is what a person would write: scaled_dot_product_attention, autocast for bfloat16, fused AdamW, clipping by the global norm;
eager, and under torch.compile. The ratio is of the medians over rounds, of the better precision of each.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# layers, width, heads, ids, tokens a row, rows
SIZES = {"0.8M": (4, 128, 4, 128, 64, 12), "124M": (12, 768, 12, 50_304, 256, 4)}
ARMS = {
    f"{name} {precision}": (name, precision)
    for name, precision in itertools.product(
        ("jaxlm", "torch eager", "torch compiled"), ("float32", "bfloat16")
    )
}
LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
Steps = Callable[[int], float]  # takes so many, and returns the last loss


def ours(size: str, precision: str) -> Steps:
    """jaxlm's step, compiled."""
    sys.path.insert(0, str(ROOT))
    import jax
    import numpy as np

    from jaxlm.core import config
    from jaxlm.data.batch import Tokens
    from jaxlm.parallel import host
    from jaxlm.recipes import devices
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.engine import of_sizes

    depth, width, heads, vocab, length, rows = SIZES[size]
    settings = {
        "model.family": "gpt2",
        "model.depth": depth,
        "model.width": width,
        "model.heads": heads,
        "model.vocab": vocab,
        "model.context": length,
        "data.sequence": length,
        "train.batch": rows,
        "train.steps": 1_000_000,
        "precision.compute": precision,
        "schedule.name": "constant",
        "schedule.warmup": 0,
        "optim.lr": LR,
    }
    devices.start()
    pairs = [(path, str(value)) for path, value in settings.items()]
    run: Any = config.load(Run, None, pairs).value
    grid = devices.build_mesh(run.mesh)
    engine = of_sizes(run, grid, vocab)
    ids, targets = batch(size)
    shape = (rows, length)
    fields: Any = {
        "tokens": ids,
        "targets": targets,
        "weights": np.ones(shape, np.float32),
        "segments": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
    }
    with jax.set_mesh(grid):
        state, placed = engine.fresh(), host.put(grid, Tokens(**fields))
        step = engine.step.lower(state, placed).compile()

    def steps(count: int) -> float:
        nonlocal state
        with jax.set_mesh(grid):
            for _ in range(count):
                state, metrics = step(state, placed)
            return float(jax.block_until_ready((state, metrics))[1]["loss_nats"])

    return steps


def theirs(size: str, precision: str, *, compiled: bool) -> Steps:
    """PyTorch's."""
    import torch
    from torch import nn
    from torch.nn import functional

    depth, width, heads, vocab, length, _ = SIZES[size]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            rows, length, _ = x.shape
            q, k, v = (
                part.view(rows, length, heads, -1).transpose(1, 2)
                for part in self.qkv(self.norm(x)).split(width, dim=2)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
            hidden = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
            return x + self.down(hidden)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab, width)
            self.positions = nn.Embedding(length, width)
            self.layers = nn.ModuleList(Layer() for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            for table in (self.embedding, self.positions):
                nn.init.normal_(table.weight, std=0.02)

        def forward(self, ids: Any, targets: Any) -> Any:
            x = self.embedding(ids) + self.positions.weight
            for layer in self.layers:
                x = layer(x)
            logits = functional.linear(self.norm(x), self.embedding.weight)
            return functional.cross_entropy(logits.view(-1, vocab).float(), targets.view(-1))

    torch.manual_seed(0)
    model: Any = Model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    called = torch.compile(model) if compiled else model
    ids, targets = (torch.from_numpy(part).long() for part in batch(size))
    is_low = precision == "bfloat16"

    def steps(count: int) -> float:
        for _ in range(count):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
                loss = called(ids, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return steps


def batch(size: str) -> tuple[Any, Any]:
    """Random ids, each predicting the next."""
    import numpy as np

    *_, vocab, length, rows = SIZES[size]
    ids = np.random.default_rng(0).integers(0, vocab, (rows, length + 1), np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def work(arm: str, size: str) -> None:
    """An arm's process: a line with a number of steps in, one with seconds and the last loss out."""
    name, precision = ARMS[arm]
    steps = (
        ours(size, precision)
        if name == "jaxlm"
        else theirs(size, precision, compiled=name == "torch compiled")
    )
    print(json.dumps([0.0, steps(2)]), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        loss = steps(int(line))
        print(json.dumps([time.perf_counter() - begun, loss]), flush=True)


def measure(size: str, rounds: int, count: int) -> dict[str, Any]:
    """Tokens a second of each arm: the median over rounds, and the range."""
    *_, length, rows = SIZES[size]
    # Threads that wait for work in a loop would take the others' turn from them.
    quiet = os.environ | {"OMP_WAIT_POLICY": "passive", "JAX_PLATFORMS": "cpu"}
    workers, speeds = {}, {}
    for arm in ARMS:
        workers[arm] = subprocess.Popen(
            [sys.executable, __file__, f"--size={size}", f"--arm={arm}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=quiet,
        )
        loss = _answer(arm, workers[arm])[1]
        if not abs(loss - math.log(SIZES[size][3])) < 1:
            raise RuntimeError(f"{arm} starts with a loss of {loss}")
        speeds[arm] = []
    for turn in range(rounds):
        for arm in list(workers) if turn % 2 else reversed(workers):
            pipe: Any = workers[arm].stdin
            pipe.write(f"{count}\n")
            pipe.flush()
            speeds[arm].append(count * rows * length / _answer(arm, workers[arm])[0])
    for worker in workers.values():
        worker.communicate()
    return {
        arm: {"median": statistics.median(of), "least": min(of), "most": max(of)}
        for arm, of in speeds.items()
    }


def _answer(arm: str, worker: subprocess.Popen[str]) -> list[float]:
    assert worker.stdout
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"{arm} ended with exit code {worker.wait()}")
    return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.8M")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--steps", type=int, metavar="N", help="of a round; about 5 seconds")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.arm:
        return work(args.arm, args.size)
    found = measure(args.size, args.rounds, args.steps or {"0.8M": 100, "124M": 1}[args.size])
    best = {
        side: max(v["median"] for arm, v in found.items() if arm.startswith(side))
        for side in ("jaxlm", "torch")
    }
    answer = {"size": args.size, "tokens_per_second": found, "ratio": best["jaxlm"] / best["torch"]}
    if args.json:
        print(json.dumps(answer))
        return None
    for arm, each in found.items():
        print(
            f"{arm:<24}{each['median']:>10.1f} tokens/s  ({each['least']:.1f} to {each['most']:.1f})"
        )
    print(f"{'jaxlm over torch':<24}{answer['ratio']:>10.3f}")
    return None


if __name__ == "__main__":
    main()
