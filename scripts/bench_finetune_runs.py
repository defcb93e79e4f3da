"""Whole fine-tuning and preference runs of jaxlm and TRL on the same data, in turns on one core.

    taskset -c 0 python scripts/bench_finetune_runs.py --python=PEFTENV/bin/python \
      --task=sft --file=gsm8k_train.jsonl --out=runs/finetune_runs

--python names an interpreter with torch, transformers and trl. The file has lines of `question` and
`answer`. Each side reads the same conversations, begins with the same folder of transformers (a
Llama of 0.8M parameters with a tokenizer trained on the file), and trains in float32 with AdamW,
clipping and the loss of answers alone. All log every ten steps, without evaluations or checkpoints
in the measured steps.

`--task=sft`:

- `jaxlm` packs whole conversations into rows.
- `trl` runs SFTTrainer as it comes: a row for each conversation, padded to the longest of a batch.
- `trl packed` runs SFTTrainer with packing. Without FlashAttention, which needs a GPU, its
  conversations see each other in a row.

`--task=dpo`, on pairs of an answer and that of another question, so of uneven lengths. References
are scored before the measured steps:

- `jaxlm` packs whole pairs into rows.
- `jaxlm sft` trains on the same conversations without the comparison, in rows of the same size.
- `trl` runs DPOTrainer with `precompute_ref_log_probs`.

The figure is tokens of conversations per second, without padding, from the end of step WARM to the
end of the run. Batches have about as many such tokens on all sides, and a pair has as many on each.
With `--time=cpu` (the default) a second is one of the processor, so that other work on the machine
does not count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIDES = {"sft": ("jaxlm", "trl", "trl packed"), "dpo": ("jaxlm", "jaxlm sft", "trl")}
WARM, EVERY = 20, 10  # steps
LENGTH = {"sft": 512, "dpo": 1024}
ROWS = {  # about 16 conversations each
    "sft": {"jaxlm": 6, "trl": 16, "trl packed": 6},
    "dpo": {"jaxlm": 3, "jaxlm sft": 3, "trl": 8},
}
KINDS = {"jaxlm": "pairs", "jaxlm sft": "completion"}  # of the sides of dpo
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
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    answers = [
        {"prompt": pair["prompt"], "completion": pair[side]}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    for name, records in (("chat", rows), ("pairs", pairs), ("answers", answers)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (out / f"{name}.jsonl").write_text(text)
    jaxlm.train(
        {
            "data": {
                "kind": "completion",
                "train": [str(out / "chat.jsonl")],
                "sequence": LENGTH["sft"],
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


def run_jaxlm(out: Path, task: str, side: str, steps: int) -> dict[str, Any]:
    """Train with jaxlm and return the tokens and seconds of the measured steps."""
    import tempfile

    import jaxlm

    marks: list[tuple[int, int, float, float]] = []

    class Clock(jaxlm.Callback):
        def on_log(self, event: Any) -> None:
            read = int((event.batch.segments > 0).sum())  # trained on or not
            marks.append((event.step, read, time.process_time(), time.perf_counter()))

    kind = "completion" if task == "sft" else KINDS[side]
    name = "chat" if task == "sft" else {"pairs": "pairs", "completion": "answers"}[kind]
    objective = "preference" if kind == "pairs" else "causal"
    with tempfile.TemporaryDirectory() as workdir:
        jaxlm.train(
            {
                "data": {
                    "kind": kind,
                    "train": [str(out / f"{name}.jsonl")],
                    "sequence": LENGTH[task],
                    "packing": "first_fit",
                },
                "objective": {"name": objective},
                "optim": {"lr": 2e-5, "weight_decay": 0.0},
                "train": {"steps": steps, "batch": ROWS[task][side]},
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


def run_trl(out: Path, task: str, side: str, steps: int) -> dict[str, Any]:
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
            batch = self._collate(rows)
            mask = batch.get("attention_mask")  # packed rows have none, and no padding
            lengths.append(int(batch["input_ids"].numel() if mask is None else mask.sum()))
            return batch

    name = "chat" if task == "sft" else "pairs"
    rows = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
    configs: dict[str, Any] = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}
    trainers: dict[str, Any] = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}
    more = {"sft": {"packing": side == "trl packed"}, "dpo": {"precompute_ref_log_probs": True}}
    with tempfile.TemporaryDirectory() as folder:
        settings = configs[task](
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS[task][side],
            max_length=LENGTH[task],
            **more[task],
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
        trainer = trainers[task](
            str(out / "folder"),
            args=settings,
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
    parser.add_argument("--task", choices=SIDES, default="sft")
    parser.add_argument("--file", type=Path, help="lines of question and answer")
    parser.add_argument("--out", type=Path, required=True, help="folder for data and model")
    parser.add_argument("--conversations", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure = run_jaxlm if args.side.startswith("jaxlm") else run_trl
        measured = measure(args.out, args.task, args.side, args.steps)
        print("\n" + json.dumps(measured))
        return 0
    if not (args.out / "folder").exists():
        if not args.file:
            parser.error("--file is needed to make the data and the model")
        prepare(args.file, args.out, args.conversations)
    sides = SIDES[args.task]
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(args.rounds):
        for side in sides:
            python = sys.executable if side.startswith("jaxlm") else args.python
            command = [
                python,
                __file__,
                f"--side={side}",
                f"--out={args.out}",
                f"--task={args.task}",
            ]
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
    for side in sides:
        ratios = [a / b for a, b in zip(speeds["jaxlm"], speeds[side], strict=True)]
        print(
            f"{side}: {statistics.median(speeds[side]):,.0f} tokens/s "
            f"({min(speeds[side]):,.0f} to {max(speeds[side]):,.0f}); "
            f"jaxlm is {statistics.median(ratios):.2f} times as fast"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
