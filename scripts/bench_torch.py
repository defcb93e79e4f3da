"""Training against PyTorch: the same model, optimizer and tokens a step, on one machine.

    python scripts/bench_torch.py --size=0.8M
    python scripts/bench_torch.py --size=124M --rounds=5
    python scripts/bench_torch.py --on=gpu --size=llama-1B@2048 --profile=traces

Needs torch and transformers (the extra `parity`, Python 3.11 for a CPU build of torch);
scripts/bench_gpu finds or makes the environment of a GPU. Every arm is a process of its own. On a
CPU all of them live together and take steps in turns, so that a slow spell of the machine meets
all. On a GPU, whose memory one would take from the other, an arm is started, warmed up, timed and
ended before the next begins, in as many rounds as there is time for; every second one has the order
reversed.

jaxlm's step is that of `jaxlm train`, guard and metrics included; --config.a.b=V changes a setting
of it. In the arm `jaxlm offload` its optimizer's state waits in host memory between steps.
PyTorch's is in scripts/torch_arms.py. All start within 1 of ln V, or the arm does not count. Speeds
are medians over windows; the ratio is that to the best arm of PyTorch. The verdict, in each
precision and over both, is "ahead" or "behind" only if the quartiles of the two best arms are apart
in at least four windows; --threads=1 keeps each arm on one core. MFU is model FLOPs by
jaxlm.models.cost.model_cost, attention at the causal half, over the bfloat16 peak in
jaxlm/monitor/chips.py. Peak memory is the most that an arm's allocator had given out, by its own
count.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_turns
from bench_sizes import OF_CPU, OF_GPU, SIZES, costs, run_of
from bench_turns import Ended, Measured, Plan, machine_facts

from jaxlm.core.errors import JaxlmError
from jaxlm.monitor import chips, formatting, profiling

PRECISIONS = ("float32", "bfloat16")
COMPARED = {**{each: (each,) for each in PRECISIONS}, "the better of each": PRECISIONS}
# Settings in addition to the command line: the cost of the optimizer's state in host memory, and
# the memory that it frees.
OURS: dict[str, list[tuple[str, str]]] = {
    "jaxlm": [],
    "jaxlm offload": [("train.offload", "optimizer")],
}
# Minimal or Hugging Face's, compiled or not, and which attention kernel a GPU may take.
SIDES: dict[str, dict[str, Any]] = {
    "torch eager": dict(is_minimal=True, is_compiled=False, kernel="any"),
    "torch compiled": dict(is_minimal=True, is_compiled=True, kernel="any"),
    "torch tuned": dict(is_minimal=True, is_compiled=True, kernel="any", mode="max-autotune"),
    "torch compiled flash": dict(is_minimal=True, is_compiled=True, kernel="flash"),
    "torch compiled cudnn": dict(is_minimal=True, is_compiled=True, kernel="cudnn"),
    "transformers eager": dict(is_minimal=False, is_compiled=False, kernel="any"),
    "transformers compiled": dict(is_minimal=False, is_compiled=True, kernel="any"),
}
ARMS = {f"{side} {low}": (side, low) for side in (*OURS, *SIDES) for low in PRECISIONS}
WANTED = {
    "cpu": [
        arm
        for arm, (side, _) in ARMS.items()
        if side in ("jaxlm", "torch eager", "torch compiled", "torch tuned")
    ],
    "gpu": [
        f"{side} bfloat16"
        for side in (
            "jaxlm",
            "torch compiled flash",
            "torch compiled cudnn",
            "transformers compiled",
            "jaxlm offload",
        )
    ],
}


def work(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    """Process of an arm: after its first step, it reads requests and writes answers, by line.

    A request is a number of steps, or a folder for a trace.
    """
    begun = time.perf_counter()
    if args.threads:  # before the libraries count the cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    side, precision = ARMS[args.arm]
    size = SIZES[args.size]
    arm: Any
    if side in OURS:
        import jaxlm_arm

        arm = jaxlm_arm.Arm(size, precision, [*overrides, *OURS[side]])
    else:
        import torch_arms

        device: Any = "cuda" if args.on == "gpu" else "cpu"
        arm = torch_arms.Arm(size, precision, device=device, **SIDES[side])
    loss = arm.steps(1)
    _answer(loss_nats=loss, seconds=time.perf_counter() - begun)
    for line in sys.stdin:
        asked = json.loads(line)
        if "trace" in asked:
            _answer(trace=arm.trace(Path(asked["trace"]), asked["steps"]))
            continue
        begun = time.perf_counter()
        loss = arm.steps(asked["steps"])
        _answer(seconds=time.perf_counter() - begun, loss_nats=loss, **arm.facts())


def _answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def row(name: str, arms: Mapping[str, Measured], args: argparse.Namespace) -> dict[str, Any]:
    """The reported row of a size."""
    size = SIZES[name]
    parameters, flops = costs(size)

    def fastest(sides: Container[str], lows: Container[str] = PRECISIONS) -> Measured:
        known = [of for arm, of in arms.items() if ARMS[arm][0] in sides and ARMS[arm][1] in lows]
        return max(known, key=lambda of: of.median, default=Measured())

    best, ours = fastest(SIDES).median, fastest(("jaxlm",)).median

    def one(measured: Measured) -> dict[str, Any]:
        peak = chips.peak_flops(measured.device or "")
        return {
            "tokens_per_second": {
                "median": measured.median,
                "least": min(measured.speeds),
                "most": max(measured.speeds),
                "quartiles": list(measured.quartiles),
            }
            if measured.speeds
            else None,
            "windows": len(measured.speeds),
            "ratio": measured.median / best if best and measured.speeds else None,
            "mfu": flops * measured.median / peak if peak and measured.speeds else None,
            "peak_bytes": measured.peak_bytes,
            "loss_nats": measured.loss,
            "start_seconds": measured.start_seconds,
            "device": measured.device,
            "library": measured.library,
            "error": measured.error,
        }

    return {
        "size": name,
        "parameters": parameters,
        "rows": size.rows,
        "length": size.length,
        "tokens_per_step": size.tokens_per_step,
        "flops_per_token": flops,
        "settings": {"train.remat": "none", "loss.chunk": "None", "train.microbatches": "1"}
        | dict(args.overrides),
        "arms": {arm: one(result) for arm, result in arms.items()},
        "ratio": ours / best if ours and best else None,
        "verdict": {
            name: bench_turns.verdict(fastest(("jaxlm",), lows), fastest(SIDES, lows))
            for name, lows in COMPARED.items()
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    """All sizes in Markdown."""
    lines = [
        "| size | arm | tokens/s (quartiles) | to the best PyTorch | MFU | peak memory "
        "| first loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        for arm, measured in each["arms"].items():
            speed = measured["tokens_per_second"]
            cells = [f"{each['size']}, {each['rows']} x {each['length']}", arm]
            if speed is None:
                lines.append(f"| {' | '.join(cells)} | {measured['error']} | - | - | - | - |")
                continue
            cells += [
                "{:,.0f} ({:,.0f} to {:,.0f})".format(speed["median"], *speed["quartiles"]),
                "-" if measured["ratio"] is None else f"{measured['ratio']:.3f}",
                "-" if measured["mfu"] is None else f"{measured['mfu']:.1%}",
                "-" if measured["peak_bytes"] is None else formatting.size(measured["peak_bytes"]),
                f"{measured['loss_nats']:.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    libraries = {
        f["library"]: f["device"] for r in rows for f in r["arms"].values() if f["library"]
    }
    lines.append("")
    for each in rows:
        settings = ", ".join(f"{path}={value}" for path, value in each["settings"].items())
        lines.append(
            f"{each['size']}: {formatting.count(each['parameters'])} parameters; jaxlm with "
            f"{settings}"
        )
        lines += [f"  jaxlm in {name}: {verdict}" for name, verdict in each["verdict"].items()]
        lines += [
            f"  {arm} ended before the last round: {measured['error']}"
            for arm, measured in each["arms"].items()
            if measured["error"] and measured["tokens_per_second"]
        ]
    lines += [f"{library} on {device}" for library, device in libraries.items()]
    return "\n".join(lines)


def _machine(answer: Mapping[str, Any]) -> str:
    """The processor, and the load average before and after."""
    before, after = answer["before"], answer["after"]
    units = ", ".join(before["units"]) or "no unit for bfloat16"
    loads = " before, ".join(f"{each['load'][0]:.2f}" for each in (before, after))
    cores = answer["threads"] or before["cores"]
    return f"{cores} cores, {units}, Python {before['python']}; load {loads} after"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--on", choices=WANTED, default="cpu")
    parser.add_argument("--size", metavar="A,B", help=", ".join(SIZES))
    parser.add_argument("--arms", metavar="A,B", help=", ".join(ARMS))
    parser.add_argument("--rounds", type=int, metavar="N", help="7, or 3 where arms run alone")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="X", help="of a window (4)")
    parser.add_argument("--steps", type=int, metavar="N", help="of a window, instead of --seconds")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="X", help="at most")
    parser.add_argument("--threads", type=int, metavar="N", help="cores of each arm (all)")
    parser.add_argument("--alone", action="store_true", help="on a CPU as on a GPU: one at a time")
    parser.add_argument("--profile", metavar="DIR", help="traces jaxlm's steps instead of timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes too")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    flags = [flag.removeprefix("--config.").partition("=") for flag in rest]
    if wrong := [flag for flag in rest if not flag.startswith("--config.") or "=" not in flag]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    args.overrides = [(path, value) for path, _, value in flags]
    if args.arm:
        work(args, args.overrides)
        return 0
    is_gpu = args.on == "gpu"
    names = args.size.split(",") if args.size else OF_GPU if is_gpu else OF_CPU
    arms = args.arms.split(",") if args.arms else WANTED[args.on]
    if wrong := [name for name in names if name not in SIZES] + [a for a in arms if a not in ARMS]:
        parser.error(
            f"there is no {wrong[0]!r}; sizes are {', '.join(SIZES)}; arms {', '.join(ARMS)}"
        )
    try:
        for name in names:
            run_of(SIZES[name], "bfloat16", args.overrides)
    except JaxlmError as error:
        print(error, file=sys.stderr)
        return error.code
    is_alone = is_gpu or args.alone
    plan = Plan(
        command=[
            sys.executable,
            __file__,
            f"--on={args.on}",
            *([f"--threads={args.threads}"] if args.threads else []),
            *rest,
        ],
        on=args.on,
        rounds=args.rounds or (3 if is_alone else 7),
        seconds=args.seconds,
        steps=args.steps,
        deadline=time.monotonic() + 60 * args.minutes,
    )
    if args.profile:
        return profile(plan, names, Path(args.profile))
    measure = bench_turns.alone if is_alone else bench_turns.together
    rows: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"on": args.on, "threads": args.threads, "before": machine_facts()}
    for results in measure(plan, names, arms):
        rows = [row(name, of, args) for name, of in results.items()]
        answer |= {"rows": rows, "after": machine_facts()}
        if args.out:  # after an early end, the measurements stay
            args.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer) if args.json else f"{table(rows)}\n{_machine(answer)}")
    return int(any(results["error"] for each in rows for results in each["arms"].values()))


def profile(plan: Plan, names: Sequence[str], folder: Path) -> int:
    """Prints where the time of a few of jaxlm's steps went, by size."""
    for name in names:
        try:
            summary = bench_turns.trace(plan, name, "jaxlm bfloat16", (folder / name).absolute())
        except Ended as ended:
            print(f"{name}: {ended}", file=sys.stderr)
            return 1
        print(f"{name}: {summary['steps']} steps, {summary['seconds']:.3f} s, {folder / name}")
        for label, text in profiling.facts(summary):
            print(f"  {label}")
            print("\n".join(f"    {line}" for line in text.splitlines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
