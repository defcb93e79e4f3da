"""Export a run's model for transformers or llama.cpp, read it back, and compare the logits."""

import argparse
from pathlib import Path

from jaxlm.cli.arguments import add_flag, add_run_selection, needed_run, selection
from jaxlm.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    doc = "format: a transformers folder or a llama.cpp file (gguf if --out ends so, else hf)"
    add_flag(parser, "--to", ["hf", "gguf"], str, doc)
    add_flag(parser, "--out", "PLACE", str, "new folder or file", required=True)
    doc = "dtype of the tensors (that of the imported model, else float32)"
    add_flag(parser, "--dtype", ["float32", "bfloat16", "float16"], str, doc)
    add_run_selection(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    from jaxlm.recipes.exchange.export_model import ExportOptions, To, export_model

    to: To = args.to or ("gguf" if target.suffix == ".gguf" else "hf")
    options = ExportOptions(workdir=workdir, out=target, to=to, dtype=args.dtype, **selection(args))
    answer = export_model(options, out.log)
    parity = answer["parity"]
    out.result(
        answer,
        f"{target}: {answer['architecture']}, {answer['parameters']:,} parameters in "
        f"{answer['dtype']}\n"
        f"read back: logits differ by {parity['largest_difference']:.3g} at most on "
        f"{parity['tokens']} tokens; rounding moved them by "
        f"{parity['largest_difference_by_rounding']:.3g}",
    )
    return 0
