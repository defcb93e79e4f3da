"""Says what a run will need and take, before it starts: memory a device, time, cost, and which device holds what.

Arithmetic, without the accelerator and without JAX: --on=h100x8, h200, rtx4090, t4, v5e-16, v5p-128, tpu7x-64, or cpu; for
any other GPU --on=NAME --memory=24GB says whether the run fits, without times. With
--exact the step is compiled, for a TPU slice or for this machine's CPU, and the compiler's own account is shown beside it.
With --fit meshes, micro-batches, remat and chunks of the loss are tried for the fastest that fits. The exit code is 0 also where
the run does not fit: the answer says so, and what would: these settings, else more of the chips, else a smaller model.
"""

import argparse
import shlex
from typing import Any

from jaxlm.cli.arguments import needed_config
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.monitor import chips, cpu, formatting
from jaxlm.monitor.chips import MEMORY, machine
from jaxlm.parallel.config import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on", default="cpu", metavar="MACHINE", help="a chip, CHIPxN, a TPU slice, or cpu (cpu)"
    )
    parser.add_argument(
        MEMORY, metavar="SIZE", help="memory of one GPU, such as 24GB: for a GPU not in the table"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="with --on=cpu: devices that it is split into (1)",
    )
    parser.add_argument(
        "--price", type=float, metavar="X", help="of a device for an hour: adds the cost"
    )
    parser.add_argument("--fit", action="store_true", help="search for the fastest that fits")
    parser.add_argument("--exact", action="store_true", help="compile the step, and compare")
    parser.add_argument("--sharding", action="store_true", help="the table of parameters")


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.plan import predict

    loaded = config.load(Run, needed_config(args, Run), args.overrides)
    _check(args)
    assumed: list[str] = []
    on = (
        cpu.this_machine(args.devices, assumed)
        if args.on == "cpu"
        else machine(args.on, flag="--on", memory=args.memory)
    )
    chosen = loaded.value
    answer: dict[str, Any] = {}
    if args.fit:
        from jaxlm.recipes.plan.search import search

        found = search(loaded.value, on, assumed)
        chosen = (found.best or found.smallest).run
        answer["fit"] = {
            "settings": found.settings,
            "flags": found.flags,
            "tried": found.tried,
            "fitting": found.fitting,
        }
    forecast = predict.forecast(chosen, on, assumed)
    answer |= forecast.record(args.price) | {"sharding": forecast.sharding()}
    if not forecast.fits:
        answer["nearest"] = _nearest(loaded.value, on)
    if args.exact:
        from jaxlm.recipes.diagnose.topology import compile_for, compile_here

        compiled = (
            compile_here(chosen, args.devices, out.say)
            if args.on == "cpu"
            else compile_for(chosen, args.on, out.say)
        )
        answer["compiled_bytes_per_device"] = compiled["bytes_per_device"]
        answer["fits"] = compiled["bytes_per_device"]["total"] <= forecast.memory_bytes
    out.result(answer, _text(answer, forecast.run, with_sharding=args.sharding))
    return 0


def _nearest(run: Any, on: Any) -> dict[str, Any] | None:
    from jaxlm.recipes.plan.search import nearest

    found = nearest(run, on)
    if found is None:
        return None
    return {
        "flags": found.flags,
        "bytes_per_device": found.forecast.bytes_per_device["total"],
        "step_seconds": found.forecast.record()["step_seconds"],
    }


