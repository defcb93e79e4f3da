"""Acceptance and speed of drafts on a text that the runs have not read.

    python scripts/bench_drafts.py --workdir=runs/large --draft=runs/small
    python scripts/bench_drafts.py --workdir=runs/a --draft=runs/draft --text=held_out.txt

Without --text prompts are of Python's own tests, which the quickstart does not train on.

The engine without a draft, with `lookup`, with the draft run, and with the heads of a run of
`objective.name=mtp` take turns at the same requests: 64 tokens of a file, then new ones, greedy and
sampled. Each draft guesses in all passes (`always`) and where the engine expects that it saves time
(`balanced`). Speed is tokens per second of the processor, since other programs may run, and the
balance measures that time too. `ratio` is the time of a pass with guesses over that of one without,
as the engine measures it.
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
from jaxlm.generate import balance
from jaxlm.generate.draft import Draft, DraftHeads, DraftModel, Lookup
from jaxlm.generate.drafting import Mode
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.requests import Counters, Request
from jaxlm.generate.rows import Sampling
from jaxlm.models.build import Blueprint

PROMPT = 64  # tokens


def prompts(model: jaxlm.LanguageModel, count: int, text: Path | None) -> list[tuple[int, ...]]:
    """Return ids at even distances of a file, or in the middle of Python's largest tests."""
    if text is None:
        folder = Path(sysconfig.get_paths()["stdlib"]) / "test"
        files = sorted(folder.glob("test_*.py"), key=lambda path: -path.stat().st_size)[:count]
        texts = [path.read_text(encoding="utf-8") for path in files]
        texts = [text[len(text) // 2 :][:1000] for text in texts]
    else:
        whole = text.read_text(encoding="utf-8")
        texts = [whole[len(whole) * n // count :][:1000] for n in range(count)]
    rows = [model.tokenizer.encode(text) for text in texts]
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
    parser.add_argument("--text", type=Path, help="file of the prompts (Python's own tests)")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="always,balanced", help="of always, balanced and never")
    parser.add_argument("--compute", help="dtype of products; that of the run by default")
    args = parser.parse_args()
    balance.clock = time.process_time
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
    if heads := large.loaded.model.blueprint.config.heads:
        drafts["heads"] = DraftHeads(len(heads))
    modes: list[Mode] = args.modes.split(",")
    arms: list[tuple[str, Mode]] = [("none", "never")]
    arms += [(name, mode) for name, each in drafts.items() if each for mode in modes]
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
        for engine in engines.values():
            engine.warm_up()
        rows = prompts(large, args.requests, args.text)
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
            texts: dict[Any, list[tuple[int, ...]]] = {}
            speeds: dict[Any, list[float]] = {arm: [] for arm in arms}
            totals = {arm: Counters() for arm in arms}
            for _ in range(args.rounds):
                for arm in arms:
                    engine = engines[arm[0]]
                    if engine.drafting is not None:
                        engine.drafting.mode = arm[1]
                    engine.counters = totals[arm]
                    if not totals[arm].accepted and engine.drafting is not None:
                        totals[arm].accepted = (0,) * engine.drafting.draft.guesses
                    begun = time.process_time()
                    results = engine.complete(requests)
                    seconds = time.process_time() - begun
                    speeds[arm].append(sum(len(each.ids) for each in results) / seconds)
                    texts[arm] = [each.ids for each in results]
            none = arms[0]
            for arm in arms:
                counters, drafting = totals[arm], engines[arm[0]].drafting
                ratios = [a / b for a, b in zip(speeds[arm], speeds[none], strict=True)]
                shares = [round(each / max(counters.drafts, 1), 3) for each in counters.accepted]
                figures = {
                    "temperature": temperature,
                    "draft": arm[0],
                    "mode": arm[1],
                    "tokens_per_second": round(statistics.median(speeds[arm]), 1),
                    "median_over_none": round(statistics.median(ratios), 3),
                    "over_none": [round(each, 3) for each in ratios],
                    "guessed": round(counters.guessed_passes / counters.passes, 3),
                    "tokens_a_pass": round(counters.mean_acceptance_length or 1, 3),
                    "accepted_by_position": shares,
                    "ratio": drafting and round(drafting.balance.ratio, 2),
                    "equal_texts": sum(
                        a == b for a, b in zip(texts[arm], texts[none], strict=True)
                    ),
                }
                print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
