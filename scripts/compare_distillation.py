"""A student without a teacher, with its teacher in each step, and on stored distributions.

    python scripts/compare_distillation.py --workdir=runs/distillation --seeds=3

The text is packages of Python's standard library, a fifth of their files held out. Teacher and
student are small models of the quickstart's kind, one with a fourth of the parameters. Each seed
trains a student of each kind, in turns and in a rotated order. Losses are those of the held-out
files at the last step; a step takes the median of all steps behind the first
WARM. Finished runs are not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

PACKAGES = "asyncio email http json logging unittest xml urllib multiprocessing importlib ctypes"
TEACHER = {"model.width": 128, "model.hidden": 352}  # 1.0M parameters
STUDENT = {"model.width": 64, "model.hidden": 176, "model.depth": 3}  # a fourth of them
WARM = 10  # steps
KINDS = "without a teacher", "teacher in each step", "stored distributions"


def jaxlm(*words: str) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "jaxlm", *words, "--quiet"], check=True)


def flags(settings: dict[str, Any]) -> list[str]:
    """Return the flags of settings."""
    return [f"--config.{path}={value}" for path, value in settings.items()]


def result(workdir: Path) -> tuple[float, float]:
    """Return the held-out loss in nats and the median seconds of a step."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [record["loss_nats"] for record in records if record["split"] == "val"]
    seconds = [record["step_seconds"] for record in records if record["split"] == "train"]
    return losses[-1], statistics.median(seconds[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of a student")
    parser.add_argument("--teacher_steps", type=int, default=400)
    args = parser.parse_args()
    library = sysconfig.get_paths()["stdlib"]
    texts = ",".join(f"{library}/{name}/**/*.py" for name in PACKAGES.split())
    shared = {
        "data.train": texts,
        "data.validation": "20%",
        "eval.every": "100%",
        "eval.batches": 64,
        "data.sequence": 128,
        "checkpoint.every": "100%",
        "sample.prompts": "()",
        "log.every": 1,
        "precision.compute": "float32",
    }
    teacher, stored = args.workdir / "teacher", args.workdir / "stored"
    words = ["train", "--config=quickstart", f"--workdir={teacher}"]
    tokenizer = {"data.tokenizer": "sentencepiece:1024"}
    jaxlm(*words, *flags(shared | TEACHER | tokenizer | {"train.steps": args.teacher_steps}))
    shared |= {"data.tokenizer": teacher / "tokenizer", "train.steps": args.steps}
    words = ["teach", f"--workdir={teacher}", "--config=quickstart", f"--out={stored}"]
    jaxlm(*words, *flags(shared))
    kinds: dict[str, dict[str, Any]] = {
        KINDS[0]: {},
        KINDS[1]: {"objective.name": "distill", "objective.teacher": teacher},
        KINDS[2]: {"objective.name": "distill", "objective.stored": stored},
    }
    measured: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for seed in range(args.seeds):
        for kind in KINDS[seed % 3 :] + KINDS[: seed % 3]:
            workdir = args.workdir / f"{kind.replace(' ', '_')}-{seed}"
            settings = shared | STUDENT | kinds[kind] | {"seed": seed}
            jaxlm("train", "--config=quickstart", f"--workdir={workdir}", *flags(settings))
            measured[kind].append(result(workdir))
    print(f"teacher: {result(teacher)[0]:.4f} nats")
    print("| student | held-out loss, nats | lowest to highest | ms a step |")
    print("| --- | --- | --- | --- |")
    for kind, runs in measured.items():
        losses, seconds = zip(*runs, strict=True)
        spread = f"{min(losses):.4f} to {max(losses):.4f}"
        step = 1000 * statistics.median(seconds)
        print(f"| {kind} | {statistics.mean(losses):.4f} | {spread} | {step:.1f} |")
    pairs = zip(measured[KINDS[1]], measured[KINDS[2]], strict=True)
    ratios = [one[1] / other[1] for one, other in pairs]
    print(f"steps a second, stored over in each step, by seed: {[round(r, 2) for r in ratios]}")


if __name__ == "__main__":
    main()
