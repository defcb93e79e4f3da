"""Iterations of GRPO of jaxlm and of TRL's GRPOTrainer, in turns, by processor time.

    taskset -c 0 python scripts/bench_grpo.py --python=PEFTENV/bin/python --size=12M --rounds=5

--python names an interpreter with torch, transformers and trl. An iteration draws samples of 32
tokens, 8 of each of 64 prompts (size 12M), rewards them by a verifier, and makes one update with
AdamW in one micro-batch, in float32 or by --dtype in bfloat16 with float32 parameters. Both sides
draw from all ids but a few; one id ends a sample. Half of the samples are rewarded, so that nearly
all groups have a gradient. Both train as their users do: `jaxlm.train` with the objective
policy, and `GRPOTrainer.train` with the generation of transformers. Each has its own process, and
all live together; seconds are those of the processor in the process, so that other work on the
machine does not count. The first two iterations of a side, with its compilation, are left out.
Parts are drawing, and the rest: jaxlm's is nearly all its update. TRL's side is trl_grpo_arm.py.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

RIVAL = Path(__file__).with_name("trl_grpo_arm.py")
SIDES = "jaxlm", "trl"
WARMUP = 2
RATE = 1e-6  # so low that the share of groups with a gradient stays as it is
REWARDED = 46  # one id of as many is rewarded: half of 32 ids have none
DTYPES = "float32", "bfloat16"
CHARACTERS = 0x4E00  # the first of the characters of jaxlm's prompts, each with its id
OTHERS = 40  # ids of jaxlm's tokenizer that are no text


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
        self._begun, self._drawn = time.process_time(), 0.0

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Count the seconds of the block as those of drawing."""
        begun = time.process_time()
        yield
        self._drawn += time.process_time() - begun

    def ended(self) -> bool:
        """Note the end of an iteration; return whether the input has ended."""
        seconds = time.process_time() - self._begun
        print(json.dumps({"seconds": seconds, "drawn": self._drawn}), flush=True)
        is_over = not sys.stdin.readline()
        self._begun, self._drawn = time.process_time(), 0.0
        return is_over


def train_jaxlm(size: Size, dtype: str, folder: Path) -> None:
    """Train by jaxlm until the input ends."""
    import jaxlm
    from jaxlm.rl.rollout import RolloutSampler

    prompts, turns = folder / "prompts.jsonl", Turns()
    characters = [chr(CHARACTERS + n) for n in range(size.vocab - OTHERS)]
    draw = random.Random(0)
    count = 8 * size.prompts * size.prompt_tokens - len(characters)
    order = [*characters, *draw.choices(characters, k=count)]  # all have an id
    starts = range(0, len(order), size.prompt_tokens)
    texts = ["".join(order[first : first + size.prompt_tokens]) for first in starts]
    lines = [{"prompt": text, "answer": text[:1]} for text in texts]
    prompts.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    (folder / "rewards.py").write_text(
        "def one(completion):\n"
        f"    return float(any(ord(each) % {REWARDED} == 0 for each in completion))\n"
    )

    def draw_timed(*args: Any, **named: Any) -> Any:
        with turns.drawing():
            return drawn(*args, **named)

    drawn, RolloutSampler.draw = RolloutSampler.draw, draw_timed  # type: ignore[method-assign]
    settings = {
        "data.kind": "prompts",
        "data.train": [str(prompts)],
        "data.validation": [],
        "data.tokenizer": "characters",
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
        "reward.functions": [f"{folder}/rewards.py:one"],
        "train.batch": size.prompts * size.samples,
        "train.steps": 1000,
        "optim.lr": RATE,
        "precision.compute": dtype,
        "loss.chunk": 2048,
        "log.every": 1,
        "log.sinks": [],
        "sample.prompts": [],
        "checkpoint.every": 1000,
        "guard.budget": 1000,
    }

    def on_record(step: int, record: dict[str, Any]) -> bool:
        return record.get("split") == "train" and turns.ended()

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
        self.drawn: list[float] = []
        self._is_begun = False

    def iterate(self, *, is_counted: bool) -> None:
        """Make an iteration, and keep its seconds. Raise RuntimeError if the process ended."""
        assert self._process.stdin
        assert self._process.stdout
        if self._is_begun:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._is_begun = True
        for line in self._process.stdout:
            if line.startswith("{") and '"seconds"' in line:
                figures = json.loads(line)
                if is_counted:
                    self.seconds.append(figures["seconds"])
                    self.drawn.append(figures["drawn"])
                return
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
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of products")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--arm", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = SIZES[args.size]
    if args.arm == "trl":
        shape = json.dumps(dataclasses.asdict(size))
        flags = [f"--size={shape}", f"--dtype={args.dtype}"]
        os.execv(args.python, [args.python, str(RIVAL), *flags])
    if args.arm == "jaxlm":
        with tempfile.TemporaryDirectory() as folder:
            train_jaxlm(size, args.dtype, Path(folder))
        return 0
    names = args.sides.split(",")
    if unknown := [name for name in names if name not in SIDES]:
        parser.error(f"there is no {unknown[0]!r}; sides are {', '.join(SIDES)}")
    shared = [sys.executable, __file__, f"--python={args.python}", f"--size={args.size}"]
    shared.append(f"--dtype={args.dtype}")
    sides: dict[str, Side] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            errors = stack.enter_context(tempfile.TemporaryFile())
            sides[name] = Side([*shared, f"--arm={name}"], errors)
            stack.callback(sides[name].close)
        for turn in range(WARMUP + args.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                sides[name].iterate(is_counted=turn >= WARMUP)
    if args.json:
        figures = {name: {"seconds": x.seconds, "drawn": x.drawn} for name, x in sides.items()}
        print(json.dumps(figures))
        return 0
    print(
        f"{args.size}, {args.dtype}: CPU seconds of an iteration, median (least to most), drawing"
    )
    for name, side in sides.items():
        low, high = min(side.seconds), max(side.seconds)
        middle, drawn = statistics.median(side.seconds), statistics.median(side.drawn)
        print(f"  {name:<6} {middle:8.3f} ({low:.3f} to {high:.3f}) {drawn:8.3f}")
    if len(names) == 2:
        pairs = zip(sides["trl"].seconds, sides["jaxlm"].seconds, strict=True)
        print(f"  trl over jaxlm: {statistics.median(a / b for a, b in pairs):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
