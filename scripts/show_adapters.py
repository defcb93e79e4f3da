"""Adapters on one task: parameters, bytes, seconds and held-out exact match.

    python scripts/show_adapters.py --out=runs/adapters [--seeds=3] [--arms=full,lora]

A model of 0.1M parameters learns sums of two numbers below 100. Each arm begins with it, and learns
from 4,000 examples to answer with the digits of the sum reversed. The answers to sums that no stage
trains on are compared, greedy. An arm has one learning rate, without a search. The table has, for
each arm, its trained parameters, the bytes of its last checkpoint, processor milliseconds a step
(the median of its seeds), and the exact match: the mean, the least and the most.
"""

import argparse
import hashlib
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jaxlm

HELD_OUT, KNOWN = 500, 4000
STEPS = {"start": 600, "arm": 400}
WARM, EVERY = 50, 25  # steps
RATES = {
    "full": 1e-3,
    "lora": 1e-2,
    "dora": 1e-2,
    "qlora": 1e-2,
    "bottleneck": 1e-2,
    "ia3": 3e-2,
    "prefix": 3e-2,
    "prompt": 3e-2,
}
MODEL = {
    "depth": 2,
    "width": 64,
    "heads": 4,
    "kv_heads": 4,
    "hidden": 256,
    "tied": True,
    "dropout": 0.0,
    "max_positions": 64,
}


class Clock(jaxlm.Callback):
    """Processor seconds at each log line."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, float]] = []

    def on_log(self, event: Any) -> None:
        self.marks.append((event.step, time.process_time()))

    def step_seconds(self) -> float:
        """Return those of a step, without the first ones."""
        (first, begun), (last, ended) = next(m for m in self.marks if m[0] >= WARM), self.marks[-1]
        return (ended - begun) / (last - first)


def main() -> None:
    """Train each arm with each seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(RATES), help="arms, separated by commas")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms.split(",")}
    for seed in range(args.seeds):
        folder = args.out / f"seed{seed}"
        held_out = write_data(folder, seed)
        train(folder, "start", seed, {})
        print(f"seed {seed}: start", exact(folder / "start", held_out["start"]), file=sys.stderr)
        for arm, results in rows.items():
            clock = train(
                folder, arm, seed, {"tune": {"name": arm}}, init_from=str(folder / "start")
            )
            results.append(figures(folder / arm, clock, held_out["arm"]))
            print(f"seed {seed}: {arm}", json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(table(rows))


def write_data(folder: Path, seed: int) -> dict[str, list[tuple[str, str]]]:
    """Write examples of both tasks; return prompts and answers that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair}".encode()).hexdigest())
    held_out, known = pairs[:HELD_OUT], pairs[HELD_OUT:]
    random.Random(seed).shuffle(known)
    questions = {}
    for task, sign in (("start", "="), ("arm", "<")):
        rows = [(f"{a:02}+{b:02}{sign}", f"{a + b:03}") for a, b in held_out + known]
        if task == "arm":
            rows = [(prompt, answer[::-1]) for prompt, answer in rows]
        questions[task] = rows[:HELD_OUT]
        examples = rows[HELD_OUT:] if task == "start" else rows[HELD_OUT : HELD_OUT + KNOWN]
        lines = (json.dumps({"prompt": p, "completion": a}) + "\n" for p, a in examples)
        (folder / f"{task}.jsonl").write_text("".join(lines))
    return questions


def train(folder: Path, name: str, seed: int, more: dict[str, Any], **start: Any) -> Clock:
    """Train the start or an arm, and return its clock."""
    task = "start" if name == "start" else "arm"
    settings = {
        "seed": seed,
        "data": {
            "kind": "completion",
            "tokenizer": "bytes",
            "sequence": 32,
            "train": [str(folder / f"{task}.jsonl")],
        },
        "model": MODEL,
        "optim": {"lr": RATES.get(name, 3e-3), "weight_decay": 0.0},
        "schedule": {"warmup": "5%"},
        "train": {"steps": STEPS[task], "batch": 32},
        "log": {"every": EVERY},
        "eval": {"every": "100%"},
        "checkpoint": {"every": "100%"},
        "sample": {"prompts": ()},
    }
    clock = Clock()
    jaxlm.train(settings | more, workdir=folder / name, callbacks=[clock], **start)
    return clock


def figures(run: Path, clock: Clock, held_out: list[tuple[str, str]]) -> dict[str, float]:
    """Return what the table has of a run."""
    forecast = json.loads((run / "forecast.json").read_text())
    last = max((run / "checkpoints").iterdir(), key=lambda each: int(each.name))
    return {
        "parameters": forecast["bytes_per_device"]["parameters"] / 4,  # float32
        "bytes": sum(each.stat().st_size for each in last.rglob("*") if each.is_file()),
        "seconds": clock.step_seconds(),
        "exact": exact(run, held_out),
    }


def exact(run: Path, held_out: list[tuple[str, str]]) -> float:
    """Return the share of prompts that a run answers, greedy."""
    prompts = [prompt for prompt, _ in held_out]
    answers = jaxlm.load(run).generate(prompts, max_tokens=8, temperature=0.0)
    right = (each.text == answer for each, (_, answer) in zip(answers, held_out, strict=True))
    return sum(right) / len(prompts)


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| `tune.name` | learning rate | parameters | checkpoint, kB | ms a step | exact match |",
        "|---|---|---|---|---|---|",
    ]
    for arm, results in rows.items():
        shares = [each["exact"] for each in results]
        seconds = statistics.median(each["seconds"] for each in results)
        lines.append(
            f"| `{arm}` | {RATES[arm]:g} | {results[0]['parameters']:,.0f} "
            f"| {results[0]['bytes'] / 1000:,.0f} | {1000 * seconds:.1f} "
            f"| {statistics.mean(shares):.3f} ({min(shares):.3f} to {max(shares):.3f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
