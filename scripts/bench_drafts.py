"""Acceptance and speed of drafts on Python's own tests, which the quickstart does not train on.

    python scripts/bench_drafts.py --workdir=runs/large --draft=runs/small

The engine without a draft, with `lookup` and with the draft run take turns at the same requests:
64 tokens of a file, then new ones, greedy and sampled. Speed is tokens per second of the processor,
since other programs may run. No draft turns itself off here; `ratio` is the time of its pass over
that of a pass without, as the engine measured it at its start.
"""

import argparse
import json
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import jaxlm
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.generate import draft
from jaxlm.generate.draft import Draft, DraftModel, Lookup
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.requests import Counters, Request
from jaxlm.generate.rows import Sampling
from jaxlm.models.build import Blueprint

PROMPT = 64  # tokens


def prompts(model: jaxlm.LanguageModel, count: int) -> list[tuple[int, ...]]:
    """Return the ids in the middle of the largest files of Python's own tests."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "test"
    files = sorted(folder.glob("test_*.py"), key=lambda path: -path.stat().st_size)[:count]
    texts = [path.read_text(encoding="utf-8") for path in files]
    rows = [model.tokenizer.encode(text[len(text) // 2 :][:1000]) for text in texts]
    return [(model.tokenizer.eos, *row[: PROMPT - 1]) for row in rows]


def blueprint(model: jaxlm.LanguageModel, compute: Any) -> Blueprint:
    """Return the model with products in another dtype; None leaves that of its run."""
    trained = model.loaded.model.blueprint
    if compute is None:
        return trained
    return Blueprint(trained.config, Precision.of(PrecisionConfig(compute=compute)).exact)


def main() -> None:
    """Print the figures of each arm as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute", help="dtype of products; that of the run by default")
    args = parser.parse_args()
    draft.WINDOW = 2**60
    large, small = jaxlm.load(args.workdir), jaxlm.load(args.draft)
    compute = args.compute or large.config.precision.compute_dtype
    print(large, small, compute, sep="\n", flush=True)
    if large.tokenizer.digest != small.tokenizer.digest:
        raise SystemExit("the runs have different tokenizers")
    drafts: dict[str, Draft | None] = {
        "none": None,
        "lookup": Lookup(),
        "run": DraftModel(blueprint(small, args.compute), small.params),
    }
    with jax.set_mesh(large.loaded.model.mesh):
        settings = EngineSettings(rows=args.slots, context=PROMPT + args.new)
        engines = {
            name: Engine(
                blueprint(large, args.compute),
                large.params,
                large.tokenizer,
                settings,
                draft=each,
            )
            for name, each in drafts.items()
        }
        rows = prompts(large, args.requests)
        for temperature in (0.0, 0.8):
            requests = [
                Request(
                    ids=ids,
                    max_tokens=args.new,
                    sampling=Sampling(temperature=temperature),
                    seed=seed,
                )
                for seed, ids in enumerate(rows)
            ]
            texts: dict[str, list[tuple[int, ...]]] = {}
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            for engine in engines.values():
                engine.counters = Counters(accepted=(0,) * len(engine.counters.accepted))
            for _ in range(args.rounds):
                for name, engine in engines.items():
                    begun = time.process_time()
                    results = engine.complete(requests)
                    seconds = time.process_time() - begun
                    speeds[name].append(sum(len(each.ids) for each in results) / seconds)
                    texts[name] = [each.ids for each in results]
            for name, engine in engines.items():
                counters = engine.counters
                ratios = [a / b for a, b in zip(speeds[name], speeds["none"], strict=True)]
                shares = [round(each / max(counters.drafts, 1), 3) for each in counters.accepted]
                figures = {
                    "temperature": temperature,
                    "draft": name,
                    "tokens_per_second": round(statistics.median(speeds[name]), 1),
                    "over_none": [round(each, 3) for each in ratios],
                    "tokens_a_pass": round(counters.mean_acceptance_length or 1, 3),
                    "accepted_by_position": shares,
                    "ratio": round(engine._balance.ratio, 2),
                    "equal_texts": sum(
                        a == b for a, b in zip(texts[name], texts["none"], strict=True)
                    ),
                }
                print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
