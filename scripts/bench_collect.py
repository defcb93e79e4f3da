"""Tokens per second of `jaxlm collect` against a batch of `jaxlm generate`, by turns.

    python scripts/bench_collect.py [--slots=16] [--turns=5]

The model has random weights, so that nearly all answers have `--max_tokens`. `generate` continues
one batch of `--slots` prompts by a sampler that has compiled. `collect` draws as many answers at a
time to prompts with 8 samples each, scores them by a reward and writes them. Its figure is that of
further prompts: seconds of `--prompts` minus those of an eighth of them, so that the load of
the run and compilation do not count. Seconds are those of the processor, or of the clock with
`--time=wall`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jaxlm
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampler import Sampler
from jaxlm.recipes.collect.run import CollectSettings, collect

SAMPLES = 8
Clock = Callable[[], float]


def make_run(workdir: Path, width: int, length: int) -> None:
    """Train a llama of 4 layers for one step, at a learning rate that changes nothing."""
    text = workdir.parent / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 2_000)
    heads = max(width // 64, 1)
    jaxlm.train(
        {
            "data": {"train": [str(text)], "tokenizer": "bytes", "sequence": length},
            "model": {
                "family": "llama",
                "width": width,
                "depth": 4,
                "heads": heads,
                "kv_heads": heads,
                "hidden": 4 * width,
            },
            "train": {"steps": 1, "batch": 2},
            "optim": {"lr": 1e-9},
            "sample": {"prompts": []},
        },
        workdir=workdir,
    )


def main() -> None:
    """Measure both sides in turns and print their rates and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--time", choices=("cpu", "wall"), default="cpu")
    args = parser.parse_args()
    clock: Clock = time.process_time if args.time == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder / "run", args.width, args.prompt + args.max_tokens + 8)
        texts = [f"{number:04}".ljust(args.prompt, "x") for number in range(args.prompts)]
        files = {"few": texts[: args.prompts // 8], "all": texts}
        for each, part in files.items():
            (folder / f"{each}.txt").write_text("\n".join(part) + "\n")
        model = jaxlm.load(folder / "run")
        batch = [texts[row // SAMPLES % len(texts)] for row in range(args.slots)]
        settings = GenerateConfig(
            prompts=tuple(batch),
            max_tokens=args.max_tokens,
            temperature=1.0,
            seed=tuple(range(args.slots)),
        )
        blueprint = model.loaded.model.blueprint
        sampler = Sampler(settings, blueprint, model.tokenizer, is_scored=True)
        sampler.write(model.params)

        def generated() -> float:
            begun = clock()
            drawn = [each for _ in range(4) for each in sampler.write(model.params)]
            return sum(len(each.ids) for each in drawn) / (clock() - begun)

        def collected(turn: int) -> float:
            seconds, tokens = {}, {}
            for each in files:
                asked = CollectSettings(
                    prompts=(str(folder / f"{each}.txt"),),
                    judge="ended",
                    samples=SAMPLES,
                    slots=args.slots,
                    max_tokens=args.max_tokens,
                )
                out, begun = folder / f"{turn}-{each}", clock()
                collect(folder / "run", out, asked)
                seconds[each] = clock() - begun
                lines = (out / "samples.jsonl").read_text().splitlines()
                tokens[each] = sum(len(json.loads(line)["ids"]) for line in lines)
            return (tokens["all"] - tokens["few"]) / (seconds["all"] - seconds["few"])

        collected(-1)  # compiles
        rates = []
        for turn in range(args.turns):
            rates.append((collected(turn), generated()))
            print(
                f"turn {turn + 1}: collect {rates[-1][0]:,.0f} tokens/s, generate "
                f"{rates[-1][1]:,.0f}",
                flush=True,
            )
    ratios = sorted(one / other for one, other in rates)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    quartiles = f"quartiles {low:.2f} to {high:.2f}"
    print(f"collect over generate: {statistics.median(ratios):.2f} ({quartiles})")


if __name__ == "__main__":
    main()
