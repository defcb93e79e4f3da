"""Plans a budget of FLOPs: the model's size and tokens of lowest loss, how sure that is, and what it takes on a chip.

By published constants, the replication of Chinchilla's beside the original; or by a law fitted to finished runs of one's own:
those of --runs, or in --workdir. --sweep trains such runs first, in --workdir: widths and steps below those of --config. A law
of one's own predicts the largest run from the others and says the error. All that is assumed is listed.
"""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import needed, needed_config
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.monitor import cpu, formatting
from jaxlm.monitor.chips import MEMORY, machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", metavar="FLOPS", help="to be spent in training, as in 1e20")
    parser.add_argument("--runs", metavar="GLOB", help="directories of finished runs")
    parser.add_argument(
        "--on", metavar="MACHINE", help="a chip, CHIPxN, a TPU slice, or cpu: adds the days"
    )
    parser.add_argument(
        MEMORY, metavar="SIZE", help="memory of one GPU, such as 24GB: for a GPU not in the table"
    )
    parser.add_argument("--sweep", action="store_true", help="train the runs first, in --workdir")
    parser.add_argument(
        "--widths", metavar="N,N,N", help="with --sweep: of the models (1/4, 1/2, 3/4 and 1 of own)"
    )
    parser.add_argument(
        "--steps", metavar="N,N", help="with --sweep: of the runs (1/4, 1/2 and all of own)"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    if args.budget is None:
        raise CommandError(
            "scale needs a budget",
            where="jaxlm scale",
            why="there is no --budget",
            fix="jaxlm scale --help",
        )
    _check(args)
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.scaling import plan

    flops = plan.budget(args.budget)
    assumed: list[str] = []
    on = args.on and (
        cpu.this_machine(1, assumed)
        if args.on == "cpu"
        else machine(args.on, flag="--on", memory=args.memory)
    )
    if args.sweep:
        workdir, file = Path(needed(args, "workdir")), needed_config(args, Run)
        from jaxlm.recipes.scaling.sweep import sweep

        sweep(file, args.overrides, workdir, widths=args.widths, steps=args.steps, say=out.say)
    pattern = args.runs or (args.workdir and f"{args.workdir}/*")
    if pattern:
        answer = _of_runs(pattern, flops, on, assumed, args)
    else:
        is_given = args.config or args.overrides
        own = config.load(Run, args.config, args.overrides).value if is_given else None
        answer = plan.answer(flops, own, on=on, assumed=assumed)
    largest = answer["runs"] and f"{answer['runs'][-1]['run']}/config.json"
    out.result(answer, _text(answer, args.config or largest))
    return 0


def _of_runs(
    pattern: str, flops: float, on: Any, assumed: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """The plan by finished runs, drawn beside them."""
    from jaxlm.recipes.scaling import law, plan

    flag = "--runs" if args.runs else "--workdir"
    runs, left_out = law.read(pattern, flag)
    answer = plan.answer(flops, runs[-1].run, runs, on, assumed)
    folder = args.workdir or os.path.commonpath([each.path.parent for each in runs])
    plot = plan.draw(answer, runs, Path(folder))
    return answer | {"left_out": left_out, "plot": str(plot)}


def _check(args: argparse.Namespace) -> None:
    """Raises CommandError where two flags do not go together."""
    if args.runs and args.sweep:
        raise CommandError(
            "--sweep makes runs, and --runs names some",
            where=f"--sweep --runs={args.runs}",
            why="the law is fitted to the one or the other",
            fix=f"jaxlm scale --budget={args.budget} --runs={shlex.quote(args.runs)}",
        )
    if (args.runs or args.workdir) and not args.sweep and (args.config or args.overrides):
        raise CommandError(
            "finished runs have configs of their own",
            where=f"--config={args.config}" if args.config else f"--config.{args.overrides[0][0]}",
            why="the model of the plan is of the family of the largest run",
            fix=f"jaxlm scale --budget={args.budget} --runs={shlex.quote(args.runs)}"
            if args.runs
            else "--sweep    # trains the runs of a config",
        )
    for flag in ("widths", "steps"):
        if getattr(args, flag) and not args.sweep:
            raise CommandError(
                f"--{flag} is of the runs of a sweep",
                where=f"--{flag}={getattr(args, flag)}",
                why="there is no --sweep",
                fix=f"--sweep --{flag}={getattr(args, flag)} --workdir=runs/scale",
            )


def _text(answer: dict[str, Any], file: str | None) -> str:
    band = answer["band"]

    def between(name: str) -> str:
        low, high = band[name]
        return f"{formatting.count(low)} to {formatting.count(high)}"

    law, shape, machine = answer["law"], answer["shape"], answer["machine"]
    low, high = band["loss_nats"]
    rows = [
        (
            "budget",
            f"{answer['budget_flops']:.4g} FLOPs, {formatting.count(answer['flops_per_token'])} a token",
        ),
        ("model", f"{formatting.count(answer['parameters'])} parameters; {between('parameters')}"),
        (
            "data",
            f"{formatting.count(answer['tokens'])} tokens, {answer['tokens_per_parameter']:.3g} a parameter; {between('tokens')}",
        ),
        ("loss", f"{answer['loss_nats']:.4f} nats a token; {low:.4f} to {high:.4f}"),
        ("ranges", f"of {band['of']}"),
        (
            "law",
            f"{law['E']:.4g} + {law['A']:.4g} / N^{law['alpha']:.4g} + {law['B']:.4g} / D^{law['beta']:.4g}, {law['source']}",
        ),
    ]
    for name, each in (answer["published"] or {}).items():
        rows.append(
            (
                "",
                f"{name}: {formatting.count(each['parameters'])} parameters, {formatting.count(each['tokens'])} tokens, {each['loss_nats']:.4f} nats",
            )
        )
    if shape:
        own = f"--config={shlex.quote(file)} " if file else ""
        rows += [
            (
                "shape",
                f"{shape['depth']} layers, {shape['width']} wide, {formatting.count(shape['parameters'])} parameters, {formatting.count(shape['flops_per_token'])} FLOPs a token",
            ),
            ("", own + " ".join(shape["flags"])),
        ]
    if machine:
        days = (
            "{:.3g} to {:.3g} days".format(*machine["days"]) if machine["days"] else "days unknown"
        )
        verdict = "fits" if machine["fits"] else f"DOES NOT FIT; --on={machine['nearest']} does"
        rows += [
            ("on", f"{machine['on']}: {days}"),
            (
                "memory",
                f"{formatting.size(machine['state_bytes'])} of state, {formatting.size(machine['memory_bytes'])} there: {verdict}",
            ),
        ]
    if check := answer["self_check"]:
        low, high = check["interval_nats"]
        rows.append(
            (
                "check",
                f"{check['run']}, {check['flops_beyond']:.3g} times the FLOPs of any other: {check['loss_nats']:.4f} nats, "
                f"from the others {check['predicted_nats']:.4f} ({low:.4f} to {high:.4f}), {check['error']:+.2%}",
            )
        )
    for title, lines in (
        ("left out", answer.get("left_out", [])),
        ("assumed", answer["assumed"]),
        ("risks", answer["risks"]),
    ):
        rows += [(title if not n else "", text) for n, text in enumerate(lines)]
    if "plot" in answer:
        rows.append(("plot", answer["plot"]))
    return "\n".join([*_runs(answer["runs"]), *(f"{name:<11}{text}" for name, text in rows)])


def _runs(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [f"{'run':<28}{'parameters':>11}{'tokens':>9}{'FLOPs':>10}{'loss':>9}{'law':>9}"]
    for row in rows:
        lines.append(
            f"{row['run'][-27:]:<28}{formatting.count(row['parameters']):>11}{formatting.count(row['tokens']):>9}"
            f"{row['flops']:>10.3g}{row['loss_nats']:>9.4f}{row['fitted_nats']:>9.4f}"
        )
    return lines
