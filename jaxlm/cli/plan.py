"""Predict memory per device, time, cost and sharding of a run, before it starts.

The prediction is arithmetic, without the accelerator and without JAX: --on=h100x8, h200, rtx4090,
t4, v5e-16, v5p-128, tpu7x-64, or cpu; for any other GPU --on=NAME --memory=24GB predicts if the run
fits, without times. --exact compiles the step, for a TPU slice or for this machine's CPU, and shows
the compiler's memory analysis too. --fit searches meshes, micro-batches, remat and loss chunks for
the fastest settings that fit. The exit code is 0 even if the run does not fit: the result then
names what fits: other settings, else more of the chips, else a smaller model.
"""

import argparse
import shlex
from typing import Any

from jaxlm.cli.arguments import add_flag, add_switch, needed_config
from jaxlm.cli.output import Output, columns, table
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.monitor import chips, formatting, host_machine
from jaxlm.monitor.chips import MEMORY, machine
from jaxlm.parallel.config import format_mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--on", "MACHINE", "cpu", "chip, CHIPxN, TPU slice, or cpu")
    add_flag(parser, MEMORY, "SIZE", str, "memory of one GPU that is not in the table, as 24GB")
    add_flag(parser, "--devices", "N", 1, "with --on=cpu: number of devices")
    add_flag(parser, "--price", "X", float, "price per device-hour, to compute the cost")
    add_switch(parser, "--fit", "search for the fastest settings that fit")
    add_switch(parser, "--exact", "compile the step and compare")
    add_switch(parser, "--sharding", "print the sharding of each parameter")


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.plan import predict

    loaded = config.load(Run, needed_config(args, Run), args.overrides)
    _check(args)
    assumed: list[str] = []
    on = (
        host_machine.this_machine(args.devices, assumed)
        if args.on == "cpu"
        else machine(args.on, flag="--on", memory=args.memory)
    )
    chosen = loaded.value
    answer: dict[str, Any] = {}
    if args.fit:
        from jaxlm.recipes.plan.search import search

        result = search(loaded.value, on, assumed)
        chosen = (result.best or result.smallest).run
        names = ("settings", "flags", "tried", "fitting")
        answer["fit"] = {name: getattr(result, name) for name in names}
    forecast = predict.forecast(chosen, on, assumed)
    answer |= forecast.record(args.price) | {"sharding": forecast.sharding()}
    if not forecast.fits:
        answer["nearest"] = _nearest(loaded.value, on)
    if args.exact:
        from jaxlm.recipes.diagnose.collectives import compile_for, compile_here

        compiled = (
            compile_here(chosen, args.devices, out.log)
            if args.on == "cpu"
            else compile_for(chosen, args.on, out.log)
        )
        answer["compiled_bytes_per_device"] = compiled["bytes_per_device"]
        answer["fits"] = compiled["bytes_per_device"]["total"] <= forecast.memory_bytes
    out.result(answer, _text(answer, forecast.run, with_sharding=args.sharding))
    return 0


def _nearest(run: Any, on: Any) -> dict[str, Any] | None:
    from jaxlm.recipes.plan.search import nearest

    result = nearest(run, on)
    if result is None:
        return None
    return {
        "flags": result.flags,
        "bytes_per_device": result.forecast.bytes_per_device["total"],
        "step_seconds": result.forecast.record()["step_seconds"],
    }


def _check(args: argparse.Namespace) -> None:
    if args.price is not None and not args.price > 0:
        raise CommandError(
            f"a price of {args.price:g} is not allowed",
            where=f"--price={args.price:g}",
            why="--price must be a positive price per device-hour",
            fix="jaxlm plan --help",
        )
    if args.devices < 1 or (args.devices > 1 and args.on != "cpu"):
        is_gpu = args.on in chips.CHIPS and not chips.CHIPS[args.on].is_tpu
        raise CommandError(
            "the name of the machine contains the number of devices",
            where=f"--devices={args.devices}",
            why="a CPU can be split into several devices; other machines are named as in h100x8",
            fix=f"--on={args.on}x{args.devices} --devices=1"
            if args.devices > 1 and is_gpu
            else "jaxlm plan --help",
        )
    if args.memory and args.on == "cpu":
        raise CommandError(
            f"{MEMORY} is for GPUs",
            where=f"{MEMORY}={args.memory}",
            why="--on names no GPU: the plan is for this machine's CPU, whose memory is known",
            fix=f"--on=mygpu {MEMORY}={args.memory}    # any name",
        )
    if (
        args.exact
        and args.on != "cpu"
        and machine(args.on, flag="--on", memory=args.memory).topology is None
    ):
        raise CommandError(
            "a step cannot be compiled for a GPU of another machine",
            where=f"--exact --on={args.on}",
            why="the compiler of TPUs needs no TPU, that of GPUs needs the GPU",
            fix=f"jaxlm plan --config={shlex.quote(args.config)} --on={args.on}",
        )


