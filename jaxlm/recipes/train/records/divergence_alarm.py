"""The verdict on a loss that is worse than that of a coder without a model."""

import functools
import math
import shlex
from collections.abc import Callable
from typing import Any

from jaxlm.core.errors import Diverged, JaxlmError
from jaxlm.data import baselines
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.training.divergence import MARGIN, Coder, Divergence
from jaxlm.training.loop import Progress

DIVERGENCE_FILE = "divergence.json"


class DivergenceAlarm:
    """Judges the losses of a run; warns, or ends the run, by `guard.divergence`.

    Args:
      context: the run around its programs.
      programs: the programs of the run.
      ranking_set: the validation set that ranks checkpoints; None without one.
      progress: counters of the run, with the verdict so far.
      start: completed steps.
      finish_saves: returns when all saves are on disk.
    """

    def __init__(
        self,
        context: RunContext,
        programs: TrainPrograms,
        ranking_set: str | None,
        progress: Progress,
        start: int,
        finish_saves: Callable[[], None],
    ):
        self._context, self._programs = context, programs
        self._ranking_set, self._progress = ranking_set, progress
        self._finish_saves = finish_saves
        # Coders compare with the likelihood of tokens, not with a loss of whole answers.
        objective = context.run.objective
        self._is_nll = not (objective.compares_answers or objective.samples_answers)
        self._ids = programs.data.tokenizer.size
        uniform = math.log(self._ids)
        # A checkpoint of an earlier version does not have the first loss.
        first = progress.first_loss if progress.first_loss is not None or not start else uniform
        self._divergence = Divergence(
            steps=context.run.train.steps,
            uniform=uniform,
            unigram=functools.cache(self._unigram),
            first=first,
            best=math.inf if progress.best_loss is None else progress.best_loss,
            worse=progress.divergence["worse_than"] if progress.divergence else None,
        )
        self._reported: Coder | None = None  # by this process: each start reports it again

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The verdict for the report and the closing block; None for a healthy loss."""
        return self._progress.divergence

    @property
    def training_mark(self) -> dict[str, Any]:
        """Fields of the record of a training step."""
        worse = self._divergence.training
        return {"worse_than": worse} if worse else {}

    def judge_training(self, step: int, values: dict[str, float]) -> None:
        """Judge the loss of a completed step that was applied. Raise Diverged as `_report` does."""
        if not values["verdict"] and self._is_nll:
            self._divergence.train(step, values["loss_nats"])
            self._progress.first_loss = self._divergence.first
            median = self._divergence.median
            self._report(step, "train", values["loss_nats"] if median is None else median)

    def judge_evaluation(self, step: int, loss: float) -> dict[str, Any]:
        """Judge an evaluation of the ranking set, and return fields of its record."""
        if not self._is_nll:
            return {}
        worse = self._divergence.evaluated(step, loss)
        return {"worse_than": worse} if worse else {}

    def report_evaluation(self, step: int, loss: float) -> None:
        """Warn of a recorded evaluation, or end the run. Raise Diverged."""
        if self._is_nll:
            self._report(step, self._ranking_set or "train", loss)

    def is_worse_than_uniform(self, loss: float) -> bool:
        """Return whether a loss is above ln V."""
        return self._is_nll and not loss <= self._divergence.uniform

    def write(self) -> None:
        """Write the verdict for the report, replacing an earlier one."""
        file = self._context.directory.path / DIVERGENCE_FILE
        if self.verdict is not None or file.exists():
            record = self.verdict or {"worse_than": None}
            self._context.directory.write_json(DIVERGENCE_FILE, record)

    def _report(self, step: int, split: str, loss: float) -> None:
        """Report that the loss became worse than a coder, or better again.

        Raises Diverged if the loss is worse than uniform, and `guard.divergence` is "stop".
        """
        worse = self._divergence.worse
        if worse == self._reported and (worse or not self.verdict):
            return
        self._reported = worse
        if worse is None:
            self._progress.divergence = None
            self._context.console.say(f"step {step}: the loss is better than the coders again")
            self.write()
            return
        before, verdict = self.verdict, self._judged(worse, step, split, loss)
        if before and before["worse_than"] == worse:
            verdict["step"] = before["step"]  # of the first report
        self._progress.divergence = verdict
        self.write()
        text = "{message}\n  likely cause: {cause}\n  to find a rate: {command}".format(**verdict)
        self._context.console.warn(f"step {step}: {text}", step=step, style="bold red")
        if worse == "uniform" and self._context.run.guard.divergence == "stop":
            self._finish_saves()
            raise Diverged(
                f"the run has diverged: {verdict['message']}",
                where=f"step {step}, {split}; guard.divergence = stop",
                why=f"likely, {verdict['cause']}",
                fix=f"{verdict['command']}\n"
                "--config.guard.divergence=warn    # resumes from the last saved step",
            )

    def _judged(self, worse: Coder, step: int, split: str, loss: float) -> dict[str, Any]:
        if worse == "uniform":
            nats, coder = self._divergence.uniform, f"each of {self._ids} ids equally likely"
        else:
            nats = self._divergence.unigram() or 0.0
            coder = "token frequencies of the training text"
        shown = f"{loss:.4f}" if loss < 1e4 else f"{loss:.3g}"
        path = self._context.directory.path
        words = ["jaxlm", "lr-find", f"--config={path / 'config.json'}", f"--out={path}-lr-find"]
        return {
            "worse_than": worse,
            "step": step,
            "split": split,
            "loss_nats": loss if math.isfinite(loss) else None,
            "coder_nats": nats,
            "outcome": f"worse than the {worse} coder, "
            + ("diverged" if self._has_risen(loss) else "nothing learned"),
            "message": f"the loss on {split}, {shown} nats, is worse than the {worse} coder "
            f"({nats:.2f} nats; {coder})",
            "cause": self._cause(loss),
            "command": shlex.join(words),
        }

    def _cause(self, loss: float) -> str:
        run, first = self._context.run, self._divergence.first
        rate = f"optim.lr = {run.optim.lr:g}"
        if first is not None and not self._has_risen(loss):
            if first > 1.5 * self._divergence.uniform:
                return (
                    f"the run began at {first:.4g} nats: weights that do not fit the tokenizer,"
                    f" or model.init; or {rate} is too low"
                )
            return f"{rate} is too low, or the run too short, for this model and data"
        spikes = "" if run.guard.sigmas is not None else "; guard.sigmas = None applies spikes"
        return f"{rate} is too high for this model, batch and schedule{spikes}"

    def _has_risen(self, loss: float) -> bool:
        """Return whether a loss is above the first one, or above the best evaluation."""
        lower = [self._divergence.first, self._progress.best_loss]
        return any(each is not None and not loss <= (1 + MARGIN) * each for each in lower)

    def _unigram(self) -> float | None:
        """Return the nats of the unigram coder on the ranking set; None unless it is plain text."""
        data = self._programs.data
        validation = data.validation.get(self._ranking_set or "")
        if validation is None or not validation.predicts_all:
            return None
        try:
            return baselines.unigram_nats(data.train.shards, validation.shards)
        except JaxlmError:  # a damaged shard, which the loader handles
            return None
