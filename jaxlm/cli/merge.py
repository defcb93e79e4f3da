"""Merge a run's adapter into its base: a new run that needs no adapter, and its difference."""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import SAVED_CONFIG, Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output


def add_arguments(parser: Parser) -> None:
    parser.withhold(SAVED_CONFIG)
    add_flag(parser, "--out", "DIR", str, "new run directory", required=True)
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    from jaxlm.recipes.use.merge import merge

    answer = merge(workdir, target, say=out.log, **selection(args))
    mean, largest = (f"{answer[f'{name}_nats']:.3g}" for name in ("mean", "largest"))
    compared = f"log-probabilities differ by {mean} nats on average and {largest} at most"
    model = f"{target}: {answer['parameters']:,} parameters, step {answer['step']} of {workdir}"
    return out.result(
        answer, [model, f"{compared}, on {answer['tokens']:,} tokens, from the adapter on its base"]
    )
