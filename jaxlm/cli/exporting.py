"""Writes a run's model for transformers or llama.cpp, reads it back, and compares the logits."""

import argparse
from pathlib import Path

from jaxlm.cli.arguments import add_weights, needed_run, withhold
from jaxlm.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(
        parser, "--config", "--config.a.b", why="it goes by the config that the run was saved with"
    )
    parser.add_argument(
        "--to",
        choices=["hf", "gguf"],
        help="a folder as transformers saves one, or a file of llama.cpp's; gguf where --out ends so, else hf",
    )
    parser.add_argument(
        "--out", required=True, metavar="PLACE", help="the folder to make, or the file"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the numbers; that of the imported model, else float32",
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
    workdir, place = Path(needed_run(args)), Path(args.out)

    from jaxlm.recipes.exchange.export_model import ExportOptions, To, export_model

    to: To = args.to or ("gguf" if place.suffix == ".gguf" else "hf")
    answer = export_model(
        ExportOptions(
            workdir=workdir,
            out=place,
            to=to,
            step=args.step,
            best=args.best,
            weights=args.weights,
            dtype=args.dtype,
            cpu_devices=args.cpu_devices,
        ),
        out.say,
    )
    parity = answer["parity"]
    out.result(
        answer,
        f"{place}: {answer['architecture']}, {answer['parameters']:,} parameters in {answer['dtype']}\n"
        f"read back: logits differ by {parity['largest_difference']:.3g} at most on {parity['tokens']} tokens; "
        f"rounding moved them by {parity['largest_difference_by_rounding']:.3g}",
    )
    return 0
