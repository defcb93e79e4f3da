"""Tables of tasks: a curve with intervals, comparisons, batches, contamination, lm-eval, faults.

    python scripts/show_tasks.py --blimp=blimp.jsonl.gz --steps=200 --limit=2000 --peer=PYTHON

Other flags, such as `--config.model.depth=2`, are those of all trainings.
BLiMP's file is one that the user has: JSON lines with `sentence_good`, `sentence_bad`, `UID`,
`pairID` and `field`. Runs of the quickstart are trained in a temporary folder: two that differ in
the seed, one that ends at a quarter of the steps, and one on other text (the sentences of BLiMP's
file that are not scored). Items from the library are the first sentences of documentation in its
files. PYTHON has torch, transformers, accelerate and lm-eval; without it the tables of lm-eval,
of scores and of speed (`bench_tasks.py`), are left out. The faults are those of the tests.
"""

import argparse
import ast
import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxlm.cli.main import main as command

ROOT = Path(__file__).resolve().parents[1]
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
PAIRS = """\
task: pairs
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: ""
target_delimiter: ""
doc_to_choice: "{{ [sentence_good, sentence_bad] }}"
doc_to_target: 0
"""
PARTS = 4  # checkpoints of the curve
SHARED_ITEMS = 200  # with lm-eval
FAULTS = ("tests/evals/test_task_mutants.py", "tests/recipes/use/test_tasks.py", "-k=seeded")


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
    parser.add_argument("--peer", help="Python with torch, transformers, accelerate and lm-eval")
    parser.add_argument("--speed_items", type=int, default=60, help="items of the table of speed")
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
        if args.peer:
            show_peer(folder, args.peer)
            show_speed(args.peer, args.speed_items)
    show_faults()


def show(folder: Path, steps: int, flags: Sequence[str]) -> None:
    """Train the runs, and print the tables."""
    shared = ["--config=quickstart", f"--config.eval.every={steps}", *flags]
    every = f"--config.checkpoint.every={steps // PARTS}"
    for run, more in {
        "a": [f"--config.train.steps={steps}", every, f"--config.checkpoint.keep_last={PARTS}"],
        "b": [f"--config.train.steps={steps}", "--config.seed=1"],
        "short": [f"--config.train.steps={steps // PARTS}"],
        "other": [
            *("--config.train.steps=4", "--config.data.train=texts/*.txt"),
            "--config.precision.compute=float32",  # that of lm-eval
        ],
    }.items():
        jaxlm("train", *shared, *more, f"--workdir={run}")
    task, library = "--tasks=blimp.toml", "--tasks=library.toml"
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
        if run == "short":
            jaxlm("eval", "--workdir=a", library)
            jaxlm("eval", f"--workdir={run}", library)
        for each in jaxlm("compare", "a", run)["tasks"]:
            interval = f"{each['difference']['low']:+.3f} to {each['difference']['high']:+.3f}"
            values = [f"{each[side]['mean']:.3f}" for side in ("a", "b")]
            names = [f"a, {run}", f"{each['task']}, {each['metric']}"]
            doubt = [f"{each['difference']['p_value']:.2g}", interval]
            rows.append([*names, *values, *doubt, each["verdict"]])
    table(["runs", "task", "A", "B", "p", "difference", "in words"], rows)

    contents = []
    for stored in folder.glob("short/evals/library.*"):
        shutil.rmtree(stored)
    for batch in (64, 1):
        result = jaxlm("eval", "--workdir=short", library, f"--batch={batch}")["tasks"]["library"]
        contents.append(Path(result["folder"], "samples.jsonl").read_bytes())
        shutil.rmtree(result["folder"])
    print(f"\nbatch 1 and 64 give the same bytes: {contents[0] == contents[1]}")

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


def show_peer(folder: Path, peer: str) -> None:
    """Print the table of the same items in lm-eval with transformers, on an exported run."""
    lines = (folder / "blimp.jsonl").read_text().splitlines()
    valid = [line for line in lines if len({*sentences(line)}) == 2][:SHARED_ITEMS]
    (folder / "pairs.jsonl").write_text("\n".join(valid) + "\n")
    (folder / "pairs.yaml").write_text(PAIRS.replace("FILE", str(folder / "pairs.jsonl")))
    jaxlm("export", "--workdir=other", "--to=hf", "--out=hf")
    answer = jaxlm("eval", "--workdir=other", "--tasks=pairs.yaml")["tasks"]["pairs"]
    words = [peer, "-m", "lm_eval", "run", "--model", "hf", "--model_args"]
    words += ["pretrained=hf,dtype=float32", "--tasks", "pairs", "--include_path", ".", "--device"]
    words += ["cpu", "--log_samples", "--output_path", "out"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(words, check=True, stdout=sys.stderr, env={**os.environ, **offline})
    (file,) = folder.glob("out/**/samples_pairs_*.jsonl")
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
    theirs = [[-float(choice[0][0]) for choice in row["resps"]] for row in rows]
    written = Path(answer["folder"], "samples.jsonl").read_text().splitlines()
    ours = [json.loads(line)["nats"] for line in written]
    pairs = list(zip(ours, theirs, strict=True))
    largest = max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
    picks = sum(x.index(min(x)) != y.index(min(y)) for x, y in pairs)
    accuracies = [f"{sum(x[0] <= x[1] for x in each) / len(each):.4f}" for each in (ours, theirs)]
    head = ["items in both", "largest difference of a log-likelihood, nats", "other picks"]
    values = [len(pairs), f"{largest:.1e}", picks, *accuracies]
    table([*head, "accuracy", "of lm-eval"], [values])


def sentences(line: str) -> tuple[str, str]:
    """Return both sentences of a line of BLiMP."""
    record = json.loads(line)
    return record["sentence_good"], record["sentence_bad"]


def show_speed(peer: str, items: int) -> None:
    """Print the table of processor time against lm-eval."""
    words = ["scripts/bench_tasks.py", f"--peer={peer}", f"--items={items}"]
    done = subprocess.run(
        [sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    figures = json.loads(done.stdout[done.stdout.index('{\n "items"') :])
    names = ("items", "jaxlm_seconds", "lm_eval_seconds", "lm_eval_batch", "ratio")
    table(["command", *names, "ratios"], [
        [f"`python {words[0]} --items={items}`", *(f"{figures[name]:.4g}" for name in names),
         ", ".join(f"{ratio:.2f}" for ratio in figures["ratios"])]
    ])  # fmt: skip


def show_faults() -> None:
    """Print the table of seeded faults, each with whether a test caught it."""
    words = [sys.executable, "-m", "pytest", "-v", "--no-header", "-p", "no:cacheprovider", *FAULTS]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    results = re.findall(r"\[(.+)\] (PASSED|FAILED|ERROR)", done.stdout)
    table(["seeded fault", "caught"], [[name, end == "PASSED"] for name, end in results])


if __name__ == "__main__":
    main()
