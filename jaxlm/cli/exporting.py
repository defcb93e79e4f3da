"""Export a run's model for transformers or llama.cpp, read it back, and compare the logits.

--to=peft writes the adapter alone, as a folder of PEFT; its base is exported as a model.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output


def add_arguments(parser: Parser) -> None:
    doc = "format: transformers, llama.cpp, or the adapter alone (gguf if --out ends so, else hf)"
    add_flag(parser, "--to", ["hf", "gguf", "peft"], str, doc)
    add_flag(parser, "--out", "PLACE", str, "new folder or file", required=True)
    doc = "dtype of the tensors (that of the imported model, else float32)"
    add_flag(parser, "--dtype", ["float32", "bfloat16", "float16"], str, doc)
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    flags = selection(args) | {"dtype": args.dtype}
    if args.to == "peft":
        return _export_adapter(workdir, target, flags, out)

    from jaxlm.recipes.exchange.export_model import To, export_model

    to: To = args.to or ("gguf" if target.suffix == ".gguf" else "hf")
    answer = export_model(workdir, target, to=to, say=out.log, **flags)
    parity, parameters = answer["parity"], f"{answer['parameters']:,} parameters"
    difference = f"{parity['largest_difference']:.3g} at most on {parity['tokens']} tokens"
    rounding = f"rounding moved them by {parity['largest_difference_by_rounding']:.3g}"
    model = f"{target}: {answer['architecture']}, {parameters} in {answer['dtype']}"
    return out.result(answer, [model, f"read back: logits differ by {difference}; {rounding}"])


def _export_adapter(workdir: Path, target: Path, flags: dict[str, Any], out: Output) -> int:
    from jaxlm.recipes.exchange.export_adapter import export_adapter

    answer = export_adapter(workdir, target, say=out.log, **flags)
    lines = [f"{target}: {answer['adapter']}, {answer['parameters']:,} parameters"]
    if answer["stacked"]:
        modules = answer["stacked"]
        lines.append(
            f"rank stacked, as PEFT has one A for {len(modules)} fused projections: "
            f"{modules[0]}, ..."
        )
    return out.result(answer, lines)
