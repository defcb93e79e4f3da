"""What a run says and does if its loss is worse than that of coders without a model."""

import functools
import math
import shlex
from collections.abc import Callable
from typing import Any

from jaxlm.core.errors import Diverged, JaxlmError
from jaxlm.data import baselines
from jaxlm.monitor.console import Console
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.training.divergence import MARGIN, Coder, Divergence
from jaxlm.training.loop import Progress
from jaxlm.training.rundir import RunDir

FILE = "divergence.json"


class Alarm:
    """Judges the losses of a run as they come; warns, or ends the run, by `guard.divergence`.

    Args:
      followed: the validation set that ranks checkpoints; None if there is none.
      start: completed steps.
      settle: returns once all saves are on disk.
    """

    def __init__(
        self,
        engine: TrainPrograms,
        directory: RunDir,
        console: Console,
        followed: str | None,
        progress: Progress,
        start: int,
        settle: Callable[[], None],
    ):
        self._engine, self._directory, self._console = engine, directory, console
        self._followed, self._progress, self._settle = followed, progress, settle
        self._ids = engine.data.tokenizer.size
        uniform = math.log(self._ids)
        # A checkpoint of an earlier version does not have the first loss.
        first = progress.first_loss if progress.first_loss is not None or not start else uniform
        self._divergence = Divergence(
            steps=engine.run.train.steps,
            uniform=uniform,
            unigram=functools.cache(self._unigram),
            first=first,
            best=math.inf if progress.best_loss is None else progress.best_loss,
            worse=progress.divergence["worse_than"] if progress.divergence else None,
        )
        self._said: Coder | None = None  # by this process: each start says it anew

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What the report and the closing block say; None while the loss is as it should be."""
        return self._progress.divergence

    def train(self, step: int, values: dict[str, float]) -> None:
        """Judges the loss of a completed step that was applied. Raises Diverged as `_change` does."""
        if not values["verdict"]:
            self._divergence.train(step, values["loss_nats"])
            self._progress.first_loss = self._divergence.first
            median = self._divergence.median
            self._change(step, "train", values["loss_nats"] if median is None else median)

    @property
    def mark(self) -> dict[str, Any]:
        """What the record of a training step says of it."""
        worse = self._divergence.training
        return {"worse_than": worse} if worse else {}

    def evaluated(self, step: int, loss: float) -> dict[str, Any]:
        """Judges an evaluation of the followed set. Returns what its record says of it."""
        worse = self._divergence.evaluated(step, loss)
        return {"worse_than": worse} if worse else {}

    def conclude(self, step: int, loss: float) -> None:
        """Warns of an evaluation, or ends the run, once it is on record. Raises Diverged."""
        self._change(step, self._followed or "train", loss)

    def is_worse_than_uniform(self, loss: float) -> bool:
        """Whether a loss is above ln V."""
        return not loss <= self._divergence.uniform

    def _change(self, step: int, split: str, loss: float) -> None:
        """Writes down that the alarm begins or ends.

        Raises:
          Diverged: if the loss is worse than uniform, and `guard.divergence` is "stop".
        """
        worse = self._divergence.worse
        if worse == self._said and (worse or not self.verdict):
            return
        self._said = worse
        if worse is None:
            self._progress.divergence = None
            self._console.say(f"step {step}: the loss is better than the coders again")
            self.write()
            return
        before, verdict = self.verdict, self._judged(worse, step, split, loss)
        if before and before["worse_than"] == worse:
            verdict["step"] = before["step"]  # since when
        self._progress.divergence = verdict
        self.write()
        said = "{said}\n  likely cause: {cause}\n  to find a rate: {command}".format(**verdict)
        self._console.warn(f"step {step}: {said}", step=step, style="bold red")
        if worse == "uniform" and self._engine.run.guard.divergence == "stop":
            self._settle()
            raise Diverged(
                f"the run has diverged: {verdict['said']}",
                where=f"step {step}, {split}; guard.divergence = stop",
                why=f"likely, {verdict['cause']}",
                fix=f"{verdict['command']}\n"
                "--config.guard.divergence=warn    # goes on from the last saved step",
            )

    def write(self) -> None:
        """Writes the verdict for the report; an earlier one is replaced."""
        if self.verdict is not None or (self._directory.path / FILE).exists():
            self._directory.write_json(FILE, self.verdict or {"worse_than": None})

    def _judged(self, worse: Coder, step: int, split: str, loss: float) -> dict[str, Any]:
        if worse == "uniform":
            nats, what = self._divergence.uniform, f"each of {self._ids} ids equally likely"
        else:
            nats, what = self._divergence.unigram() or 0.0, "token frequencies of the training text"
        shown = f"{loss:.4f}" if loss < 1e4 else f"{loss:.3g}"
        path = self._directory.path
        words = ["jaxlm", "lr-find", f"--config={path / 'config.json'}", f"--out={path}-lr-find"]
        return {
            "worse_than": worse,
            "step": step,
            "split": split,
            "loss_nats": loss if math.isfinite(loss) else None,
            "coder_nats": nats,
            "outcome": f"worse than the {worse} coder, "
            + ("diverged" if self._has_risen(loss) else "nothing learned"),
            "said": f"the loss on {split}, {shown} nats, is worse than the {worse} coder "
            f"({nats:.2f} nats; {what})",
            "cause": self._cause(loss),
            "command": shlex.join(words),
        }

    def _cause(self, loss: float) -> str:
        run, first = self._engine.run, self._divergence.first
        rate = f"optim.lr = {run.optim.lr:g}"
        if first is not None and not self._has_risen(loss):
            if first > 1.5 * self._divergence.uniform:
                return (
                    f"the run began at {first:.4g} nats: weights that do not fit the tokenizer, "
                    f"or model.init; or {rate} is too low"
                )
            return f"{rate} is too low, or the run too short, for this model and data"
        spikes = "" if run.guard.sigmas is not None else "; guard.sigmas = None applies spikes"
        return f"{rate} is too high for this model, batch and schedule{spikes}"

    def _has_risen(self, loss: float) -> bool:
        """Whether a loss is above the first one, or above the best evaluation: it has been better."""
        before = [self._divergence.first, self._progress.best_loss]
        return any(each is not None and not loss <= (1 + MARGIN) * each for each in before)

    def _unigram(self) -> float | None:
        """Nats of the unigram coder on the followed set; None unless it is read as plain text."""
        data = self._engine.data
        loader = data.validation.get(self._followed or "")
        if loader is None or loader.corruption is not None:
            return None
        try:
            return baselines.unigram_nats(data.train.shards, loader.shards)
        except JaxlmError:  # a damaged shard, which the loader deals with
            return None
