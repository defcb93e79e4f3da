"""Whole fine-tuning runs of jaxlm and TRL on the same conversations, in turns on one core.

    taskset -c 0 python scripts/bench_sft_runs.py --python=PEFTENV/bin/python \
      --file=gsm8k_train.jsonl --out=runs/sft_runs

--python names an interpreter with torch, transformers and trl. The file has lines of `question` and
`answer`. Each side reads the same prompts and completions, begins with the same folder of
transformers (a Llama of 0.8M parameters with a tokenizer trained on the file), and trains in
float32 with AdamW, clipping and the loss of the completion alone. Both log every ten steps, without
evaluations or checkpoints in the measured steps.

- `jaxlm` runs configs/finetune/sft.py: whole conversations packed into rows.
- `trl` runs SFTTrainer as it comes: a row for each conversation, padded to the longest of a batch.
- `trl packed` runs SFTTrainer with packing. Without FlashAttention, which needs a GPU, its
  conversations see each other in a row.

The figure is tokens of conversations per second, without padding, from the end of step WARM to the
end of the run. Batches have about as many such tokens on all sides. With `--time=cpu` (the default)
a second is one of the processor, so that other work on the machine does not count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIDES = ("jaxlm", "trl", "trl packed")
WARM, EVERY = 20, 10  # steps
LENGTH = 512
ROWS = {"jaxlm": 6, "trl": 16, "trl packed": 6}  # about 16 conversations each
VOCAB = 4_000
MODEL = {
    "family": "llama",
    "depth": 4,
    "width": 128,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 352,
    "tied": True,
}


def prepare(file: Path, out: Path, count: int) -> None:
    """Write prompts and completions, and a folder of transformers with a model and tokenizer."""
    import jaxlm

    out.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:count]]
    rows = [
        {
            "prompt": [{"role": "user", "content": line["question"]}],
            "completion": [{"role": "assistant", "content": line["answer"]}],
        }
        for line in lines
    ]
    (out / "chat.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    jaxlm.train(
        {
            "data": {
                "kind": "completion",
                "train": [str(out / "chat.jsonl")],
                "sequence": LENGTH,
                "tokenizer": f"bpe:{VOCAB}",
            },
            "model": MODEL,
            "train": {"steps": 1, "batch": 2},
            "eval": {"batches": 1},
            "sample": {"prompts": ()},
        },
        workdir=out / "start",
    )
    jaxlm.load(out / "start").export(out / "folder")


def run_jaxlm(out: Path, steps: int) -> dict[str, Any]:
    """Train with jaxlm and return the tokens and seconds of the measured steps."""
    import tempfile

    import jaxlm

    marks: list[tuple[int, int, float, float]] = []

    class Clock(jaxlm.Callback):
        def on_log(self, event: Any) -> None:
            read = int((event.batch.segments > 0).sum())  # trained on or not
            marks.append((event.step, read, time.process_time(), time.perf_counter()))

    with tempfile.TemporaryDirectory() as workdir:
        jaxlm.train(
            {
                "data": {
                    "kind": "completion",
                    "train": [str(out / "chat.jsonl")],
                    "sequence": LENGTH,
                    "packing": "first_fit",
                },
                "optim": {"lr": 2e-5, "weight_decay": 0.0},
                "train": {"steps": steps, "batch": ROWS["jaxlm"]},
                "eval": {"every": 10 * steps, "batches": 1},
                "checkpoint": {"every": 10 * steps},
                "log": {"every": EVERY},
                "sample": {"prompts": ()},
                "precision": {"compute": "float32"},
            },
            init_from=str(out / "folder"),
            workdir=Path(workdir, "run"),
            callbacks=[Clock()],
        )
    first = next(mark for mark in marks if mark[0] >= WARM)
    last = marks[-1]
    steps = last[0] - first[0]
    return {
        "tokens": steps * statistics.mean(mark[1] for mark in marks if mark[0] > WARM),
        "cpu": last[2] - first[2],
        "wall": last[3] - first[3],
        "steps": steps,
    }


def run_trl(out: Path, steps: int, is_packed: bool) -> dict[str, Any]:
    """Train with TRL and return the tokens and seconds of the measured steps."""
    import tempfile

    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(1)
    marks: list[tuple[int, float, float]] = []
    lengths: list[int] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append((state.global_step, time.process_time(), time.perf_counter()))

    class Counting:
        def __init__(self, collate: Any):
            self._collate = collate

        def __call__(self, rows: list[dict[str, Any]]) -> Any:
            lengths.append(sum(len(row["input_ids"]) for row in rows))
            return self._collate(rows)

    rows = [json.loads(line) for line in (out / "chat.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.SFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS["trl packed" if is_packed else "trl"],
            packing=is_packed,
            max_length=LENGTH,
            learning_rate=2e-5,
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            logging_steps=EVERY,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_num_workers=0,
        )
        trainer = trl.SFTTrainer(
            str(out / "folder"),
            settings,
            train_dataset=datasets.Dataset.from_list(rows),
            callbacks=[Clock()],
        )
        trainer.data_collator = Counting(trainer.data_collator)
        trainer.train()
    first, last = marks[WARM - 1], marks[-1]
    return {
        "tokens": sum(lengths[WARM : last[0]]),
        "cpu": last[1] - first[1],
        "wall": last[2] - first[2],
        "steps": last[0] - first[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter with trl")
    parser.add_argument("--file", type=Path, help="lines of question and answer")
    parser.add_argument("--out", type=Path, required=True, help="folder for data and model")
    parser.add_argument("--conversations", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        if args.side == "jaxlm":
            measured = run_jaxlm(args.out, args.steps)
        else:
            measured = run_trl(args.out, args.steps, args.side == "trl packed")
        print("\n" + json.dumps(measured))
        return 0
    if not (args.out / "folder").exists():
        if not args.file:
            parser.error("--file is needed to make the data and the model")
        prepare(args.file, args.out, args.conversations)
    speeds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(args.rounds):
        for side in SIDES:
            python = sys.executable if side == "jaxlm" else args.python
            command = [python, __file__, f"--side={side}", f"--out={args.out}"]
            done = subprocess.run(
                [*command, f"--steps={args.steps}"], stdout=subprocess.PIPE, text=True, check=True
            )
            measured = json.loads(done.stdout.splitlines()[-1])
            speeds[side].append(measured["tokens"] / measured[args.time])
            print(
                f"round {turn + 1}: {side}: {speeds[side][-1]:,.0f} tokens/s, "
                f"{measured['tokens'] / measured['steps']:,.0f} tokens a step",
                flush=True,
            )
    for side in SIDES:
        ratios = [a / b for a, b in zip(speeds["jaxlm"], speeds[side], strict=True)]
        print(
            f"{side}: {statistics.median(speeds[side]):,.0f} tokens/s "
            f"({min(speeds[side]):,.0f} to {max(speeds[side]):,.0f}); "
            f"jaxlm is {statistics.median(ratios):.2f} times as fast"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
