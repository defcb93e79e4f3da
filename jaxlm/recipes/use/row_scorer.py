"""Scores of texts by a run, one text in each row of a batch of fixed size."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxlm.core.callbacks import Log
from jaxlm.data.batch import Tokens
from jaxlm.parallel import host, rules
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import InitSource

ROWS = 16  # texts that are scored at a time

Score = Callable[[Any, Tokens], jax.Array]  # of a model and a batch, one for each row


class RowScorer:
    """The step of a run, which scores texts that fit in a row of the run.

    Attributes:
      opened: the run with the parameters of the step.
      length: slots of a row.

    Args:
      source: the step.
      `say`: receives log lines.

    Raises:
      DataError, ConfigError: as `load.load_run`.
    """

    def __init__(self, source: InitSource, say: Log):
        self.opened = load.load_run(source.workdir, step=source.step, say=say)
        self.length = self.opened.run.data.sequence
        mesh = self.opened.model.mesh
        ways = rules.split(mesh, "batch")
        self._rows = -(-ROWS // ways) * ways
        self._put = functools.partial(host.put, mesh)

    def compiled(self, score: Score) -> Callable[[Tokens], jax.Array]:
        """Return the compiled function of a batch, with the model of the run."""
        merge, params = self.opened.model.blueprint.merge, self.opened.params
        step = jax.jit(lambda params, batch: score(merge(params), batch))
        return functools.partial(step, params)

    def scores(
        self,
        step: Callable[[Tokens], jax.Array],
        texts: Sequence[Int[np.ndarray, "n"] | None],
        weights: Sequence[Float[np.ndarray, "n"]] | None = None,
    ) -> list[float | None]:
        """Return the score of each text; None if it is None, or longer than a row.

        A batch has the ids of a text but the last as tokens, and all but the first as targets.

        Args:
          step: a function of `compiled`.
          texts: ids.
          weights: weight of each id as a target; 1 without.
        """
        fitting = [n for n, ids in enumerate(texts) if ids is not None and self._fits(ids)]
        scores = dict[int, float]()
        with jax.set_mesh(self.opened.model.mesh):
            for start in range(0, len(fitting), self._rows):
                part = fitting[start : start + self._rows]
                values = step(self._put(self._batch(texts, weights, part)))
                scores |= zip(part, np.asarray(values).tolist(), strict=False)
        return [scores.get(number) for number in range(len(texts))]

    def _fits(self, ids: np.ndarray) -> bool:
        return len(ids) - 1 <= self.length

    def _batch(self, texts: Sequence[Any], weights: Any, numbers: Sequence[int]) -> Tokens:
        shape = (self._rows, self.length)
        tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
        trained = np.zeros(shape, np.float32)
        for row, number in enumerate(numbers):
            text = texts[number]
            here = (row, slice(0, len(text) - 1))
            tokens[here], targets[here] = text[:-1], text[1:]
            segments[here], positions[here] = 1, np.arange(len(text) - 1)
            trained[here] = 1 if weights is None else weights[number][1:]
        # NumPy until it is placed on devices.
        return Tokens(tokens, targets, trained, segments, positions)  # type: ignore[arg-type]
