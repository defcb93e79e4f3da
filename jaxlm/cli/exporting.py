"""Export a run's model for transformers or llama.cpp, read it back, and compare the logits.

jaxlm export --workdir=runs/a --out=model                     a folder of transformers
jaxlm export --workdir=runs/a --out=m.gguf --scheme=q4_k_m    a file of llama.cpp

--to=peft writes the adapter alone, as a folder of PEFT; its base is exported as a model.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output

SCHEMES = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q4_k_m", "q6_k"]


def add_arguments(parser: Parser) -> None:
    doc = (
        "format: transformers, llama.cpp, or the adapter alone (gguf if --out ends so or --scheme "
    )
    doc += "is set, else hf)"
    add_flag(parser, "--to", ["hf", "gguf", "peft"], str, doc)
    add_flag(parser, "--out", "PLACE", str, "new folder or file", required=True)
    doc = "dtype of the tensors (that of the imported model, else float32)"
    add_flag(parser, "--dtype", ["float32", "bfloat16", "float16"], str, doc)
    doc = "storage of a GGUF's matrices in blocks; those that no block fits have --dtype"
    add_flag(parser, "--scheme", SCHEMES, str, doc)
    doc = "glob of text, or `train`, by whose inputs a scheme searches its scales; repeatable"
    add_flag(parser, "--calibration", "GLOB", [], doc)
    add_flag(parser, "--calibration_tokens", "N", 262_144, "tokens of that text", least=1)
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    flags = selection(args) | {"dtype": args.dtype}

    from jaxlm.recipes.exchange.export_model import To, check_scheme, export_model
    from jaxlm.recipes.exchange.importance import check

    is_gguf = target.suffix == ".gguf" or args.scheme is not None
    check_scheme(args.to or "gguf", args.scheme)
    if args.to == "peft":
        check(args.scheme, args.calibration, "")
        return _export_adapter(workdir, target, flags, out)
    to: To = args.to or ("gguf" if is_gguf else "hf")
    text = {"calibration": args.calibration, "calibration_tokens": args.calibration_tokens}
    flags |= text | {"scheme": args.scheme}
    answer = export_model(workdir, target, to=to, say=out.log, **flags)
    parity, parameters = answer["parity"], f"{answer['parameters']:,} parameters"
    difference = f"{parity['largest_difference']:.3g} at most on {parity['tokens']} tokens"
    rounding = f"rounding moved them by {parity['largest_difference_by_rounding']:.3g}"
    storage = answer.get("scheme") or answer["dtype"]
    model = f"{target}: {answer['architecture']}, {parameters} in {storage}"
    lines = [model, f"read back: logits differ by {difference}; {rounding}"]
    if answer.get("scheme"):
        counts = (f"{count} in {name}" for name, count in answer["storages"].items())
        lines.insert(1, f"{answer['bytes']:,} bytes; tensors: {', '.join(counts)}")
    return out.result(answer, lines)


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
