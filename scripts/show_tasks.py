"""Tables of tasks: a curve with intervals, comparisons of runs, batches, and contamination.

    python scripts/show_tasks.py --blimp=blimp.jsonl.gz --steps=200 --limit=2000

Other flags, such as `--config.model.depth=2`, are those of all trainings.
BLiMP's file is one that the user has: JSON lines with `sentence_good`, `sentence_bad`, `UID`,
`pairID` and `field`. Runs of the quickstart are trained in a temporary folder: two that differ in
the seed, one that ends at a quarter of the steps, and one on other text (the sentences of BLiMP's
file that are not scored). Items from the library are the first sentences of documentation in its
files.
"""

import argparse
import ast
import contextlib
import gzip
import io
import json
import os
import random
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxlm.cli.main import main as command

BLIMP = """\
kind = "pair"
invalid = "skip"    # a few pairs have equal sentences
items = "blimp.jsonl"
id = "{{ UID }}/{{ pairID }}"
group = "{{ UID }}"
subset = "{{ field }}"
good = "{{ sentence_good }}"
bad = "{{ sentence_bad }}"
"""
LIBRARY = 'kind = "text"\nitems = "library.jsonl"\n'
PARTS = 4  # checkpoints of the curve


def jaxlm(*words: str) -> dict[str, Any]:
    """Run a command in this process, and return its JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        code = command([*words, "--json"])
    if code:
        sys.exit(f"{' '.join(words)} ended with {code}: {stdout.getvalue()}")
    return dict(json.loads(stdout.getvalue().splitlines()[-1]))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table of Markdown."""
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def shown(figures: dict[str, Any]) -> str:
    """Return a mean with its interval, which a single group of items does not have."""
    mean, low, high = (figures[name] for name in ("mean", "low", "high"))
    return f"{mean:.3f}" if low is None else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def sentences_of_library(count: int) -> list[str]:
    """Return documentation of functions in modules of the library: texts of 20 words or more."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_docstring(node, clean=False) or ""
                if 20 <= len(text.split()) <= 60:
                    texts.append(text)
    return random.Random(0).sample(sorted(set(texts)), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blimp", required=True, help="file of BLiMP, .jsonl or .jsonl.gz")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=int, default=2000, help="items of BLiMP")
    parser.add_argument("--items", type=int, default=200, help="items from the library")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reader = gzip.open if args.blimp.endswith(".gz") else open
        with reader(args.blimp, "rt") as file:
            lines = file.read().splitlines()
        random.Random(0).shuffle(lines)
        (folder / "blimp.jsonl").write_text("\n".join(lines[: args.limit]) + "\n")
        (folder / "blimp.toml").write_text(BLIMP)
        (folder / "texts").mkdir()
        others = [json.loads(line)["sentence_good"] for line in lines[args.limit :]]
        for first in range(0, len(others), 100):
            text = "\n".join(others[first : first + 100])
            (folder / "texts" / f"{first}.txt").write_text(text)
        texts = sentences_of_library(args.items)
        with open(folder / "library.jsonl", "w") as out:
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "library.toml").write_text(LIBRARY)
        os.chdir(folder)
        show(folder, args.steps, flags)


def show(folder: Path, steps: int, flags: Sequence[str]) -> None:
    """Train the runs, and print the tables."""
    shared = ["--config=quickstart", f"--config.eval.every={steps}", *flags]
    every = f"--config.checkpoint.every={steps // PARTS}"
    for run, more in {
        "a": [f"--config.train.steps={steps}", every, f"--config.checkpoint.keep_last={PARTS}"],
        "b": [f"--config.train.steps={steps}", "--config.seed=1"],
        "short": [f"--config.train.steps={steps // PARTS}"],
        "other": ["--config.train.steps=4", "--config.data.train=texts/*.txt"],
    }.items():
        jaxlm("train", *shared, *more, f"--workdir={run}")
    task = "--tasks=blimp.toml"
    columns: dict[int, dict[str, Any]] = {}
    for step in range(steps // PARTS, steps + 1, steps // PARTS):
        answer = jaxlm("eval", "--workdir=a", task, f"--step={step}")
        result = answer["tasks"]["blimp"]
        parts = {"all": result, **result["subsets"]}
        columns[step] = {part: each["metrics"]["accuracy"] for part, each in parts.items()}
    first = next(iter(columns.values()))
    head = ["field of BLiMP", *(f"step {step}" for step in columns)]
    table(head, [[part, *(shown(each[part]) for each in columns.values())] for part in first])

    rows = []
    for run in ("b", "short"):
        jaxlm("eval", f"--workdir={run}", task)
        for each in jaxlm("compare", "a", run)["tasks"]:
            interval = f"{each['difference']['low']:+.3f} to {each['difference']['high']:+.3f}"
            values = each["a"]["mean"], each["b"]["mean"], each["difference"]["p_value"]
            rows.append([f"a, {run}", *(f"{value:.3f}" for value in values), interval])
            rows[-1].append(each["verdict"])
    table(["runs", "A", "B", "p", "difference", "in words"], rows)

    jaxlm("eval", "--workdir=a", "--tasks=library.toml", "--batch=64")
    (file,) = folder.glob("a/evals/library.*/samples.jsonl")
    content = file.read_bytes()
    file.unlink()
    jaxlm("eval", "--workdir=a", "--tasks=library.toml", "--batch=1")
    print(f"\nbatch 1 and 64 give the same bytes: {file.read_bytes() == content}")

    rows = []
    for run in ("a", "other"):
        words = ("eval", f"--workdir={run}", "--tasks=library.toml", "--against_training")
        compared = jaxlm(*words)["against_training"]["library"]
        sides = [compared[part] for part in ("touched", "untouched")]
        scores = [
            shown(each["metrics"]["bits_per_byte"]) if each["items"] else "-" for each in sides
        ]
        rows.append([run, *(each["items"] for each in sides), *scores])
    head = ["run", "items in its training text", "others", "bits per byte of these", "of others"]
    table(head, rows)


if __name__ == "__main__":
    main()
