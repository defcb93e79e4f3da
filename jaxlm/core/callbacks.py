"""Types of the callbacks that report on long work, and those of a run in Python."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

Log = Callable[[str], None]  # a line for the user
OnText = Callable[[int, str, bool], None]  # row, new text, and True at the end of the row
OnProgress = Callable[[str, int, int], None]  # label, bytes done, total bytes


@dataclasses.dataclass(frozen=True)
class Event:
    """A moment of a run, for a `Callback`.

    The arrays are those of the training step, sharded over the mesh. The next step reuses their
    memory, so a callback copies what it keeps (`jax.device_get`).

    Attributes:
      step: completed steps.
      state: the state after the step: `params`, `opt_state`, `step` and the guard. With an adapter
        `params` are its parameters alone.
      metrics: the record of the step in metrics.jsonl, or the newest evaluation.
      batch: the batch of the step: `tokens`, `targets`, `weights`, `segments`, `positions`.
      workdir: the run directory.
    """

    step: int
    state: Any
    metrics: dict[str, Any]
    batch: Any
    workdir: Any
    whole: Callable[[Any], Any] = dataclasses.field(repr=False)
    merge: Callable[[Any], Any] = dataclasses.field(repr=False)

    @functools.cached_property
    def params(self) -> Any:
        """All parameters as nested dicts, those of an adapter's base included."""
        return self.whole(self.state.params)

    @functools.cached_property
    def model(self) -> Any:
        """The Flax module with the parameters: `model(ids)` returns logits."""
        return self.merge(self.params)


class Callback:
    """Moments of a run at which a program sees its step, state, metrics and batch.

    A subclass overrides the moments that it needs. All processes of a run call it, so that it may
    compute with the sharded arrays. If a method returns a true value in the first process, or
    raises an error in any, the run ends after its next step, with the state saved; an error is
    raised afterwards.
    """

    def on_log(self, event: Event) -> Any:
        """Act after a logged step. With this method the device waits for Python at each step."""

    def on_evaluation(self, event: Event) -> Any:
        """Act after an evaluation, whose figures are the metrics."""

    def on_checkpoint(self, event: Event) -> Any:
        """Act after a checkpoint was begun: the state is copied, and written meanwhile."""

    def on_end(self, event: Event) -> Any:
        """Act at the end of the run, or of this start of it, after the last checkpoint.

        It is not called if a signal or an error ends the run.
        """
