"""A complete training script in PyTorch, for scripts/bench_runs.py.

It reads a text, numbers its characters, draws rows at random places, trains a minimal GPT-2 or
Llama of scripts/torch_arms.py with fused AdamW, clipping and a warm-up-cosine schedule, and writes
metrics.jsonl.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from bench_sizes import BETAS, CLIP, DECAY, EPS, LR, SIZES
from torch import nn
from torch_arms import Loss, minimal

LOG_EVERY, WARMUP, FLOOR = 10, 0.05, 0.1


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return LR * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return LR * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--mode", choices=("eager", "default", "max-autotune"), required=True)
    args = parser.parse_args()
    size = SIZES[args.size]
    torch.manual_seed(0)
    text = args.text.read_text(encoding="utf-8")
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    ids = np.array([number[character] for character in text], np.uint16)
    draw = np.random.default_rng(0)
    model = Loss(minimal(size)).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    called = model if args.mode == "eager" else torch.compile(model, mode=args.mode)
    args.out.mkdir(parents=True)
    with open(args.out / "metrics.jsonl", "w", encoding="utf-8") as log:
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, args.steps)
            starts = draw.integers(0, len(ids) - size.length, size.rows)
            rows = np.stack([ids[start : start + size.length + 1] for start in starts])
            batch = torch.from_numpy(rows.astype(np.int64))
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bfloat16"):
                loss = called(batch[:, :-1], batch[:, 1:].contiguous())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % LOG_EVERY == 0 or step + 1 == args.steps:
                record = {"step": step + 1, "split": "train", "time_unix": time.time()}
                record |= {"loss_nats": loss.item(), "grad_norm": norm.item()}
                log.write(json.dumps(record) + "\n")
                log.flush()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out / "last.pt"
    )


if __name__ == "__main__":
    main()
