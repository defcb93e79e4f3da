"""The verdict on a loss that is worse than that of a coder without a model."""

import dataclasses
import math
import shlex
from collections.abc import Callable
from typing import Any

from jaxlm.core.errors import Diverged
from jaxlm.monitor.console import Console
from jaxlm.training.config import GuardConfig
from jaxlm.training.divergence import MARGIN, Coder, Divergence
from jaxlm.training.loop import Progress
from jaxlm.training.rundir import RunDir

DIVERGENCE_FILE = "divergence.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlarmTerms:
    """Facts of a run that the verdict on its loss names, and the guard that it follows.

    Args:
      ids: ids of the tokenizer.
      rate: peak of the learning rate.
      ranking_set: the validation set that ranks checkpoints.
      init_from: RUN[@STEP] of the first weights, if this start names it or they are of an adapter.
      guard: limits of the run.
    """

    ids: int
    rate: float
    ranking_set: str
    init_from: str | None
    guard: GuardConfig


class DivergenceAlarm:
    """Judges the losses of a run; warns, or ends the run, by `guard.divergence`.

    Args:
      divergence: judge of the losses; None for a loss that is no likelihood of tokens.
      terms: facts of the run.
      progress: counters of the run, with the verdict so far.
      directory: receives the verdict.
      console: receives warnings.
      finish_saves: returns when all saves are on disk.
    """

    def __init__(
        self,
        divergence: Divergence | None,
        terms: AlarmTerms,
        progress: Progress,
        directory: RunDir,
        console: Console,
        finish_saves: Callable[[], None],
    ):
        self._divergence, self._terms, self._progress = divergence, terms, progress
        self._directory, self._console, self._finish_saves = directory, console, finish_saves
        self._reported: Coder | None = None  # by this process: each start reports it again

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The verdict for the report and the closing block; None for a healthy loss."""
        return self._progress.divergence

    @property
    def training_mark(self) -> dict[str, Any]:
        """Fields of the record of a training step."""
        worse = self._divergence.training if self._divergence else None
        return {"worse_than": worse} if worse else {}

    def judge_training(self, step: int, values: dict[str, float]) -> None:
        """Judge the loss of a completed step that was applied. Raise Diverged as `_report` does."""
        judge = self._divergence
        if not values["verdict"] and judge is not None:
            judge.train(step, values["loss_nats"])
            self._progress.first_loss, self._progress.judged = judge.first, judge.as_json()
            median = judge.median
            self._report(judge, step, "train", values["loss_nats"] if median is None else median)

    def judge_evaluation(self, step: int, loss: float) -> dict[str, Any]:
        """Judge an evaluation of the ranking set, and return fields of its record."""
        if self._divergence is None:
            return {}
        worse = self._divergence.evaluated(step, loss)
        self._progress.judged = self._divergence.as_json()
        return {"worse_than": worse} if worse else {}

    def report_evaluation(self, step: int, loss: float) -> None:
        """Warn of a recorded evaluation, or end the run. Raise Diverged."""
        if self._divergence is not None:
            self._report(self._divergence, step, self._terms.ranking_set, loss)

    def is_worse_than_uniform(self, loss: float) -> bool:
        """Return whether a loss is above ln V."""
        return self._divergence is not None and not loss <= self._divergence.uniform

    def write(self) -> None:
        """Write the verdict for the report, replacing an earlier one."""
        file = self._directory.path / DIVERGENCE_FILE
        if self.verdict is not None or file.exists():
            record = self.verdict or {"worse_than": None}
            self._directory.write_json(DIVERGENCE_FILE, record)

    def _report(self, judge: Divergence, step: int, split: str, loss: float) -> None:
        """Report that the loss became worse than a coder, or better again.

        Raises Diverged if the loss is worse than uniform, and `guard.divergence` is "stop".
        """
        worse = judge.worse
        if worse == self._reported and (worse or not self.verdict):
            return
        self._reported = worse
        if worse is None:
            self._progress.divergence = None
            self._console.say(f"step {step}: the loss is better than the coders again")
            self.write()
            return
        before, verdict = self.verdict, self._judged(judge, worse, step, split, loss)
        self._progress.divergence = verdict
        if before and before["worse_than"] == worse:  # the first report stays, as without a resume
            self._progress.divergence = before | {"command": verdict["command"]}
        self.write()
        text = "{message}\n  likely cause: {cause}\n  to find a rate: {command}".format(**verdict)
        self._console.warn(f"step {step}: {text}", step=step, style="bold red")
        if worse == "uniform" and self._terms.guard.divergence == "stop":
            self._finish_saves()
            raise Diverged(
                f"the run has diverged: {verdict['message']}",
                where=f"step {step}, {split}; guard.divergence = stop",
                why=f"likely, {verdict['cause']}",
                fix=f"{verdict['command']}\n"
                "--config.guard.divergence=warn    # resumes from the last saved step",
            )

    def _judged(
        self, judge: Divergence, worse: Coder, step: int, split: str, loss: float
    ) -> dict[str, Any]:
        if worse == "uniform":
            nats, coder = judge.uniform, f"each of {self._terms.ids} ids equally likely"
        else:
            nats = judge.unigram() or 0.0
            coder = "token frequencies of the training text"
        shown = f"{loss:.4f}" if loss < 1e4 else f"{loss:.3g}"
        path = self._directory.path
        words = ["jaxlm", "lr-find", f"--config={path / 'config.json'}", f"--out={path}-lr-find"]
        words += [f"--init_from={self._terms.init_from}"] if self._terms.init_from else []
        return {
            "worse_than": worse,
            "step": step,
            "split": split,
            "loss_nats": loss if math.isfinite(loss) else None,
            "coder_nats": nats,
            "outcome": f"worse than the {worse} coder, "
            + ("diverged" if self._has_risen(judge, split, loss) else "nothing learned"),
            "message": f"the loss on {split}, {shown} nats, is worse than the {worse} coder "
            f"({nats:.2f} nats; {coder})",
            "cause": self._cause(judge, split, loss),
            "command": shlex.join(words),
        }

    def _cause(self, judge: Divergence, split: str, loss: float) -> str:
        first = judge.first
        rate = f"optim.lr = {self._terms.rate:g}"
        if first is not None and not self._has_risen(judge, split, loss):
            if first > 1.5 * judge.uniform:
                return (
                    f"the run began at {first:.4g} nats: weights that do not fit the tokenizer,"
                    f" or model.init; or {rate} is too low"
                )
            return f"{rate} is too low, or the run too short, for this model and data"
        spikes = (
            "" if self._terms.guard.sigmas is not None else "; guard.sigmas = None applies spikes"
        )
        return f"{rate} is too high for this model, batch and schedule{spikes}"

    def _has_risen(self, judge: Divergence, split: str, loss: float) -> bool:
        """Return whether a loss is above the first one, or above the best evaluation."""
        first = judge.first if split == "train" else judge.first_evaluation
        lower = [first, self._progress.best_loss]
        return any(each is not None and not loss <= (1 + MARGIN) * each for each in lower)
