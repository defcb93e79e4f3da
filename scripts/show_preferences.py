"""Losses of preferences, a reward model and best-of-n on sums, whose truth is known.

    python scripts/show_preferences.py --out=runs/preferences [--seeds=3]

A model of 0.1M parameters learns sums by imitation, which ends early. Pairs are the right sum and
one that a rule breaks: a digit is replaced. Each loss trains on them from the same start, and its
answers to sums that no stage trains on are compared: exact match (greedy and sampled), tokens of a
sampled answer, and KL(run, start) in nats, estimated from the samples. A reward model trains on
pairs, a known share of them swapped, so the ceiling of its accuracy on such pairs is known.
Best-of-n chooses the answer of the highest score among n samples of the start: the exact match of
the chosen ones is compared with the score, and with the best that n samples allow.
"""

import argparse
import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import jaxlm
from jaxlm.cli.main import main as command
from jaxlm.data import conversations
from jaxlm.recipes.use.reward_model import RewardModel

HELD_OUT = 500
PAIRS, SWAPPED = 2000, 0.2
MOST = 16  # samples of best-of-n
LOSSES = {
    "dpo": ["loss=dpo"],
    "dpo, nll": ["loss=dpo", "nll=1.0"],
    "ipo": ["loss=ipo"],
    "hinge": ["loss=hinge"],
    "kto": ["loss=kto"],
    "orpo": ["loss=orpo"],
    "simpo": ["loss=simpo", "beta=2.0"],
}
CONFIG = """\
from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "completion"
    c.data.tokenizer = "bytes"
    c.data.sequence = 32
    c.model.depth = 2
    c.model.width = 64
    c.model.heads = c.model.kv_heads = 4
    c.model.hidden = 256
    c.model.tied = True
    c.model.dropout = 0.0
    c.optim.lr = 3e-3
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "5%"
    c.train.steps = 400
    c.train.batch = 32
    c.log.every = "10%"
    c.eval.every = c.checkpoint.every = "100%"
    c.sample.prompts = ()
    return c
"""


def main() -> None:
    """Train with each seed, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/preferences"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for seed in range(args.seeds):
        print(json.dumps({"seed": seed} | show(args.out / f"seed{seed}", seed)), flush=True)


def show(folder: Path, seed: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    begun = time.process_time()
    held_out = write_data(folder, seed)
    start = train(folder, "start", seed)
    base = jaxlm.load(start)
    results: dict[str, Any] = {"start": compare(start, base, held_out)}
    print("start", results["start"], file=sys.stderr, flush=True)
    for name, settings in LOSSES.items():
        kind = "labeled" if "loss=kto" in settings else "pairs"
        flags = [f"--config.objective.{each}" for each in settings]
        run = tune(folder, name.replace(", ", "_"), kind, seed, *flags)
        results[name] = compare(run, base, held_out)
        print(name, results[name], file=sys.stderr, flush=True)
    reward = tune(folder, "reward", "swapped", seed)
    results["reward"] = judge(reward, base, held_out, seed)
    return results | {"processor_seconds": round(time.process_time() - begun)}


def write_data(folder: Path, seed: int) -> list[tuple[str, str]]:
    """Write completions, pairs and labels; return prompts and sums that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.py").write_text(CONFIG)
    draw = random.Random(seed)
    sums = [(f"{a:02}+{b:02}=", f"{a + b:03}") for a in range(100) for b in range(100)]
    sums.sort(key=lambda each: hashlib.sha256(each[0].encode()).hexdigest())
    held_out, known = sums[:HELD_OUT], sums[HELD_OUT:]
    draw.shuffle(known)
    write(folder / "start.jsonl", [{"prompt": p, "completion": s} for p, s in known[:4000]])
    chosen = [(prompt, right, broken(right, draw)) for prompt, right in known[4000 : 4000 + PAIRS]]
    pairs = [{"prompt": p, "chosen": s, "rejected": w} for p, s, w in chosen]
    write(folder / "pairs.jsonl", pairs)
    labels = [
        {"prompt": each["prompt"], "completion": each[side], "label": side == "chosen"}
        for each in pairs
        for side in ("chosen", "rejected")
    ]
    write(folder / "labeled.jsonl", labels)
    write(folder / "swapped.jsonl", [swapped(each, draw) for each in pairs])
    return held_out


def broken(right: str, draw: random.Random) -> str:
    """Return a sum with one digit replaced."""
    place = draw.randrange(3)
    digit = draw.choice([each for each in "0123456789" if each != right[place]])
    return right[:place] + digit + right[place + 1 :]


def swapped(pair: dict[str, str], draw: random.Random) -> dict[str, str]:
    """Return the pair, with both answers swapped in a share of the draws."""
    if draw.random() >= SWAPPED:
        return pair
    return pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}


def write(file: Path, records: list[dict]) -> None:
    """Write JSON lines."""
    file.write_text("".join(f"{json.dumps(each)}\n" for each in records))


