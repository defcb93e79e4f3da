"""Cost of watching: a step of a config and its observation, in turns in this process.

    taskset -c 0 python scripts/bench_watch.py --config=configs/quickstart.py --rounds=5

For each choice of `log.layers`: seconds of the step, of observing once, and the share of a run's
time at `log.layers_every`; and the seconds of compiling the second program. Medians; the step's are
taken in turns with the others. Lines of JSON.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

from jaxlm.core import config
from jaxlm.data.batch import Tokens
from jaxlm.parallel import host
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.programs import TrainPrograms, without_data

CHOICES: tuple[tuple[str, ...], ...] = (
    ("norms",),
    ("activations",),
    ("attention",),
    ("noise",),
    ("norms", "activations", "attention", "noise"),
)
VOCAB = 2048  # where the config leaves it to a tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    run: Run = config.load(Run, options.config, []).value
    grid = meshes.build(run.mesh)
    vocab = VOCAB if run.model.vocab == "auto" else run.model.vocab
    with jax.set_mesh(grid):
        plain = without_data(run, grid, vocab)
        state, batch = plain.init_state(), rows(run, plain, vocab)
        step = plain.step.lower(state, batch).compile()
        for choice in CHOICES:
            engine = without_data(run.changed({"log.layers": choice}), grid, vocab)
            begun = time.perf_counter()
            observe = engine.observe.lower(state, batch).compile()
            compiling = time.perf_counter() - begun
            steps, looks = [], []
            for _ in range(options.rounds + 1):  # the first warms up
                looks.append(seconds(observe, state, batch)[0])
                taken, (state, _) = seconds(step, state, batch)
                steps.append(taken)
            one, look = statistics.median(steps[1:]), statistics.median(looks[1:])
            every = run.log.layers_every.steps(run.train.steps, run.tokens_per_step)
            row = {
                "layers": choice,
                "step_seconds": one,
                "observing_seconds": look,
                "every": every,
                "share": look / one / every,
                "compile_seconds": compiling,
            }
            print(json.dumps(row), flush=True)


def rows(run: Run, engine: TrainPrograms, vocab: int) -> Any:
    """A batch of drawn ids."""
    shape = (run.train.batch, run.data.sequence)
    ids = np.random.default_rng(0).integers(0, vocab, shape).astype(np.int32)
    ones = np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    fields: Any = (ids, ids, ones.astype(np.float32), ones, positions)
    return host.put(engine.model.mesh, Tokens(*fields))


def seconds(act: Any, *arguments: Any) -> tuple[float, Any]:
    """Seconds until the result of a call is ready."""
    begun = time.perf_counter()
    out = jax.block_until_ready(act(*arguments))
    return time.perf_counter() - begun, out


if __name__ == "__main__":
    main()
