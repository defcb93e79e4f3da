"""Fine-tuning steps of jaxlm, TRL, transformers and PEFT, of the same sizes in turns on one core.

    taskset -c 0 python scripts/bench_trl.py --python=PEFTENV/bin/python --size=llama-0.8M
    taskset -c 0 python scripts/bench_trl.py --python=PEFTENV/bin/python --size=124M --rounds=5

--python names an interpreter with torch, transformers, trl and peft. Each step has its own process,
and all live together, see bench_torch.py. A window's time is the CPU time of its process: other
work on the machine does not count. All sides train with AdamW and clipping, on full rows without
padding, in float32 or, with --precision=bfloat16, with products in bfloat16: then PEFT's frozen
weights are stored in bfloat16, and other weights of the rivals in float32, under autocast. `chat`
is jaxlm's step on rows with half of the tokens trained. TRL's step is `SFTTrainer.compute_loss` in
the loop of trl_arms.py, which has none of the trainer's logging and callbacks.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

import bench_turns
from bench_sizes import BETAS, CLIP, DECAY, EPS, LR, SIZES
from bench_turns import Measured, Plan
from bench_worker import serve

RIVALS = Path(__file__).with_name("trl_arms.py")
OURS = ("jaxlm full", "jaxlm chat", "jaxlm lora")
THEIRS = ("trl full", "transformers full", "peft lora", "trl lora")
PAIRS = (
    ("jaxlm chat", "jaxlm full"),
    ("jaxlm full", "trl full"),
    ("jaxlm full", "transformers full"),
    ("jaxlm lora", "jaxlm full"),
    ("jaxlm lora", "peft lora"),
    ("jaxlm lora", "trl lora"),
)
RANK, ALPHA = 16, 32.0


def work(args: argparse.Namespace) -> None:
    """Run the process of one side."""
    size, optim = SIZES[args.size], {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    if args.arm in THEIRS:
        shape = json.dumps(dataclasses.asdict(size) | {"rank": RANK, "alpha": ALPHA})
        rest = [f"--size={shape}", f"--optim={json.dumps(optim | {'clip': CLIP})}"]
        rest.append(f"--precision={args.precision}")
        os.execv(args.python, [args.python, str(RIVALS), f"--arm={args.arm}", *rest])
    import jaxlm_arm

    kind = args.arm.partition(" ")[2]
    lora = [("tune.name", "lora"), ("tune.rank", str(RANK)), ("tune.alpha", str(ALPHA))]
    settings = [("train.stack", args.stack), *(lora if kind == "lora" else [])]
    arm = jaxlm_arm.Arm(size, args.precision, settings, is_chat=kind == "chat")
    serve(arm.steps, arm.facts())


def table(size: str, sides: dict[str, Measured]) -> str:
    """Return tokens per CPU second of each side, and ratios of windows of the same round."""
    lines = [f"{size}: tokens per CPU second, median (least to most)"]
    for name, side in sides.items():
        speeds = side.speeds
        text = f"{side.median:10,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})" if speeds else "-"
        lines.append(f"  {name:<18} {text}  {side.error or side.library or ''}")
    for one, other in PAIRS:
        if one in sides and other in sides and sides[one].speeds and sides[other].speeds:
            ratios = [a / b for a, b in zip(sides[one].speeds, sides[other].speeds, strict=False)]
            lines.append(f"  {one} over {other}: {statistics.median(ratios):.3f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the rivals")
    parser.add_argument("--size", choices=SIZES, default="llama-0.8M")
    parser.add_argument("--arms", default=",".join((*OURS, *THEIRS)), metavar="A,B")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, help="of a window, instead of about 1 second")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="X", help="at most")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--stack", choices=("auto", "scan", "unroll"), default="auto")
    parser.add_argument("--arm", choices=(*OURS, *THEIRS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        work(args)
        return 0
    arms = args.arms.split(",")
    if unknown := [name for name in arms if name not in (*OURS, *THEIRS)]:
        parser.error(f"there is no {unknown[0]!r}; sides are {', '.join((*OURS, *THEIRS))}")
    plan = Plan(
        command=[
            *(sys.executable, __file__, f"--python={args.python}"),
            *(f"--stack={args.stack}", f"--precision={args.precision}"),
        ],
        on="cpu",
        rounds=args.rounds,
        seconds=1.0,
        steps=args.steps,
        deadline=time.monotonic() + 60 * args.minutes,
    )
    sides: dict[str, Measured] = {}
    for each in bench_turns.together(plan, [args.size], arms):
        sides = each[args.size]
    if args.json:
        print(json.dumps({name: dataclasses.asdict(side) for name, side in sides.items()}))
    else:
        print(table(args.size, sides))
    return int(any(side.error for side in sides.values()))


if __name__ == "__main__":
    sys.exit(main())
