"""Writes text with a run. Several --prompt are answered as one batch."""

import argparse
from pathlib import Path

from jaxlm.cli.arguments import add_weights, needed
from jaxlm.cli.output import Output
from jaxlm.core import config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="what to go on from; none starts a document",
    )
    parser.add_argument(
        "--max_tokens", type=int, default=100, metavar="N", help="most new tokens (100)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest (0.8)"
    )
    parser.add_argument("--top_k", type=int, metavar="K", help="draw from the K likeliest")
    parser.add_argument(
        "--top_p", type=float, metavar="P", help="draw from the likeliest that add up to P"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed draws the same text (0)"
    )
    parser.add_argument(
        "--step", type=int, metavar="STEP", help="a committed step; the newest unless named"
    )
    parser.add_argument(
        "--best", action="store_true", help="the step with the lowest validation loss"
    )
    add_weights(parser)
    parser.add_argument("--cpu_devices", type=int, metavar="N", help="split the CPU into N devices")


def run(args: argparse.Namespace, out: Output) -> int:
    workdir = Path(needed(args, "workdir"))

    from jaxlm.generate.config import SampleConfig

    flags = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    settings = config.from_json(
        SampleConfig, {**flags, "prompts": args.prompt or [""]}, where="command line"
    )

    from jaxlm.recipes.generate import generate

    answer = generate(
        workdir,
        settings,
        seed=args.seed,
        step=args.step,
        best=args.best,
        weights=args.weights,
        cpu_devices=args.cpu_devices,
        say=out.say,
    )
    out.result(
        answer, "\n---\n".join(sample["prompt"] + sample["text"] for sample in answer["samples"])
    )
    return 0
