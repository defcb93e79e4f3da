"""Finds a learning rate: a short training whose rate grows at every step, until the loss does too.

The suggestion is a third of the rate at which the smoothed loss is lowest, as flags to paste. The curve goes into --out, as
lr-find.json and lr-find.png; no run directory is written. Muon's two rates are moved together: the one shown is optim.lr,
and optim.adam_lr keeps its share of it. Exit code 1 where the loss falls at no rate of the range.
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import needed_config
from jaxlm.cli.output import Output
from jaxlm.core import config

SHOWN = 12  # rows of the curve, to a person; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--low", type=float, default=1e-6, metavar="RATE", help="rate of the first step (1e-6)"
    )
    parser.add_argument(
        "--high", type=float, default=1.0, metavar="RATE", help="rate of the last step (1)"
    )
    parser.add_argument(
        "--steps", type=int, default=100, metavar="N", help="steps from one to the other (100)"
    )
    parser.add_argument(
        "--out", default="lr-find", metavar="DIR", help="where the curve and its plot go (lr-find)"
    )
    parser.add_argument("--cpu_devices", type=int, metavar="N", help="split the CPU into N devices")


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.config import Run

    loaded = config.load(Run, needed_config(args, Run), args.overrides)

    from jaxlm.recipes.diagnose.lr_find import Options, lr_find

    options = Options(
        low=args.low,
        high=args.high,
        steps=args.steps,
        out=Path(args.out),
        cpu_devices=args.cpu_devices,
    )
    answer = lr_find(loaded.value, options, out.say)
    out.result(answer, _text(answer))
    return 0 if answer["flags"] else 1


def _text(answer: dict[str, Any]) -> str:
    curve = answer["curve"]
    every = -(-len(curve) // SHOWN)
    best = min(range(len(curve)), key=lambda at: curve[at]["smoothed"])
    shown = sorted({*range(0, len(curve), every), len(curve) - 1, best})
    lines = [f"  {'rate':>9}{'loss':>10}{'smoothed':>10}"]
    for at in shown:
        point = curve[at]
        lines.append(
            f"  {point['rate']:>9.2e}{point['loss_nats']:>10.4f}{point['smoothed']:>10.4f}  {'lowest' if at == best else ''}".rstrip()
        )
    lines += [
        f"{len(curve)} steps of {answer['optimizer']}: {answer['ended']}",
        f"plot      {answer['plot']}",
        f"rule      {answer['rule']}",
        f"suggested {' '.join(answer['flags']) or 'none: the loss falls at no rate of the range'}",
    ]
    return "\n".join(lines)