def _text(answer: dict[str, Any], run: Any, *, with_sharding: bool) -> str:
    count, size = formatting.count, formatting.size
    held = answer["bytes_per_device"]
    parts = sorted(((held[name], name) for name in held if name != "total"), reverse=True)
    verdict = "fits" if answer["fits"] else "DOES NOT FIT"
    devices = f"{answer['devices']} device{'s' if answer['devices'] > 1 else ''}"
    parameters, flops = count(answer["parameters"]), count(answer["flops_per_token"])
    memory = f"{size(held['total'])} of {size(answer['memory_bytes'])} per device"
    rows = [
        ("on", f"{answer['on']}, {devices}, mesh {format_mesh(answer['mesh'])}"),
        ("model", f"{parameters} parameters, {flops} FLOPs per token"),
        ("memory", f"{memory}: {verdict}"),
        ("memory", " · ".join(f"{name} {size(part)}" for part, name in parts if part)),
        ("step", _step_time(answer)),
        ("run", _run_time(answer, run.train.steps)),
    ]
    if answer["cost"]:
        rows.append(("cost", f"{answer['cost'][0]:,.2f} to {answer['cost'][1]:,.2f}"))
    rows.append(("checkpoint", f"{size(answer['checkpoint_bytes'])} before compression"))
    if sent := answer["sent_bytes_per_device"]:
        axes = ", ".join(f"{size(part)} over {axis}" for axis, part in sent.items())
        rows.append(("sends", f"{axes} per device and step"))
    if exact := answer.get("compiled_bytes_per_device"):
        named = [f"{name} {size(part)}" for name, part in exact.items() if name != "total" and part]
        rows.append(("compiled", f"{size(exact['total'])} per device: {' · '.join(named)}"))
    if fit := answer.get("fit"):
        rows.append(("tried", f"{fit['tried']:,} settings, {fit['fitting']:,} fit"))
        rows.append(("settings", fit["flags"] or "unchanged"))
    if "nearest" in answer:
        rows.append(("nearest", _fitting(answer["nearest"])))
    rows += [(name, text) for name in ("assumed", "risks") for text in answer[name]]
    return "\n".join([*table(rows), *(_sharding(answer["sharding"]) if with_sharding else [])])


def _step_time(answer: dict[str, Any]) -> str:
    if answer["step_seconds"] is None:
        return "unknown: no figures for this chip"
    low, high = map(formatting.duration, answer["step_seconds"])
    slow, fast = map(formatting.count, answer["tokens_per_second"])
    mfu = ", MFU {:.0%} to {:.0%}".format(*answer["mfu"]) if answer["mfu"] else ""
    return f"{low} to {high}, {slow} to {fast} tokens/s{mfu}"


def _run_time(answer: dict[str, Any], steps: int) -> str:
    text = f"{formatting.count(answer['tokens'])} tokens in {steps:,} steps"
    if answer["hours"] is None:
        return text
    low, high = (formatting.duration(3600 * hours) for hours in answer["hours"])
    return f"{text}: {low} to {high}"


def _fitting(nearest: dict[str, Any] | None) -> str:
    """Return the nearest settings that fit, in words."""
    if nearest is None:
        return "none: no share of depth, of width or of a row's length fits"
    text = f"{nearest['flags']}    # {formatting.size(nearest['bytes_per_device'])} per device"
    if nearest["step_seconds"] is None:
        return text
    low, high = map(formatting.duration, nearest["step_seconds"])
    return f"{text}, {low} to {high} per step"


def _sharding(rows: list[dict[str, Any]]) -> list[str]:
    cells = [("parameter", "shape", "sharded over", "elements per device")]
    for row in rows:
        over = ",".join("x".join(axes) if axes else "-" for axes in row["over"])
        shape = "x".join(map(str, row["shape"]))
        cells.append((row["path"], shape, over, formatting.count(row["numbers_per_device"])))
    return columns(cells, "<<<")
