"""Compute the best model size and number of tokens for a FLOPs budget, with confidence ranges.

jaxlm scale --budget=1e20 --on=h100x8
jaxlm scale --sweep --config=my_config.py --workdir=runs/law    runs of yours

The scaling law has published constants (Chinchilla's replication, compared with the original), or
is fitted to your finished runs: those of --runs, or in --workdir. --sweep trains such runs first,
in --workdir, at widths and steps below those of --config. A fitted law predicts the largest run
from the others and prints the error. All assumptions are listed.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, needed, needed_config
from jaxlm.cli.output import Output, columns, table
from jaxlm.cli.plan import named_machine
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.monitor import formatting
from jaxlm.monitor.chips import MEMORY


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--budget", "FLOPS", str, "FLOPs of the training run, as 1e20")
    add_flag(parser, "--runs", "GLOB", str, "directories of finished runs")
    add_flag(
        parser, "--on", "MACHINE", str, "chip, CHIPxN, TPU slice, or cpu: adds the training days"
    )
    add_flag(parser, MEMORY, "SIZE", str, "memory of one GPU that is not in the table, as 24GB")
    parser.add_switch("--sweep", "train the runs first, in --workdir")
    doc = "with --sweep: widths of the models (1/4, 1/2, 3/4 and 1 of the config's)"
    add_flag(parser, "--widths", "N,N,N", str, doc)
    doc = "with --sweep: steps of the runs (1/4, 1/2 and all of the config's)"
    add_flag(parser, "--steps", "N,N", str, doc)
    add_flag(parser, "--parallel", "N", 1, "with --sweep: runs at a time", least=1)


def run(args: Any, out: Output) -> int:
    _check(args)
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.scaling import plan

    flops = plan.budget(args.budget)
    assumed: list[str] = []
    on = args.on and named_machine(args, 1, assumed)
    if args.sweep:
        workdir, file = Path(needed(args, "workdir")), needed_config(args, Run)
        from jaxlm.recipes.compare.sweep import ENDED
        from jaxlm.recipes.scaling.sweep import sweep

        sizes = {"widths": args.widths, "steps": args.steps, "parallel": args.parallel}
        codes = sweep(file, args.overrides, workdir, **sizes, say=out.log)
        if failed := {path: code for path, code in codes.items() if code not in ENDED}:
            lines = [f"{path}: failed with exit code {code}" for path, code in failed.items()]
            return out.result({"codes": codes}, lines, next(iter(failed.values())))
    pattern = args.runs or (args.workdir and f"{args.workdir}/*")
    if pattern:
        answer = _of_runs(pattern, flops, on, assumed, args)
    else:
        has_config = args.config or args.overrides
        run_config = config.load(Run, args.config, args.overrides).value if has_config else None
        answer = plan.answer(flops, run_config, on=on, assumed=assumed)
    largest = answer["runs"] and f"{answer['runs'][-1]['run']}/config.json"
    return out.result(answer, _text(answer, args.config or largest))


def _of_runs(pattern: str, flops: float, on: Any, assumed: list[str], args: Any) -> dict[str, Any]:
    """Return the plan by finished runs, and plot it with them."""
    from jaxlm.recipes.scaling import law, plan

    flag = "--runs" if args.runs else "--workdir"
    runs, left_out = law.read(pattern, flag)
    answer = plan.answer(flops, runs[-1].run, runs, on, assumed)
    folder = args.workdir or os.path.commonpath([each.path.parent for each in runs])
    plot = plan.draw(answer, runs, Path(folder))
    return answer | {"left_out": left_out, "plot": str(plot)}


def _check(args: Any) -> None:
    """Raise CommandError without a budget, or if two flags contradict each other."""
    if args.budget is None:
        what, why, fix = "scale needs a budget", "--budget is missing", "jaxlm scale --help"
        raise CommandError(what, where="jaxlm scale", why=why, fix=fix)
    of_runs = f"jaxlm scale --budget={args.budget} --runs={shlex.quote(args.runs or '')}"
    if args.runs and args.sweep:
        what = "--sweep trains new runs, and --runs names finished ones"
        where, why = f"--sweep --runs={args.runs}", "the law is fitted to one of them"
        raise CommandError(what, where=where, why=why, fix=of_runs)
    if (args.runs or args.workdir) and not args.sweep and (args.config or args.overrides):
        where = f"--config={args.config}" if args.config else f"--config.{args.overrides[0][0]}"
        why = "the planned model has the family of the largest run"
        fix = of_runs if args.runs else "--sweep    # trains the runs of a config"
        raise CommandError("finished runs take no other config", where=where, why=why, fix=fix)
    parallel = args.parallel if args.parallel > 1 else None
    for flag, value in (("widths", args.widths), ("steps", args.steps), ("parallel", parallel)):
        if value and not args.sweep:
            where, why = f"--{flag}={value}", f"--{flag} sets the runs of a sweep"
            fix = f"--sweep {where} --workdir=runs/scale"
            raise CommandError(f"--{flag} needs --sweep", where=where, why=why, fix=fix)


def _text(answer: dict[str, Any], file: str | None) -> list[str]:
    count, size, band = formatting.count, formatting.size, answer["band"]

    def between(name: str) -> str:
        low, high = band[name]
        return f"{count(low)} to {count(high)}"

    law, shape, machine = answer["law"], answer["shape"], answer["machine"]
    low, high = band["loss_nats"]
    flops, tokens = count(answer["flops_per_token"], billion="G"), count(answer["tokens"])
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
        text = f"{sizes} parameters, {count(shape['flops_per_token'], billion='G')} FLOPs per token"
        rows += [("shape", text), ("shape", flag + " ".join(shape["flags"]))]
    if machine:
        days = machine["days"] and "{:.3g} to {:.3g} days".format(*machine["days"])
        verdict = "fits" if machine["fits"] else f"DOES NOT FIT; --on={machine['nearest']} does"
        text = f"{size(machine['state_bytes'])} of state, {size(machine['memory_bytes'])} available"
        rows += [("on", f"{machine['on']}: {days or 'days unknown'}")]
        rows += [("memory", f"{text}: {verdict}")]
    if check := answer["self_check"]:
        low, high = check["interval_nats"]
        largest = f"{check['run']}, {check['flops_beyond']:.3g} times the FLOPs of any other"
        predicted = f"{check['predicted_nats']:.4f} ({low:.4f} to {high:.4f})"
        losses = f"{check['loss_nats']:.4f} nats, from the others {predicted}"
        rows.append(("check", f"{largest}: {losses}, {check['error']:+.2%}"))
    notes = {"left out": answer.get("left_out", [])}
    notes |= {name: answer[name] for name in ("assumed", "risks")}
    rows += [(title, text) for title, texts in notes.items() for text in texts]
    if "plot" in answer:
        rows.append(("plot", answer["plot"]))
    cells = [("run", "parameters", "tokens", "FLOPs", "loss", "law")]
    for each in answer["runs"]:
        known = (count(each["parameters"]), count(each["tokens"]), f"{each['flops']:.3g}")
        nats = (f"{each['loss_nats']:.4f}", f"{each['fitted_nats']:.4f}")
        cells.append((each["run"][-27:], *known, *nats))
    return [*(columns(cells, "<") if answer["runs"] else []), *table(rows)]
