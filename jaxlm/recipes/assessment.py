"""How well a run does, seen between its steps: on its validation sets, and in samples."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxlm.optim.average_config import NoAverage, start
from jaxlm.recipes import reading
from jaxlm.recipes.engine import Engine
from jaxlm.recipes.journal import Journal
from jaxlm.recipes.sample import Sampler
from jaxlm.train.state import TrainState


class Assessment:
    """The evaluations and samples of a run, which the journal gets.

    `followed` is the validation set whose loss ranks checkpoints, None where there is none; `has_samples` says whether the
    run samples at all.

    Raises:
      ConfigError: where the run follows a set that there is not, or prompts do not fit the model's positions.
    """

    def __init__(self, engine: Engine, journal: Journal):
        run = engine.run
        self._engine, self._journal = engine, journal
        self.followed = reading.followed(run, engine.data.validation)
        self.has_samples = bool(run.sample.prompts) and run.objective.prompts != "none"
        self._sampler = Sampler(
            dataclasses.replace(run.sample.request, seed=(run.seed,)),
            engine.model.blueprint,
            engine.data.tokenizer,
            both_ways=run.objective.prompts == "both ways",
        )

    def evaluate(
        self,
        state: TrainState,
        step: int,
        judge: Callable[[int, float], dict[str, Any]] = lambda step, loss: {},
    ) -> tuple[dict[str, Any], float]:
        """The figures of the set that is followed, and the loss that ranks this step among the others.

        Those of every set are written down, and those of the average as NAME.ema or NAME.swa. They are of whole sets at the
        beginning and at the end of the run, else of as much as `eval.batches` says. What ranks is always of as much.
        `judge` returns what the record of the followed set says beside, from the step and its loss.
        """
        run = self._engine.run
        every = None if run.eval.batches == "all" else run.eval.batches
        limit = None if step in (0, run.train.steps) else every
        results = ranked = self._engine.evaluate(state.params, limit=limit)
        if limit != every and step:
            ranked = self._engine.evaluate(state.params, limit=every)
        kept = run.average
        if not isinstance(kept, NoAverage) and step >= start(kept, run.train.steps, run.pace):
            of_average = self._engine.evaluate(self._engine.averaged(state), limit=limit)
            results |= {f"{name}.{kept.name}": each for name, each in of_average.items()}
        assert self.followed is not None  # else no evaluation is due
        for name, record in results.items():
            mark = judge(step, record["loss_nats"]) if name == self.followed else {}
            self._journal.write(step, name, record | mark)
        return results[self.followed] | {"step": step}, ranked[self.followed]["loss_nats"]

    def sample(self, state: TrainState, step: int) -> None:
        """Writes down what follows each prompt."""
        self._journal.note_samples(step, self._sampler.write(state.params))
