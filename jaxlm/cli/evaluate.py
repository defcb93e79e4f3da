"""Evaluate a run: loss, perplexity, bits per byte, accuracy, calibration; on any text with --text.

Loss and perplexity are means over all targets, ends of documents included. bits/byte is their nll
divided by the bytes of the text (bits_per_byte); "without ends" excludes the nll of targets without
bytes (bits_per_byte_text), as lm-evaluation-harness and nanochat do.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output, columns

COLUMNS = {
    "nats": "loss_nats",
    "perplexity": "perplexity",
    "bits/byte": "bits_per_byte",
    "without ends": "bits_per_byte_text",
    "accuracy": "token_accuracy",
    "calibration error": "calibration_error",
}


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--text", "GLOB", [], "files to evaluate (validation sets of the run)")
    add_flag(parser, "--sequence", "T", int, "tokens per row (that of the run)")
    add_flag(parser, "--batch", "ROWS", int, "rows per step; does not change the totals")
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir = Path(needed_run(args))

    from jaxlm.recipes.use.evaluate import evaluate

    flags = selection(args) | selection(args, "text", "sequence", "batch")
    answer = evaluate(workdir, say=out.log, **flags)
    rows = [("set", "tokens", *COLUMNS)]
    for name, figures in answer["sets"].items():
        values = [figures[key] for key in COLUMNS.values()]
        shown = ["-" if value is None else f"{value:.4f}" for value in values]
        rows.append((name, str(figures["tokens"]), *shown))
    head = f"step {answer['step']}, rows of {answer['sequence']} tokens"
    return out.result(answer, [head, *columns(rows)])
