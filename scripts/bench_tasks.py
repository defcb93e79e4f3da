"""Processor seconds of choices with five examples, against lm-eval with transformers, on CPU.

    python scripts/bench_tasks.py --peer=/path/to/python

A GPT-2 of 124M parameters with random weights, float32. Both sides score the same file and take
turns; `--peer` is a Python with torch, transformers and lm-eval. Examples are in the items, so that
both read the same ids: the log-likelihoods of all choices and the picks are compared as well.
Models are loaded before they are timed. jaxlm's time includes tracing and, with
JAX_COMPILATION_CACHE_DIR, loading its program. lm-eval has its fastest of several batch sizes. Both
run on one core.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAME = "bench"
TASK = """\
task: bench
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ context }}"
doc_to_choice: "{{ choices }}"
doc_to_target: "{{ answer }}"
"""
EXAMPLES, CHOICES = 5, 4


def lines_of_library() -> list[str]:
    """Return lines of English text of the standard library: its comments and documentation."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / name).read_text() for name in ("argparse.py", "typing.py", "ast.py"))
    lines = (line.strip(" #") for line in text.splitlines())
    return [line for line in lines if len(line.split()) > 6 and line.isascii()]


def written(file: Path, items: int) -> None:
    """Write items of four choices whose contexts have five solved examples."""
    lines, draw = lines_of_library(), random.Random(0)

    def asked(line: str) -> tuple[str, str]:
        words = line.split()
        return f"Question: which words come after {' '.join(words[:-3])}\nAnswer:", " ".join(
            words[-3:]
        )

    with open(file, "w") as out:
        for _ in range(items):
            chosen = draw.sample(lines, EXAMPLES + CHOICES)
            solved = [" ".join(asked(line)) for line in chosen[:EXAMPLES]]
            question, right = asked(chosen[EXAMPLES])
            choices = [right, *(" ".join(line.split()[:5]) for line in chosen[EXAMPLES + 1 :])]
            record = {"context": "\n\n".join([*solved, question]), "choices": choices, "answer": 0}
            out.write(json.dumps(record) + "\n")


def peer(folder: Path) -> None:
    """Make the model; then score the task for each batch size on standard input. Run by --peer."""
    import tokenizers
    import torch
    import transformers
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model_folder = folder / "model"
    if not model_folder.exists():
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        )
        bpe.train_from_iterator(lines_of_library(), trainer)
        end = "<|endoftext|>"
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bpe, eos_token=end, bos_token=end
        )
        fast.save_pretrained(model_folder)
        torch.manual_seed(0)
        config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0)
        transformers.GPT2LMHeadModel(config).save_pretrained(model_folder)
    models: dict[str, HFLM] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        size = line.strip()
        if size not in models:
            models[size] = HFLM(
                str(model_folder), device="cpu", dtype="float32", batch_size=int(size)
            )
        begin = time.process_time()
        answer = simple_evaluate(
            models[size],
            tasks=[NAME],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            num_fewshot=0,
            bootstrap_iters=0,
        )
        seconds = time.process_time() - begin
        samples = sorted(answer["samples"][NAME], key=lambda each: each["doc_id"])
        nats = [[-float(choice[0][0]) for choice in each["resps"]] for each in samples]
        print(json.dumps({"seconds": seconds, "nats": nats}), flush=True)


def ours(folder: Path) -> Callable[[], dict[str, Any]]:
    """Return a function that scores the task from the beginning; the model is loaded once."""
    from jaxlm.cli.main import main as command
    from jaxlm.recipes.use import load, tasks
    from jaxlm.recipes.use.evaluate import checked_length

    run = folder / "run"
    words = ["import", f"--from={folder / 'model'}", f"--workdir={run}", "--quiet"]
    words += ["--config.precision.compute=float32", "--config.precision.params=float32"]
    if command(words):
        sys.exit("the model was not imported")
    opened = load.load_run(run)
    length = checked_length(opened, None)
    tokenizers = tasks.Tokenizers(opened.tokenizer)
    rows = tasks.ModelRows(length, opened.model.mesh, opened.model.blueprint.config)

    def score() -> dict[str, Any]:
        shutil.rmtree(run / "evals", ignore_errors=True)
        begin = time.process_time()
        task = tasks.read_tasks([str(folder / "bench.yaml")])[0]
        prepared = tasks.PreparedTask(task, tasks.TaskSettings(), tokenizers, rows)
        (result,) = tasks.score_tasks(opened, [prepared], run, lambda _: None).values()
        seconds = time.process_time() - begin
        samples = Path(result["folder"], "samples.jsonl").read_text().splitlines()
        return {"seconds": seconds, "nats": [json.loads(line)["nats"] for line in samples]}

    return score


def compared(ours_: Sequence[list[float]], theirs: Sequence[list[float]]) -> dict[str, Any]:
    """Return the largest difference of a log-likelihood, and the number of other picks."""
    pairs = list(zip(ours_, theirs, strict=True))
    differences = [abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)]
    picks = sum(x.index(min(x)) != y.index(min(y)) for x, y in pairs)
    return {"largest_difference_nats": max(differences), "other_picks": picks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="Python with torch, transformers, lm-eval")
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batches", default="1,8,32", help="batch sizes of lm-eval")
    parser.add_argument("--as_peer", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        peer(Path(args.as_peer))
        return
    sys.path.insert(0, str(ROOT))
    os.environ["JAX_PLATFORMS"] = "cpu"
    # One core for both: waiting threads of a busy machine would count as processor time.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder / "items.jsonl", args.items)
        task = TASK.replace("ITEMS", str(folder / "items.jsonl"))
        (folder / "bench.yaml").write_text(task)
        process = subprocess.Popen(
            [args.peer, __file__, "--peer=-", f"--as_peer={folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def answered() -> str:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(("ready", "{")):
                    return line
            sys.exit("the peer ended")

        def theirs(size: str) -> dict[str, Any]:
            assert process.stdin is not None
            process.stdin.write(size + "\n")
            process.stdin.flush()
            return dict(json.loads(answered()))

        answered()
        score = ours(folder)
        score()  # compiles
        first = {size: theirs(size) for size in args.batches.split(",")}
        best = min(first, key=lambda size: first[size]["seconds"])
        turns = [(score(), theirs(best)) for _ in range(args.turns)]
        process.stdin.close()
        process.wait()
    ratios = [b["seconds"] / a["seconds"] for a, b in turns]
    result = {
        "items": args.items,
        "jaxlm_seconds": statistics.median(a["seconds"] for a, _ in turns),
        "lm_eval_seconds": statistics.median(b["seconds"] for _, b in turns),
        "lm_eval_batch": int(best),
        "lm_eval_seconds_by_batch": {size: first[size]["seconds"] for size in first},
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        **compared(turns[-1][0]["nats"], turns[-1][1]["nats"]),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
