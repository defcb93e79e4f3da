"""Compare the numbers of two commits, bit for bit: losses, checkpoints, plans, exports.

    python scripts/same_numbers.py HEAD~1            # that commit against the working tree
    python scripts/same_numbers.py HEAD~1 --only=optim
    python scripts/same_numbers.py 752c1ed --training  # what both log of training steps

Each objective, each optimizer and eight families train four steps of a tiny model in both trees, by
the command line. The script prints one line for each case and exits with 1 if any number differs or
a command fails. About four minutes for a tree on two cores.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).parents[1]
OBJECTIVES = ("causal", "prefix", "masked", "span", "blank", "ul2", "fim", "mtp")
OPTIMIZERS = (
    *("adamw", "sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "nadam", "amsgrad"),
    *("adamw8bit", "schedule_free", "lion", "adafactor", "muon", "soap", "sophia"),
)
FAMILIES = {
    "gpt2": (),
    "llama": ("kv_heads=1",),
    "neox": (),
    "gemma2": ("kv_heads=1", "head_dim=16"),
    "mixtral": ("kv_heads=1", "experts=4", "hidden=64"),
    "t5": ("hidden=64",),
    "bert": ("hidden=64",),
}
OBJECTIVE_OF = {"t5": "span", "bert": "masked"}
TINY = (
    *("--config.model.width=32", "--config.model.depth=2", "--config.model.heads=2"),
    *("--config.data.sequence=64", "--config.train.batch=8", "--config.train.steps=4"),
    *("--config.data.tokenizer=bytes", "--config.eval.batches=2", "--config.checkpoint.every=2"),
    *("--config.sample.every=100%", "--config.sample.max_tokens=2", "--config.log.every=1"),
)
# For hardware that is not here: plans for this CPU measure its speed.
PLANS = {
    "llama_8b": ("--config=configs/llama_8b.py", "--on=h100x8", "--fit"),
    "llama_70b": ("--config=configs/llama_70b.py", "--on=h100x256"),
    "gpt2_124m": ("--config=configs/gpt2_124m.py", "--on=v5p-16"),
    "moe_fine": ("--config=configs/moe_fine.py", "--on=h100x8"),
    "mixtral_8x7b": ("--config=configs/mixtral_8x7b.py", "--on=h100x64"),
}
# Numbers of time and memory differ between two runs of the same code.
MEASURED = (
    "seconds",
    "_per_s",
    "mfu",
    "time",
    "bytes",
    "rss",
    "eta",
    "goodput",
    "percent",
    "elapsed",
    "wall",
)
PROSE = ("assumed",)


def cases() -> Iterator[tuple[str, list[str]]]:
    """Name and extra flags of each training run."""
    # The quickstart's optimizer is Muon, and a change of its rounding is no change of objectives.
    adamw = "--config.optim.name=adamw"
    for name in OBJECTIVES:
        yield f"objective.{name}", [f"--config.objective.name={name}", adamw]
    mixed = [f"--config.objective.weights.{name}=1" for name in OBJECTIVES]
    yield "objective.mixture", ["--config.objective.name=mixture", *mixed, adamw]
    for name in OPTIMIZERS:
        yield f"optim.{name}", [f"--config.optim.name={name}"]
    for name, settings in FAMILIES.items():
        objective = f"--config.objective.name={OBJECTIVE_OF.get(name, 'causal')}"
        shape = [f"--config.model.{setting}" for setting in settings]
        yield f"family.{name}", [f"--config.model.family={name}", objective, *shape]
    yield "bfloat16", ["--config.precision.params=bfloat16"]
    yield "accumulated", ["--config.train.microbatches=2", "--config.loss.chunk=32"]
    yield "averaged", ["--config.average.name=ema"]


def main() -> int:
    """Compare, or, as the child of itself, run one tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit to compare the working tree with")
    parser.add_argument("--only", default="", help="cases whose name begins with this (all)")
    parser.add_argument(
        "--training",
        action="store_true",
        help="of metrics, compare the figures of training steps that both commits log",
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        args.out.write_text(json.dumps(_measure(args.only), indent=1))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", base, args.commit],
            cwd=ROOT,
            check=True,
        )
        try:
            results = [_run(tree, Path(folder, "out.json"), args.only) for tree in (base, ROOT)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    before, after = results
    if args.training:
        for name in before.keys() & after.keys():
            _keep_training(before[name], after[name])
    different = [name for name in before | after if before.get(name) != after.get(name)]
    # Two trees that fail in the same way have compared no numbers.
    failed = [name for name, result in (after | before).items() if result["code"]]
    for name in before | after:
        verdict = "DIFFERENT" if name in different else "FAILED" if name in failed else "same"
        print(f"{verdict:9} {name}")
        if verdict != "same":
            print(f"    before {before.get(name)}\n    after  {after.get(name)}")
    same = len((before | after).keys() - {*different, *failed})
    print(f"{same} of {len(before | after)} are the same")
    return 0 if same == len(before | after) else 1


def _keep_training(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Leave the rows of training steps, each with the figures that both results have."""
    if "metrics" not in before or "metrics" not in after:
        return
    rows = [
        [row for row in result["metrics"] if row.get("split") == "train"]
        for result in (before, after)
    ]
    for first, second in zip(*rows, strict=False):
        for key in first.keys() ^ second.keys():
            first.pop(key, None)
            second.pop(key, None)
    before["metrics"], after["metrics"] = rows


def _run(tree: Path, out: Path, only: str) -> dict[str, Any]:
    subprocess.run(
        [sys.executable, __file__, "-", f"--only={only}", f"--out={out}"],
        env=os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
        cwd=tree,
        check=True,
    )
    return json.loads(out.read_text())


def _measure(only: str) -> dict[str, Any]:
    """Everything that one tree computes, by name of the case."""
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in cases():
            if name.startswith(only):
                measured[name] = _trained(Path(folder, name), flags)
                print(name, measured[name]["code"], file=sys.stderr, flush=True)
        run, exported = Path(folder, "family.llama"), Path(folder, "exported")
        if run.exists():
            code, _ = _call("export", f"--workdir={run}", f"--out={exported}")
            measured["export"] = {
                "code": code,
                "files": {
                    path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                    for path in sorted(exported.glob("*.safetensors"))
                },
            }
        for name, words in PLANS.items():
            if f"plan.{name}".startswith(only):
                code, written = _call("plan", *words, "--json")
                plan = _without(PROSE, json.loads(written)) if code == 0 else written
                measured[f"plan.{name}"] = {"code": code, "plan": plan}
    return measured


def _trained(workdir: Path, flags: list[str]) -> dict[str, Any]:
    words = ["train", "--config=configs/quickstart.py", f"--workdir={workdir}", "--quiet"]
    code, written = _call(*words, *TINY, *flags)
    jax.clear_caches()  # or the programs of all cases stay in memory
    rows = workdir / "metrics.jsonl"
    lines = rows.read_text().splitlines() if rows.exists() else []
    return {
        "code": code,
        "error": written[-300:] if code else "",
        "metrics": [_without(MEASURED, json.loads(line)) for line in lines],
        "checkpoints": {
            path.parent.name: _leaves(path.parent)
            for path in sorted(workdir.glob("checkpoints/*/digests.json"))
        },
    }


def _leaves(step: Path) -> str:
    """A digest of all leaves as restored: the files of two equal checkpoints differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = ocp.PyTreeCheckpointer().restore(step)
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _without(words: tuple[str, ...], value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without(words, each)
            for key, each in value.items()
            if not any(word in key for word in words)
        }
    if isinstance(value, list):
        return [_without(words, each) for each in value]
    return value.hex() if isinstance(value, float) else value


def _call(*words: str) -> tuple[int, str]:
    """Exit code and output of a command in this process: imports and programs serve all."""
    from jaxlm.cli.main import main as jaxlm  # of the tree under test

    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        code = jaxlm(list(words))
    return code, written.getvalue()


if __name__ == "__main__":
    sys.exit(main())
