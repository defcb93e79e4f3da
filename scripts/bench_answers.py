"""Answers of a task by the engine and in passes of the sampler, by turns.

    python scripts/bench_answers.py RUN TASK.toml [--shots=5] [--limit=96] [--turns=2]

Prints seconds of the processor and of the clock of each turn, and medians of the ratios: passes
over the engine, and over the engine that keeps beginnings of prompts. The first turn compiles and
does not count. `equal` is the number of items whose answers have the ids of those of the passes.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from jaxlm.evals.tasks import answers
from jaxlm.generate import continuer
from jaxlm.generate.engine import is_supported
from jaxlm.models.build import Blueprint
from jaxlm.recipes.use import load, tasks

WAYS = {"passes": (False, 0), "engine": (True, 0), "kept": (True, continuer.PREFIX_BYTES)}


def refused(_: Blueprint) -> bool:
    """Return False, as of a model that the engine does not support."""
    return False


def main() -> None:
    """Write the answers of each way in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("task")
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    opened = load.load_run(args.run, sequence=args.sequence)
    blueprint = opened.model.blueprint
    (task,) = tasks.read_tasks([args.task])
    prepared = tasks.PreparedTask(
        task,
        tasks.TaskSettings(shots=args.shots, limit=args.limit),
        tasks.Tokenizers(opened.tokenizer),
        tasks.ModelRows(args.sequence, opened.model.mesh, blueprint.config),
    )
    asked = prepared.prompter.questions(list(prepared.scored_items()))
    prompts = [each.requests[0] for each in asked]
    names = [each.item.id for each in asked]
    lengths = sorted(len(each.ids) for each in prompts)
    print(f"{len(prompts)} prompts, median {statistics.median(lengths)}, longest {lengths[-1]}")
    writers: dict[str, answers.Writer] = {}
    for name, (_, continuer.PREFIX_BYTES) in WAYS.items():
        writer = prepared.writer(blueprint)
        assert writer is not None
        writers[name] = writer
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    ids: dict[str, list[list[list[int]]]] = {}
    with jax.set_mesh(opened.model.mesh):
        for turn in range(1 + args.turns):
            for name, (is_engine, _) in WAYS.items():
                used, begun = time.process_time(), time.perf_counter()
                support = is_supported if is_engine else refused
                with mock.patch.object(continuer, "is_supported", support):
                    texts = writers[name].write(opened.params, prompts, names)
                taken = time.process_time() - used, time.perf_counter() - begun
                ids[name] = [[each.ids for each in drawn] for drawn in texts]
                equal = sum(a == b for a, b in zip(ids[name], ids["passes"], strict=True))
                print(f"{turn} {name}: {taken[0]:.1f} s, clock {taken[1]:.1f} s, {equal} equal")
                if turn:
                    seconds[name].append(taken)
    new = sorted(len(each) for drawn in ids["passes"] for each in drawn)
    quartiles, mean = statistics.quantiles(new, n=4), statistics.mean(new)
    print(f"{len(new)} answers, quartiles {quartiles}, mean {mean:.0f}")
    for name in list(WAYS)[1:]:
        pairs = [
            zip(*each, strict=True) for each in zip(seconds["passes"], seconds[name], strict=True)
        ]
        ratios = [[a / b for a, b in each] for each in pairs]
        used, clock = (statistics.median(each) for each in zip(*ratios, strict=True))
        print(f"passes over {name}: {used:.2f}, clock {clock:.2f}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
