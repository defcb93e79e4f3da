"""Compute the best model size and number of tokens for a FLOPs budget, with confidence ranges.

The scaling law has published constants (Chinchilla's replication, compared with the original), or
is fitted to your finished runs: those of --runs, or in --workdir. --sweep trains such runs first,
in --workdir, at widths and steps below those of --config. A fitted law predicts the largest run
from the others and prints the error. All assumptions are listed.
"""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import add_flag, add_switch, needed, needed_config
from jaxlm.cli.output import Output, columns, table
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.monitor import formatting, host_machine
from jaxlm.monitor.chips import MEMORY, machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--budget", "FLOPS", str, "FLOPs of the training run, as 1e20")
    add_flag(parser, "--runs", "GLOB", str, "directories of finished runs")
    add_flag(parser, "--on", "MACHINE", str, "chip, CHIPxN, TPU slice, or cpu: adds the days")
    add_flag(parser, MEMORY, "SIZE", str, "memory of one GPU that is not in the table, as 24GB")
    add_switch(parser, "--sweep", "train the runs first, in --workdir")
    doc = "with --sweep: widths of the models (1/4, 1/2, 3/4 and 1 of the config's)"
    add_flag(parser, "--widths", "N,N,N", str, doc)
    doc = "with --sweep: steps of the runs (1/4, 1/2 and all of the config's)"
    add_flag(parser, "--steps", "N,N", str, doc)


def run(args: argparse.Namespace, out: Output) -> int:
    if args.budget is None:
        raise CommandError(
            "scale needs a budget",
            where="jaxlm scale",
            why="--budget is missing",
            fix="jaxlm scale --help",
        )
    _check(args)
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.scaling import plan

    flops = plan.budget(args.budget)
    assumed: list[str] = []
    on = args.on and (
        host_machine.this_machine(1, assumed)
        if args.on == "cpu"
        else machine(args.on, flag="--on", memory=args.memory)
    )
    if args.sweep:
        workdir, file = Path(needed(args, "workdir")), needed_config(args, Run)
        from jaxlm.recipes.scaling.sweep import sweep

        sweep(file, args.overrides, workdir, widths=args.widths, steps=args.steps, say=out.log)
    pattern = args.runs or (args.workdir and f"{args.workdir}/*")
    if pattern:
        answer = _of_runs(pattern, flops, on, assumed, args)
    else:
        has_config = args.config or args.overrides
        run_config = config.load(Run, args.config, args.overrides).value if has_config else None
        answer = plan.answer(flops, run_config, on=on, assumed=assumed)
    largest = answer["runs"] and f"{answer['runs'][-1]['run']}/config.json"
    out.result(answer, _text(answer, args.config or largest))
    return 0


