"""Quantize a run's weights to four or eight bits in a new run, and measure the change.

jaxlm quantize --workdir=runs/a --scheme=int8 --out=runs/a-int8
jaxlm quantize --workdir=runs/a --scheme=int4 --method=gptq --calibration=train --out=runs/a-int4

Weights are rounded to nearest, or by GPTQ or AWQ to the inputs that a calibration text has. Loss
and bits per byte on the validation set, the distance of the distributions, greedy texts, bytes and
speed are printed before and after. If the loss grows by more than --allow, nothing is written.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import SAVED_CONFIG, Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError

SCHEMES = ["int8", "fp8", "int4", "int4_zero", "nf4", "nf4_double", "w8a8", "w4a8"]

METHODS = ["rtn", "gptq", "awq"]

ROWS = {"loss_nats": ".4f", "bits_per_byte": ".4f", "bytes": ",d", "tokens_per_second": ".0f"}


def add_arguments(parser: Parser) -> None:
    parser.withhold(SAVED_CONFIG)
    doc = "format of the weights; int4, int4_zero and nf4 have a scale for each block of inputs"
    add_flag(parser, "--scheme", SCHEMES, str, doc, required=True)
    add_flag(parser, "--out", "DIR", str, "new run directory", required=True)
    doc = "rounding method; gptq and awq are for int4 and int4_zero, and need --calibration"
    add_flag(parser, "--method", METHODS, "rtn", doc)
    doc = "glob of text for gptq and awq, or `train`: the run's own training rows; repeatable"
    add_flag(parser, "--calibration", "GLOB", [], doc)
    add_flag(parser, "--calibration_tokens", "N", 262_144, "tokens of that text", least=1)
    doc = "inputs of one output that share a scale (128 of int4, 64 of nf4, else all)"
    parser.add_argument("--block", type=int, default=None, metavar="N", help=doc)
    doc = "patterns over paths of weights, such as embedding/* (*/attention/*,*/mlp/*)"
    add_flag(parser, "--at", "A,B", str, doc, default="")
    doc = "glob of text to compare on (the validation sets); repeatable"
    add_flag(parser, "--text", "GLOB", [], doc)
    doc = "task files that both models answer; items whose result changes are flips"
    add_flag(parser, "--tasks", "FILE,...", str, doc, default="")
    add_flag(parser, "--limit", "N", int, "items of each task (all)", least=1)
    doc = "largest growth of the loss, and share of flips of a task, as loss:1%%,flips:2%%"
    add_flag(parser, "--allow", "LIMIT,...", "loss:1%", doc)
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)
    if args.limit is not None and not args.tasks:
        what, where = "--limit needs --tasks", f"--limit={args.limit}"
        fix = "find . -name '*.toml'    # task files, for --tasks"
        raise CommandError(what, where=where, why="it is the number of items of each task", fix=fix)

    from jaxlm.recipes.use.quantize import QuantizeOptions, quantize
    from jaxlm.tune.config import PROJECTIONS

    options = QuantizeOptions(
        workdir=workdir,
        out=target,
        scheme=args.scheme,
        method=args.method,
        calibration=tuple(args.calibration),
        tokens=args.calibration_tokens,
        block=args.block,
        at=tuple(each for each in args.at.split(",") if each) or PROJECTIONS,
        text=tuple(args.text),
        tasks=tuple(each for each in args.tasks.split(",") if each),
        limit=args.limit,
        allow=args.allow,
    )
    answer = quantize(options, out.log, **selection(args))
    before, after = answer["before"], answer["after"]
    lines = [f"{target}: {answer['quantized']} weights in {answer['scheme']} by {answer['method']}"]
    for name, form in ROWS.items():
        if before.get(name) is not None:
            lines.append(f"{name:<18}{before[name]:>14{form}}{after[name]:>14{form}}")
    if "kl_mean" in answer:
        lines.append(
            f"KL {answer['kl_mean']:.3g} nats on average, {answer['kl_999']:.3g} at 99.9%; the "
            f"same likeliest id at {answer['top1_agreement']:.2%} of {answer['tokens']:,} tokens"
        )
    if "departures" in answer:
        places = answer["departures"]
        equal = sum(place is None for place in places)
        first = sorted(place for place in places if place is not None)
        middle = f"; the others depart after {first[len(first) // 2]} tokens" if first else ""
        lines.append(f"greedy texts: {equal} of {len(places)} are the same{middle}")
    for name, task in answer["tasks"].items():
        line = f"{name}: {task['metric']} {task['before']:.4f} to {task['after']:.4f}"
        if task["flips"] is not None:
            line += f", {task['rises']} items better and {task['falls']} worse of {task['items']}"
        p_value = task["p_value"]
        lines.append(line if p_value is None else f"{line}, p = {p_value:.2g}")
    return out.result(answer, lines)
