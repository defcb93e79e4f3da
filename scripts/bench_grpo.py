"""Iterations of GRPO of jaxlm and of TRL's GRPOTrainer, in turns, by processor time.

    taskset -c 0 python scripts/bench_grpo.py --python=PEFTENV/bin/python --size=12M --rounds=5

--python names an interpreter with torch, transformers and trl. An iteration draws samples of 32
tokens, 8 of each of 64 prompts (size 12M), rewards them by a verifier, and makes one update with
AdamW in float32. Both sides train as their users do: `jaxlm.train` with the objective policy, and
`GRPOTrainer.train` with the generation of transformers. Each has its own process, and all live
together; the time of an iteration is the CPU time of its process, so that other work on the machine
does not count. The first two iterations of a side, with its compilation, are left out. Samples
of groups with equal rewards have no gradient, and jaxlm leaves their micro-batches out, so that its
iterations are not equally long. TRL's side
is trl_grpo_arm.py.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

RIVAL = Path(__file__).with_name("trl_grpo_arm.py")
SIDES = "jaxlm", "trl"
WARMUP = 2
RATE = 1e-6  # so low that the share of groups with a gradient stays as it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama with a tied embedding, and the samples of an iteration."""

    depth: int
    width: int
    heads: int
    hidden: int
    vocab: int
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int


SIZES = {
    "12M": Size(
        depth=6,
        width=384,
        heads=6,
        hidden=1024,
        vocab=4096,
        prompts=64,
        samples=8,
        prompt_tokens=16,
        new_tokens=32,
    ),
    "2M": Size(
        depth=4,
        width=192,
        heads=3,
        hidden=512,
        vocab=1024,
        prompts=16,
        samples=8,
        prompt_tokens=16,
        new_tokens=32,
    ),
    "tiny": Size(
        depth=1,
        width=16,
        heads=2,
        hidden=32,
        vocab=320,
        prompts=2,
        samples=2,
        prompt_tokens=4,
        new_tokens=4,
    ),
}


class Turns:
    """Prints the CPU time of each iteration, and waits for a line before the next one."""

    def __init__(self) -> None:
        self._begun = time.process_time()

    def ended(self, reward: float) -> bool:
        """Note the end of an iteration; return whether the input has ended."""
        seconds = time.process_time() - self._begun
        print(json.dumps({"seconds": seconds, "reward": reward}), flush=True)
        is_over = not sys.stdin.readline()
        self._begun = time.process_time()
        return is_over


def train_jaxlm(size: Size, folder: Path) -> None:
    """Train by jaxlm until the input ends."""
    import jaxlm

    prompts = folder / "prompts.jsonl"
    texts = [f"{n:0{size.prompt_tokens - 1}}=" for n in range(8 * size.prompts)]
    prompts.write_text("".join(json.dumps({"prompt": t, "answer": "a"}) + "\n" for t in texts))
    turns = Turns()
    settings = {
        "data.kind": "prompts",
        "data.train": [str(prompts)],
        "data.validation": [],
        "data.tokenizer": "bytes",
        "data.sequence": size.prompt_tokens + size.new_tokens,
        "model.depth": size.depth,
        "model.width": size.width,
        "model.heads": size.heads,
        "model.kv_heads": size.heads,
        "model.hidden": size.hidden,
        "model.vocab": size.vocab,
        "model.tied": True,
        "model.dropout": 0.0,
        "objective.name": "policy",
        "rl.samples": size.samples,
        "rl.max_tokens": size.new_tokens,
        "reward.functions": ["regex:[a-p]=1"],
        "train.batch": size.prompts * size.samples,
        "train.microbatches": 4,  # as in the config rl/grpo
        "train.steps": 1000,
        "optim.lr": RATE,
        "loss.chunk": 2048,
        "log.every": 1,
        "log.sinks": [],
        "sample.prompts": [],
        "checkpoint.every": 1000,
        "guard.budget": 1000,
    }

    def on_record(step: int, record: dict[str, Any]) -> bool:
        return record.get("split") == "train" and turns.ended(record.get("reward", 0.0))

    jaxlm.train(settings, workdir=folder / "run", callbacks=[on_record], quiet=True)


class Side:
    """The process of a side, and the CPU seconds of its iterations."""

    def __init__(self, command: list[str], errors: IO[bytes]):
        quiet = {"OMP_WAIT_POLICY": "passive", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        self._errors = errors
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | quiet,
        )
        self.seconds: list[float] = []
        self._is_begun = False

    def iterate(self) -> float:
        """Return the CPU seconds of one more iteration. Raise RuntimeError if the process ended."""
        assert self._process.stdin
        assert self._process.stdout
        if self._is_begun:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._is_begun = True
        for line in self._process.stdout:
            if line.startswith("{") and '"seconds"' in line:
                return float(json.loads(line)["seconds"])
        self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(self._errors.read().decode(errors="replace")[-2000:])

    def close(self) -> None:
        """End the process with its input."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=60)
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of TRL")
    parser.add_argument("--size", choices=SIZES, default="12M")
    parser.add_argument("--sides", default=",".join(SIDES), metavar="A,B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--arm", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = SIZES[args.size]
    if args.arm == "trl":
        shape = json.dumps(dataclasses.asdict(size))
        os.execv(args.python, [args.python, str(RIVAL), f"--size={shape}"])
    if args.arm == "jaxlm":
        with tempfile.TemporaryDirectory() as folder:
            train_jaxlm(size, Path(folder))
        return 0
    names = args.sides.split(",")
    if unknown := [name for name in names if name not in SIDES]:
        parser.error(f"there is no {unknown[0]!r}; sides are {', '.join(SIDES)}")
    shared = [sys.executable, __file__, f"--python={args.python}", f"--size={args.size}"]
    sides: dict[str, Side] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            errors = stack.enter_context(tempfile.TemporaryFile())
            sides[name] = Side([*shared, f"--arm={name}"], errors)
            stack.callback(sides[name].close)
        for turn in range(WARMUP + args.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                seconds = sides[name].iterate()
                if turn >= WARMUP:
                    sides[name].seconds.append(seconds)
    if args.json:
        print(json.dumps({name: side.seconds for name, side in sides.items()}))
        return 0
    print(f"{args.size}: CPU seconds of an iteration, median (least to most)")
    for name, side in sides.items():
        low, high = min(side.seconds), max(side.seconds)
        print(f"  {name:<6} {statistics.median(side.seconds):8.3f} ({low:.3f} to {high:.3f})")
    if len(names) == 2:
        pairs = zip(sides["trl"].seconds, sides["jaxlm"].seconds, strict=True)
        print(f"  trl over jaxlm: {statistics.median(a / b for a, b in pairs):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