def train(folder: Path, name: str, seed: int, *flags: str) -> Path:
    """Train a run, and return its folder."""
    words = [f"--config={folder}/config.py", f"--workdir={folder}/{name}", f"--config.seed={seed}"]
    if not any("data.train" in each for each in flags):
        flags = (*flags, f"--config.data.train={folder}/start.jsonl")
    code = command(["train", *words, *flags, "--json"])
    assert code == 0, name
    return folder / name


def tune(folder: Path, name: str, data: str, seed: int, *flags: str) -> Path:
    """Train from the start on pairs or labels, and return the folder."""
    kind = "labeled" if data == "labeled" else "pairs"
    more = {"steps": 100, "batch": 32}
    words = [f"--config.train.{key}={value}" for key, value in more.items()]
    words += [f"--config.data.kind={kind}", f"--config.data.train={folder}/{data}.jsonl"]
    is_reward = name == "reward"
    objective, rate = ("reward", 1e-3) if is_reward else ("preference", 3e-4)
    words += [f"--config.objective.name={objective}", f"--init_from={folder}/start"]
    return train(folder, name, seed, *words, f"--config.optim.lr={rate}", *flags)


def compare(run: Path, base: Any, held_out: list[tuple[str, str]]) -> dict[str, float]:
    """Return exact match, tokens and KL of a run's answers to the held-out sums."""
    model, prompts = jaxlm.load(run), [prompt for prompt, _ in held_out]
    figures = {}
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        drawn = model.generate(
            prompts, max_tokens=8, temperature=temperature, seed=list(range(HELD_OUT))
        )
        right = [each.text == s for each, (_, s) in zip(drawn, held_out, strict=True)]
        figures[kind] = float(np.mean(right))
    figures["tokens"] = float(np.mean([len(each.ids) for each in drawn]))
    ratios = log_p(model, prompts, drawn) - log_p(base, prompts, drawn)
    figures["kl_nats"] = float(np.mean(ratios))
    return {name: round(value, 4) for name, value in figures.items()}


def log_p(model: Any, prompts: list[str], drawn: list[Any]) -> np.ndarray:
    """Return the log-probability of each drawn answer."""
    ids, weights = np.zeros((2, len(drawn), 24), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, drawn, strict=True)):
        before = [*model.tokenizer.before, *model.tokenizer.encode(prompt)]
        text = [*before, *answer.ids]
        ids[row, : len(text)] = text
        weights[row, len(before) - 1 : len(text) - 1] = 1
    read = model.model
    logits = jax.nn.log_softmax(read(jnp.asarray(ids)).astype(jnp.float32))
    chosen = jnp.take_along_axis(logits[:, :-1], ids[:, 1:, None], axis=2)[..., 0]
    return np.asarray((chosen * weights[:, :-1]).sum(1))


def judge(run: Path, base: Any, held_out: list[tuple[str, str]], seed: int) -> dict[str, Any]:
    """Return accuracies of a reward model, and best-of-n by its scores and by the truth."""
    model, draw = RewardModel(str(run), "--judge"), random.Random(seed + 1)

    def scores(prompts: list[str], texts: list[str]) -> np.ndarray:
        records = [
            {"prompt": p, "completion": t or " "} for p, t in zip(prompts, texts, strict=True)
        ]
        parsed = [conversations.parse(each, "completion", ("assistant",)) for each in records]
        return np.array(model.scores(parsed), np.float64)

    prompts = [prompt for prompt, _ in held_out]
    right = [text for _, text in held_out]
    gaps = scores(prompts, right) - scores(prompts, [broken(each, draw) for each in right])
    is_swapped = np.array([draw.random() < SWAPPED for _ in gaps])
    figures: dict[str, Any] = {
        "accuracy": float(np.mean(gaps > 0)),
        "accuracy_of_noisy_pairs": float(np.mean((gaps > 0) != is_swapped)),
        "ceiling_of_noisy_pairs": float(1 - is_swapped.mean()),
    }
    asked = [prompt for prompt in prompts for _ in range(MOST)]
    drawn = base.generate(asked, max_tokens=8, temperature=1.0, seed=list(range(len(asked))))
    texts = [each.text for each in drawn]
    values = scores(asked, texts).reshape(-1, MOST)
    truth = np.array([t == s for t, s in zip(texts, np.repeat(right, MOST), strict=True)])
    truth = truth.reshape(-1, MOST)
    for n in (1, 2, 4, 8, 16):
        best = values[:, :n].argmax(1)[:, None]
        figures[f"best_of_{n}"] = {
            "score": round(float(np.take_along_axis(values, best, 1).mean()), 3),
            "right": float(np.take_along_axis(truth, best, 1).mean()),
            "possible": float(truth[:, :n].any(1).mean()),
        }
    return figures


if __name__ == "__main__":
    main()
