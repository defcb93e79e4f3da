"""Whole training runs against PyTorch: the command `jaxlm train` and a complete training script.

    python scripts/bench_runs.py --text=input.txt --size=0.8M --steps=1000 --rounds=10

Needs torch (the extra `parity`). The arms train the same model on the characters of a text, with
the same optimizer, schedule and number of tokens a step, and log their loss every ten steps; no
side evaluates, and jaxlm saves its last step only. Each run is a process of its own, alone on the
machine, in rounds whose order is reversed every second time.

An arm has two figures: tokens per second of the whole command, from its start to its end, and those
of its loop, from the first logged step to the last. A first run of each arm is not counted: both
libraries keep what they compile. The best arm of PyTorch is that with the highest median. The
verdict is "ahead" or "behind" only if the quartiles are apart in at least four rounds.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_turns
from bench_sizes import SIZES, settings_of
from bench_turns import Measured, machine_facts

PRECISIONS = ("float32", "bfloat16")
MODES = {"torch eager": None, "torch compiled": "default", "torch tuned": "max-autotune"}
ARMS = [f"{side} {low}" for side in ("jaxlm", *MODES) for low in PRECISIONS]
LOG_EVERY = 10  # steps
FIGURES = ("command", "loop")


def command(arm: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the words of a run of an arm, which writes metrics.jsonl into `folder`."""
    side, _, precision = arm.rpartition(" ")
    if side != "jaxlm":
        words = [f"--text={args.text}", f"--size={args.size}", f"--steps={args.steps}"]
        words += [f"--out={folder}", f"--precision={precision}", f"--mode={MODES[side] or 'eager'}"]
        return [sys.executable, str(Path(__file__).with_name("torch_run.py")), *words]
    settings = settings_of(SIZES[args.size], precision) | {
        "data.train": [str(args.text)],
        "data.validation": [],
        "data.tokenizer": "characters",
        "schedule.name": "cosine",
        "schedule.warmup": "5%",
        "schedule.floor": 0.1,
        "train.steps": args.steps,
        "train.stack": "auto",
        "checkpoint.every": "100%",
        "log.every": LOG_EVERY,
        "sample.prompts": [],
    }
    nested: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        nested.setdefault(section, {})[name] = value
    config = folder.with_suffix(".py")
    config.write_text(f"def get_config():\n    return {nested!r}\n")
    words = ["train", f"--config={config}", f"--workdir={folder}", "--quiet"]
    return [sys.executable, "-m", "jaxlm", *words]


def measure(arm: str, args: argparse.Namespace) -> dict[str, float]:
    """Run an arm once; return tokens per second of the command and of its loop, and its last loss.

    Raises:
      RuntimeError: if the command fails.
    """
    quiet = {"OMP_WAIT_POLICY": "passive", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = subprocess.run(
            command(arm, args, Path(folder) / "run"),
            env=os.environ | quiet,
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - begun
        if done.returncode:
            output = " ".join((done.stderr.strip() or "no output").splitlines()[:6])
            raise RuntimeError(f"exit code {done.returncode}: {output[:300].replace('|', '/')}")
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "train"]
    first, last = rows[0], rows[-1]
    tokens = SIZES[args.size].tokens_per_step
    steps = last["step"] - first["step"]
    return {
        "command": tokens * args.steps / seconds,
        "loop": tokens * steps / (last["time_unix"] - first["time_unix"]),
        "loss_nats": last["loss_nats"],
    }


def table(answer: Mapping[str, Any]) -> str:
    """Return the arms in Markdown, the verdicts, and the machine."""
    lines = [
        "| arm | tokens/s of the command (quartiles) | of its loop (quartiles) | last loss |",
        "|---|---|---|---|",
    ]
    for arm, measured in answer["arms"].items():
        if measured["error"]:
            lines.append(f"| {arm} | {measured['error']} | - | - |")
            continue
        speeds = [
            "{median:,.0f} ({low:,.0f} to {high:,.0f})".format(**measured[name]) for name in FIGURES
        ]
        lines.append(f"| {arm} | {' | '.join(speeds)} | {measured['loss_nats']:.3f} |")
    lines.append("")
    lines += [
        f"jaxlm over the best of PyTorch in {each['precision']}, {each['figure']}: "
        f"{each['ratio']:.2f}, {each['verdict']}"
        for each in answer["verdicts"]
    ]
    before, after = answer["before"], answer["after"]
    units = ", ".join(before["units"]) or "no unit for bfloat16"
    load = f"load {before['load'][0]:.2f} before, {after['load'][0]:.2f} after"
    lines.append(f"{before['cores']} cores, {units}, Python {before['python']}; {load}")
    return "\n".join(lines)


def verdicts(measured: Mapping[str, Mapping[str, Measured]]) -> list[dict[str, Any]]:
    """Return the ratio and the verdict in each precision and over both, for both figures."""
    answers = []
    for name, lows in (*((low, (low,)) for low in PRECISIONS), ("the better of each", PRECISIONS)):
        for figure in FIGURES:
            known = {
                arm: of[figure]
                for arm, of in measured.items()
                if of[figure].speeds and arm.rpartition(" ")[2] in lows
            }
            ours = [of for arm, of in known.items() if arm.startswith("jaxlm")]
            theirs = [of for arm, of in known.items() if not arm.startswith("jaxlm")]
            if ours and theirs:
                us, them = (max(each, key=lambda of: of.median) for each in (ours, theirs))
                verdict = bench_turns.verdict(us, them)
                ratio = us.median / them.median
                answer = {"precision": name, "figure": figure, "ratio": ratio, "verdict": verdict}
                answers.append(answer)
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--text", type=Path, required=True, help="file whose characters are learned"
    )
    parser.add_argument("--size", choices=SIZES, default="0.8M")
    parser.add_argument("--arms", metavar="A,B", default=",".join(ARMS), help=", ".join(ARMS))
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="X", help="at most")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes too")
    args = parser.parse_args()
    args.text = args.text.absolute()
    arms = args.arms.split(",")
    if wrong := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"there is no {wrong[0]!r}; arms are {', '.join(ARMS)}")
    deadline = time.monotonic() + 60 * args.minutes
    measured = {arm: {name: Measured() for name in FIGURES} for arm in arms}
    facts: dict[str, dict[str, Any]] = {arm: {"error": None, "loss_nats": None} for arm in arms}
    answer: dict[str, Any] = {"size": args.size, "steps": args.steps, "before": machine_facts()}
    for turn in range(args.rounds + 1):  # the first one compiles
        for arm in arms if turn % 2 else arms[::-1]:
            if facts[arm]["error"] or time.monotonic() > deadline:
                continue
            try:
                figures = measure(arm, args)
            except RuntimeError as error:
                facts[arm]["error"] = str(error)
                continue
            facts[arm]["loss_nats"] = figures["loss_nats"]
            if turn:
                for name in FIGURES:
                    measured[arm][name].speeds.append(figures[name])
        answer |= {
            "arms": {arm: facts[arm] | _figures(measured[arm]) for arm in arms},
            "verdicts": verdicts(measured),
            "after": machine_facts(),
        }
        if args.out:  # after an early end, the measurements stay
            args.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(table(answer))
    return int(any(each["error"] for each in facts.values()))


def _figures(measured: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        name: {
            "median": of.median,
            "low": of.quartiles[0],
            "high": of.quartiles[1],
            "rounds": len(of.speeds),
        }
        for name, of in measured.items()
    }


if __name__ == "__main__":
    sys.exit(main())
