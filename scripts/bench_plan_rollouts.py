"""Seconds of a rollout and an update of GRPO as `jaxlm plan` predicts them, and as they are.

    taskset -c 0 python scripts/bench_plan_rollouts.py --size=1M --steps=6

The settings are those of the config rl/grpo; samples seldom end, and each group has different
rewards. Figures are the median of all steps but the first two, in seconds of the processor, so that
other work on the machine counts little: use one core. The rest is what an iteration takes besides
drawing, scoring and training. `middle` is the geometric mean of the plan over the measured figure.
The last line has the speed of NumPy's matmuls between the steps: the plan takes their best speed,
and other work on the same core or its memory makes all seconds longer than those of an idle one.
"""

import argparse
import json
import statistics
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

import jaxlm
from jaxlm.core import config
from jaxlm.monitor import host_machine
from jaxlm.monitor.clock import Clock
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from jaxlm.recipes.train import rollouts
from jaxlm.rl import scoring
from jaxlm.training.loop import TrainLoop

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 1, "width": 16, "heads": 2, "hidden": 32, "vocab": 320},
    "1M": {"depth": 4, "width": 128, "heads": 4, "hidden": 384, "vocab": 320},
    "4M": {"depth": 4, "width": 256, "heads": 4, "hidden": 768, "vocab": 1024},
    "12M": {"depth": 6, "width": 384, "heads": 6, "hidden": 1024, "vocab": 4096},
}
# Samples of an update, tokens of a row, new ones.
ROWS = {"tiny": (8, 16, 8), "1M": (64, 512, 256), "4M": (32, 256, 64), "12M": (64, 128, 64)}
PRODUCTS = 5  # between two steps
SKIPPED = 2  # steps at the start, with compilations
PARTS = "draw_seconds", "score_seconds", "rescore_seconds", "train_seconds", "step_seconds"
REWARD = "def chance(seed):\n    return seed % 7 / 7\n"


def settings(size: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return the settings of a run, and write its files."""
    batch, sequence, new = ROWS[size]
    texts = [f"{n:0{sequence - new - 2}}=" for n in range(256)]
    prompts, rewards = folder / "prompts.jsonl", folder / "rewards.py"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    rewards.write_text(REWARD)
    shape = {f"model.{name}": value for name, value in SIZES[size].items()}
    return {
        **shape,
        "model.kv_heads": SIZES[size]["heads"],
        "model.dropout": 0.0,
        "data.kind": "prompts",
        "data.train": [str(prompts)],
        "data.validation": [],
        "data.tokenizer": "bytes",
        "data.sequence": sequence,
        "objective.name": "policy",
        "objective.algorithm": "grpo",
        "rl.samples": min(8, batch),
        "rl.max_tokens": new,
        "reward.functions": [f"{rewards}:chance"],
        "optim.lr": 1e-6,
        "optim.weight_decay": 0.0,
        "train.steps": steps,
        "train.batch": batch,
        "train.stack": "auto",
        "train.microbatches": 4,
        "loss.chunk": 2048,
        "log.every": 1,
        "log.sinks": [],
        "sample.prompts": [],
        "checkpoint.every": steps,
    }


def use_processor_time() -> None:
    """Let all figures of a run be seconds of the processor."""
    clock: Any = types.SimpleNamespace(perf_counter=time.process_time)
    vars(scoring)["time"] = vars(rollouts)["time"] = clock
    TrainLoop.run.__defaults__ = (time.process_time,)
    init: Any = Clock.__init__
    init.__kwdefaults__["now"] = time.process_time


def product_seconds() -> float:
    """Return the median processor seconds of a matmul of the plan's size, of PRODUCTS."""
    a, times = np.ones((host_machine.SIDE, host_machine.SIDE), np.float32), []
    for _ in range(PRODUCTS):
        begun = time.process_time()
        a @ a
        times.append(time.process_time() - begun)
    return statistics.median(times)


def measured(chosen: dict[str, Any], folder: Path) -> tuple[dict[str, float], float]:
    """Train, and return the median of each figure, and FLOP/s of matmuls between the steps."""
    records: list[dict[str, Any]] = []
    products: list[float] = []

    def on_record(step: int, record: dict[str, Any]) -> None:
        if record["split"] == "train" and step > SKIPPED:
            records.append(record)
            products.append(product_seconds())

    jaxlm.train(chosen, workdir=folder / "run", callbacks=[on_record], quiet=True)
    figures = {
        name: statistics.median(each[name] for each in records)
        for name in PARTS
        if name in records[0]
    }
    outside = [each["step_seconds"] - sum(each.get(n, 0.0) for n in PARTS[:-1]) for each in records]
    between = PRODUCTS * statistics.median(products)  # which the clock of a step includes
    figures["step_seconds"] -= between
    figures["rest_seconds"] = statistics.median(outside) - between
    return figures, 2 * host_machine.SIDE**3 / statistics.median(products)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    use_processor_time()
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings(args.size, Path(folder), args.steps)
        chosen |= dict(each.split("=", 1) for each in args.set)
        flags = [
            (name, ",".join(value) if isinstance(value, list) else str(value))
            for name, value in chosen.items()
        ]
        run = config.load(Run, None, flags).value
        figures, speed = measured(chosen, Path(folder))
        assumed: list[str] = []
        plan = predict.forecast(run, host_machine.this_machine(1, assumed))
    assert plan.rollout is not None
    rows = {
        "draw_seconds": plan.rollout.draw_seconds,
        "rescore_seconds": plan.rollout.rescore_seconds,
        "train_seconds": plan.seconds,
    }
    print(f"{args.size}: {', '.join(assumed)}")
    for name, value in figures.items():
        low, high = rows.get(name, (0.0, 0.0))
        middle = (low * high) ** 0.5
        planned = f"planned {low:.3f} to {high:.3f}, middle {middle / value:.2f}" if high else ""
        print(f"{name:16}{value:8.3f} {value / figures['step_seconds']:6.1%}  {planned}")
    best = plan.machine.chip.flops["float32"]
    print(f"matmuls between steps: {speed / 1e9:.0f} GFLOP/s, {speed / best:.2f} of the plan's")


if __name__ == "__main__":
    main()
