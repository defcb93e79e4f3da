"""Detection of a diverged run: its loss is above that of coders that need no model.

Example:
  >>> judge = Divergence(steps=1000, uniform=5.5, unigram=lambda: 4.5, first=5.6)
  >>> judge.evaluated(600, 4.0), judge.evaluated(700, 5.0), judge.evaluated(800, 6.0)
  (None, 'unigram', 'uniform')
"""

import collections
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal

Coder = Literal["uniform", "unigram"]

MARGIN = 0.05  # above the uniform coder and the first loss: a model may begin a little above ln V
LEARNED_MARGIN = 0.02  # above a coder that a trained model must beat: the noise of an evaluation
WARM_UP = 0.1  # share of the steps in which a rising loss may still turn
LEARNED = 0.5  # share of the steps after which a model must beat both coders
MIN_STEPS = 100  # of a run whose model must beat them
MAX_WINDOW, MIN_WINDOW = 16, 4  # training losses whose median is judged


class Divergence:
    """Judge of the losses of a run, in nats per token, against coders without a model.

    The uniform coder spends ln V nats on each of V ids. The unigram coder uses the frequencies of
    the ids in the training text, and is not defined for every objective. A loss is worse than

    - uniform: if it is 5% above both ln V and the first loss of the run, after 10% of the steps, or
      at once if the loss has been below ln V; an evaluation, if it is so above the one at step 0
      too, as the text of the set may be harder than that of the first step;
    - uniform: if it is 2% above ln V after 50% of the steps, in a run of at least 100;
    - unigram: if it is 2% above that coder after 50% of the steps, in a run of at least 100, or at
      once if the loss has been below it. Only evaluations are compared with it.

    An alarm ends when the loss is below the coder's again, without a margin.

    A training loss is the median of the last 4 to 16 steps (5% of the run), so that single batches
    do not count. So an untrained model, the first steps, short trials, and a fine-tuning run that
    begins with a high loss and descends raise no alarm.

    Args:
      steps: updates in the whole run.
      uniform: nats of the uniform coder.
      unigram: returns the nats of the unigram coder, None if there is none; called if needed.
      first: loss of the run's first step; None if the run begins now.
      best: lowest loss of earlier evaluations.
      worse: the coder that the loss was worse than before.
    """

    def __init__(
        self,
        *,
        steps: int,
        uniform: float,
        unigram: Callable[[], float | None],
        first: float | None = None,
        best: float = math.inf,
        worse: Coder | None = None,
    ):
        self._steps, self.uniform, self.unigram = steps, uniform, unigram
        self._first_evaluation = best if math.isfinite(best) else None
        self.first, self._best, self._best_median = first, best, math.inf
        length = min(MAX_WINDOW, max(MIN_WINDOW, steps // 20))
        self._window: collections.deque[float] = collections.deque(maxlen=length)
        self.median: float | None = None  # of the last training losses
        # Coders that the training loss and the last evaluation are worse than.
        self.training: Coder | None = "uniform" if worse == "uniform" else None
        self.evaluation: Coder | None = "unigram" if worse == "unigram" else None

    def restore(self, judged: Mapping[str, Any]) -> None:
        """Continue from the losses of `as_json`, in place of `best` and `worse`."""
        self._window.extend(judged["window"])
        self.training, self.evaluation = judged["training"], judged["evaluation"]
        self._first_evaluation = judged["first_evaluation"]
        lowest = (judged[name] for name in ("best", "best_median"))
        self._best, self._best_median = (math.inf if x is None else x for x in lowest)

    def as_json(self) -> dict[str, Any]:
        """Return the losses that were judged, by which a run that resumes judges the next ones."""
        lowest = {"best": self._best, "best_median": self._best_median}
        return {
            "window": list(self._window),
            "training": self.training,
            "evaluation": self.evaluation,
            "first_evaluation": self._first_evaluation,
            **{name: value if math.isfinite(value) else None for name, value in lowest.items()},
        }

    @property
    def worse(self) -> Coder | None:
        """The coder that the run is worse than at present; the uniform one if it is both."""
        return "uniform" if "uniform" in (self.training, self.evaluation) else self.evaluation

    def train(self, step: int, loss: float) -> None:
        """Judge the loss of a completed step; the guard handles a loss that is not finite."""
        if not math.isfinite(loss):
            return
        if self.first is None:
            self.first = loss
        self._window.append(loss)
        if len(self._window) < (self._window.maxlen or 0):
            return
        self.median = statistics.median(self._window)
        begun = self.first or 0.0
        self.training = "uniform" if self._is_above_uniform(step, self.median, begun) else None
        self._best_median = min(self._best_median, self.median)

    def evaluated(self, step: int, loss: float) -> Coder | None:
        """Judge the loss of an evaluation. Return the coder that it is worse than."""
        before = self.worse
        if step == 0 and math.isfinite(loss):
            self._first_evaluation = loss
        if self._is_above_uniform(step, loss, self.first_evaluation):
            self.evaluation = "uniform"
        elif self._is_above_unigram(step, loss, before):
            self.evaluation = "unigram"
        else:
            self.evaluation = None
        if loss < self._best:  # false for NaN
            self._best = loss
        return self.evaluation

    @property
    def first_evaluation(self) -> float:
        """The loss of step 0 on the set or in training, the higher one; 0 if there is none.

        After a resumption from a checkpoint of an earlier version it is the best one of the set.
        """
        losses = (self.first, self._first_evaluation)
        return max((each for each in losses if each is not None), default=0.0)

    def _is_above_uniform(self, step: int, loss: float, begun: float) -> bool:
        if self.worse == "uniform":
            return not loss <= self.uniform
        limit = (1 + MARGIN) * max(self.uniform, begun)
        has_been_better = min(self._best, self._best_median) < self.uniform
        if not loss <= limit and (step >= WARM_UP * self._steps or has_been_better):
            return True
        return self._must_have_learned(step) and not loss <= (1 + LEARNED_MARGIN) * self.uniform

    def _is_above_unigram(self, step: int, loss: float, before: Coder | None) -> bool:
        if not self._must_have_learned(step) and self._best >= loss:
            return False
        unigram = self.unigram()
        margin = LEARNED_MARGIN if before is None else 0.0
        if unigram is None or loss <= (1 + margin) * unigram:
            return False
        return self._must_have_learned(step) or self._best < unigram

    def _must_have_learned(self, step: int) -> bool:
        return self._steps >= MIN_STEPS and step >= LEARNED * self._steps
