"""Loss, perplexity, bits per byte, accuracy and calibration of a run, on its validation sets or on any text.

Loss and perplexity are of all targets, the end of each document included. bits/byte is their nll
over the bytes of the text (bits_per_byte); "without ends" leaves the nll of targets without bytes
out (bits_per_byte_text), as lm-evaluation-harness and nanochat do.
"""

import argparse
from pathlib import Path

from jaxlm.cli.arguments import add_weights, needed_run, withhold
from jaxlm.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(
        parser, "--config", "--config.a.b", why="it goes by the config that the run was saved with"
    )
    parser.add_argument(
        "--text", action="append", default=[], metavar="GLOB", help="evaluate these files instead"
    )
    parser.add_argument(
        "--sequence", type=int, metavar="T", help="tokens a row; the run's own unless named"
    )
    parser.add_argument(
        "--batch", type=int, metavar="ROWS", help="rows at a time; the totals do not depend on it"
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
    workdir = Path(needed_run(args))

    from jaxlm.recipes.use.evaluate import Options, evaluate

    options = Options(
        workdir=workdir,
        step=args.step,
        best=args.best,
        weights=args.weights,
        text=tuple(args.text),
        sequence=args.sequence,
        batch=args.batch,
        cpu_devices=args.cpu_devices,
    )
    answer = evaluate(options, out.say)
    out.result(answer, _table(answer))
    return 0


def _table(answer: dict) -> str:
    lines = [f"step {answer['step']}, rows of {answer['sequence']} tokens"]
    columns = {
        "nats": "loss_nats",
        "perplexity": "perplexity",
        "bits/byte": "bits_per_byte",
        "without ends": "bits_per_byte_text",
        "accuracy": "token_accuracy",
        "calibration error": "calibration_error",
    }
    head = ("set", "tokens", *columns)
    rows = [head]
    for name, figures in answer["sets"].items():
        values = [figures[key] for key in columns.values()]
        shown = ["-" if value is None else f"{value:.4f}" for value in values]
        rows.append((name, str(figures["tokens"]), *shown))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines += [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(lines)
