"""Trains a model. The same run directory goes on where it stopped."""

import argparse
import sys
from pathlib import Path

from jaxlm.cli.arguments import needed
from jaxlm.cli.output import Output
from jaxlm.core import config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop_at", type=int, metavar="STEP", help="save after this step and exit 0"
    )
    parser.add_argument(
        "--allow_change",
        default="",
        metavar="A.B,C",
        help="settings that may differ from those of the run in --workdir",
    )
    parser.add_argument(
        "--cpu_devices", type=int, metavar="N", help="split the CPU into N devices, to try a mesh"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.config import Run

    workdir = Path(needed(args, "workdir"))
    file = needed(args, "config")
    loaded = config.load(Run, file, args.overrides)

    from jaxlm.recipes.pretrain import Options, pretrain

    options = Options(
        workdir=workdir,
        arguments=sys.argv[1:],
        stop_at=args.stop_at,
        allow_change=tuple(name for name in args.allow_change.split(",") if name),
        cpu_devices=args.cpu_devices,
        quiet=args.quiet,
    )
    answer = pretrain(loaded, options)
    loss = f", {answer['loss_nats']:.4f} nats" if "loss_nats" in answer else ""
    state = "complete" if answer["complete"] else "stopped"
    out.result(answer, f"{workdir}: {state} at step {answer['step']}{loss}")
    return 0