def _check(args: argparse.Namespace) -> None:
    if args.price is not None and not args.price > 0:
        raise CommandError(
            f"a price of {args.price:g}",
            where=f"--price={args.price:g}",
            why="it is money for a device and an hour, above 0",
            fix="jaxlm plan --help",
        )
    if args.devices < 1 or (args.devices > 1 and args.on != "cpu"):
        raise CommandError(
            "the number of devices belongs to the machine's name",
            where=f"--devices={args.devices}",
            why="a CPU can be split into several devices; of others the name says how many, as in h100x8",
            fix=f"--on={args.on}x{args.devices} --devices=1"
            if args.devices > 1 and args.on in chips.CHIPS and not chips.CHIPS[args.on].is_tpu
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
            "a step cannot be compiled for a GPU that is not here",
            where=f"--exact --on={args.on}",
            why="the compiler of TPUs needs no TPU, that of GPUs needs the GPU",
            fix=f"jaxlm plan --config={shlex.quote(args.config)} --on={args.on}",
        )


def _text(answer: dict[str, Any], run: Any, *, with_sharding: bool) -> str:
    held = answer["bytes_per_device"]
    parts = sorted(
        ((size, name) for name, size in held.items() if name != "total" and size), reverse=True
    )
    verdict = "fits" if answer["fits"] else "DOES NOT FIT"
    rows = [
        (
            "on",
            f"{answer['on']}, {answer['devices']} device{'s' if answer['devices'] > 1 else ''}, mesh "
            + shown(answer["mesh"]),
        ),
        (
            "model",
            f"{formatting.count(answer['parameters'])} parameters, {formatting.count(answer['flops_per_token'])} FLOPs a token",
        ),
        (
            "memory",
            f"{formatting.size(held['total'])} of {formatting.size(answer['memory_bytes'])} a device: {verdict}",
        ),
        ("", " · ".join(f"{name} {formatting.size(size)}" for size, name in parts)),
        ("step", _step_time(answer)),
        ("run", _run_time(answer, run.train.steps)),
        ("checkpoint", f"{formatting.size(answer['checkpoint_bytes'])} before compression"),
    ]
    if answer["cost"]:
        rows.insert(6, ("cost", f"{answer['cost'][0]:,.2f} to {answer['cost'][1]:,.2f}"))
    if answer["sent_bytes_per_device"]:
        sent = ", ".join(
            f"{formatting.size(size)} over {axis}"
            for axis, size in answer["sent_bytes_per_device"].items()
        )
        rows.append(("sends", f"{sent} a device and step"))
    if "compiled_bytes_per_device" in answer:
        exact = answer["compiled_bytes_per_device"]
        parts_said = " · ".join(
            f"{name} {formatting.size(size)}"
            for name, size in exact.items()
            if name != "total" and size
        )
        rows.append(("compiled", f"{formatting.size(exact['total'])} a device: {parts_said}"))
    if "fit" in answer:
        found = answer["fit"]
        rows.append(("tried", f"{found['tried']:,} ways, of which {found['fitting']:,} fit"))
        rows.append(("settings", found["flags"] or "as they are"))
    if "nearest" in answer:
        rows.append(("nearest", _told(answer["nearest"])))
    rows += [("assumed" if not n else "", text) for n, text in enumerate(answer["assumed"])]
    rows += [("risks" if not n else "", text) for n, text in enumerate(answer["risks"])]
    lines = [f"{name:<11}{text}" for name, text in rows]
    if with_sharding:
        lines += _sharding(answer["sharding"])
    return "\n".join(lines)


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


def _told(nearest: dict[str, Any] | None) -> str:
    """The nearest that fits, in words."""
    if nearest is None:
        return "none: no share of depth, of width or of a row's length fits"
    size = formatting.size(nearest["bytes_per_device"])
    if nearest["step_seconds"] is None:
        return f"{nearest['flags']}    # {size} a device"
    low, high = map(formatting.duration, nearest["step_seconds"])
    return f"{nearest['flags']}    # {size} a device, {low} to {high} a step"


def _sharding(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["parameter, shape, split over, numbers a device"]
    for row in rows:
        over = ",".join("x".join(axes) if axes else "-" for axes in row["over"])
        shape = "x".join(map(str, row["shape"]))
        lines.append(
            f"  {row['path']:<36}{shape:<26}{over:<26}{formatting.count(row['numbers_per_device'])}"
        )
    return lines