def _of_runs(
    pattern: str, flops: float, on: Any, assumed: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the plan by finished runs, and plot it with them."""
    from jaxlm.recipes.scaling import law, plan

    flag = "--runs" if args.runs else "--workdir"
    runs, left_out = law.read(pattern, flag)
    answer = plan.answer(flops, runs[-1].run, runs, on, assumed)
    folder = args.workdir or os.path.commonpath([each.path.parent for each in runs])
    plot = plan.draw(answer, runs, Path(folder))
    return answer | {"left_out": left_out, "plot": str(plot)}


def _check(args: argparse.Namespace) -> None:
    """Raise CommandError if two flags contradict each other."""
    if args.runs and args.sweep:
        raise CommandError(
            "--sweep trains new runs, and --runs names finished ones",
            where=f"--sweep --runs={args.runs}",
            why="the law is fitted to one of them",
            fix=f"jaxlm scale --budget={args.budget} --runs={shlex.quote(args.runs)}",
        )
    if (args.runs or args.workdir) and not args.sweep and (args.config or args.overrides):
        raise CommandError(
            "finished runs take no other config",
            where=f"--config={args.config}" if args.config else f"--config.{args.overrides[0][0]}",
            why="the planned model has the family of the largest run",
            fix=f"jaxlm scale --budget={args.budget} --runs={shlex.quote(args.runs)}"
            if args.runs
            else "--sweep    # trains the runs of a config",
        )
    for flag in ("widths", "steps"):
        if (value := getattr(args, flag)) and not args.sweep:
            raise CommandError(
                f"--{flag} needs --sweep",
                where=f"--{flag}={value}",
                why=f"--{flag} sets the runs of a sweep",
                fix=f"--sweep --{flag}={value} --workdir=runs/scale",
            )


def _text(answer: dict[str, Any], file: str | None) -> str:
    count, size, band = formatting.count, formatting.size, answer["band"]

    def between(name: str) -> str:
        low, high = band[name]
        return f"{count(low)} to {count(high)}"

    law, shape, machine = answer["law"], answer["shape"], answer["machine"]
    low, high = band["loss_nats"]
    flops, tokens = count(answer["flops_per_token"]), count(answer["tokens"])
    ratio = f"{answer['tokens_per_parameter']:.3g} per parameter"
    terms = f"{law['A']:.4g} / N^{law['alpha']:.4g} + {law['B']:.4g} / D^{law['beta']:.4g}"
    rows = [
        ("budget", f"{answer['budget_flops']:.4g} FLOPs, {flops} per token"),
        ("model", f"{count(answer['parameters'])} parameters; {between('parameters')}"),
        ("data", f"{tokens} tokens, {ratio}; {between('tokens')}"),
        ("loss", f"{answer['loss_nats']:.4f} nats per token; {low:.4f} to {high:.4f}"),
        ("ranges", f"of {band['of']}"),
        ("law", f"{law['E']:.4g} + {terms}, {law['source']}"),
    ]
    for name, each in (answer["published"] or {}).items():
        sizes = f"{count(each['parameters'])} parameters, {count(each['tokens'])} tokens"
        rows.append(("law", f"{name}: {sizes}, {each['loss_nats']:.4f} nats"))
    if shape:
        flag = f"--config={shlex.quote(file)} " if file else ""
        sizes = f"{shape['depth']} layers, {shape['width']} wide, {count(shape['parameters'])}"
        text = f"{sizes} parameters, {count(shape['flops_per_token'])} FLOPs per token"
        rows += [("shape", text), ("shape", flag + " ".join(shape["flags"]))]
    if machine:
        days = machine["days"] and "{:.3g} to {:.3g} days".format(*machine["days"])
        verdict = "fits" if machine["fits"] else f"DOES NOT FIT; --on={machine['nearest']} does"
        text = f"{size(machine['state_bytes'])} of state, {size(machine['memory_bytes'])} available"
        rows += [("on", f"{machine['on']}: {days or 'days unknown'}")]
        rows += [("memory", f"{text}: {verdict}")]
    if check := answer["self_check"]:
        low, high = check["interval_nats"]
        text = (
            f"{check['run']}, {check['flops_beyond']:.3g} times the FLOPs of any other: "
            f"{check['loss_nats']:.4f} nats, from the others {check['predicted_nats']:.4f} "
            f"({low:.4f} to {high:.4f}), {check['error']:+.2%}"
        )
        rows.append(("check", text))
    notes = {"left out": answer.get("left_out", [])}
    notes |= {name: answer[name] for name in ("assumed", "risks")}
    rows += [(title, text) for title, texts in notes.items() for text in texts]
    if "plot" in answer:
        rows.append(("plot", answer["plot"]))
    return "\n".join([*_runs(answer["runs"]), *table(rows)])


def _runs(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    count = formatting.count
    cells = [("run", "parameters", "tokens", "FLOPs", "loss", "law")]
    for row in rows:
        sizes = (count(row["parameters"]), count(row["tokens"]), f"{row['flops']:.3g}")
        losses = (f"{row['loss_nats']:.4f}", f"{row['fitted_nats']:.4f}")
        cells.append((row["run"][-27:], *sizes, *losses))
    return columns(cells, "<")
