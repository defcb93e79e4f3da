"""Merge a run's adapter into its base: a new run that needs no adapter, and its difference.

jaxlm merge --workdir=runs/lora --out=runs/merged
"""

from pathlib import Path
from typing import Any, get_args

from jaxlm.cli.arguments import SAVED_CONFIG, Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output


def add_arguments(parser: Parser) -> None:
    parser.withhold(SAVED_CONFIG)
    add_flag(parser, "--out", "DIR", str, "new run directory", required=True)
    doc = "base that the update of a quantized base is added to: as it was trained, or not rounded"
    add_flag(parser, "--onto", ["dequantized", "original"], "dequantized", doc)
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    from jaxlm.recipes.use.load import Onto
    from jaxlm.recipes.use.merge import merge

    answer = merge(workdir, target, onto=args.onto, say=out.log, **selection(args))
    lines = [f"{target}: {answer['parameters']:,} parameters, step {answer['step']} of {workdir}"]
    compared = {"": answer}
    if "onto" in answer:
        compared = {f"on the {base} base, ": answer["onto"][base] for base in get_args(Onto)}
        lines[0] += f", on the {answer['onto']['chosen']} base"
    for base, each in compared.items():
        mean, largest = (f"{each[f'{name}_nats']:.3g}" for name in ("mean", "largest"))
        lines.append(
            f"{base}{each['compared']} differ by {mean} nats on average and {largest} at most, on "
            f"{each['tokens']:,} tokens, from the adapter on its base"
        )
    return out.result(answer, lines)
