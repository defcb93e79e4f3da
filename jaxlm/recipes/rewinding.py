"""Going back to a healthy checkpoint and around the batches that spoilt the run."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxlm.checkpoint.store import Store
from jaxlm.core import faults
from jaxlm.core.errors import DataError, Diverged
from jaxlm.data import loader
from jaxlm.train import guard as guards
from jaxlm.train.config import GuardConfig
from jaxlm.train.loop import BudgetSpent
from jaxlm.train.rundir import RunDir, read_json

FILE = "rewinds.json"


@dataclasses.dataclass(frozen=True)
class Rewind:
    """One return to an earlier step. `low` to `high` are the batches left out since, by their number in the stream."""

    first_bad: int
    to: int
    low: int
    high: int


class Rewinds:
    """The rewinds of a run, the newest last; on disk before anything follows from them."""

    def __init__(self, directory: RunDir):
        self._directory = directory
        found = read_json(directory.path, FILE) if (directory.path / FILE).exists() else []
        self.made = [Rewind(**values) for values in found]

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The ranges of batches that are left out, as disjoint ranges."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted((rewind.low, rewind.high) for rewind in self.made):
            if low == high:
                continue
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return tuple(merged)

    def as_json(self) -> list[dict[str, Any]]:
        """What is stored, here and in each checkpoint."""
        return [dataclasses.asdict(rewind) for rewind in self.made]

    def go_back(
        self,
        spent: BudgetSpent,
        store: Store,
        guard: GuardConfig,
        note: Callable[[str], None] = lambda text: None,
    ) -> Rewind:
        """One rewind more, from what could not be got over. The first process chooses it for all.

        `note` gets a line for each checkpoint that was damaged and had to be passed over.

        Raises:
          Diverged: where none is left.
          DataError: if the checkpoint that the run began with is damaged, and no other is left.
        """
        made = len(self.made)
        if made >= guard.rewinds:
            rate = spent.values["learning_rate"]
            raise Diverged(
                f"training cannot go on after step {spent.first - 1}, and {made} rewinds are used up",
                where=f"steps {spent.first} to {spent.step}; spikes.jsonl names their documents",
                why=f"{guards.words(int(spent.values['verdict']))}: loss {spent.values['loss_nats']:.4g}, "
                f"gradient norm {spent.values['grad_norm']:.4g}, learning rate {rate:.3g}",
                fix=f"--config.optim.lr={rate / 3:.1e} --workdir=runs/another",
            )
        values = store.verifier.decide(
            lambda: dataclasses.asdict(self.add(spent.first, store, guard, note))
        )
        if not self._directory.is_writer:
            self.made.append(Rewind(**values))
        return self.made[made]

    def add(
        self,
        first_bad: int,
        store: Store,
        guard: GuardConfig,
        note: Callable[[str], None] = lambda text: None,
    ) -> Rewind:
        """Chooses where to go back to and what to leave out, and makes it last: later steps go to the quarantine.

        The way back leads to the newest healthy checkpoint at least `guard.reach` steps before the first bad one; where
        there is none, to the oldest that is healthy, or to the beginning. Only the step that is chosen is verified; if it is
        damaged, it goes to the quarantine too, and the next one is chosen.
        """
        to, damaged = self._target(first_bad, store, guard)
        bad = loader.number(first_bad - 1, self.skips)
        low = max(bad - guard.skip // 2, loader.number(to, self.skips))
        rewind = Rewind(first_bad, to, low, low + guard.skip)
        self.made.append(rewind)
        self._directory.write_json(FILE, self.as_json())
        faults.point("rewind", first_bad)
        reasons = {step: "\n".join(lines) for step, lines in damaged.items()}
        for step, reason in (self.given_up(store) | reasons).items():
            place = store.quarantine(step, reason)
            if step in damaged:
                note(f"checkpoint {step} is damaged ({damaged[step][0]}); it is in {place}")
        return rewind

    def _target(
        self, first_bad: int, store: Store, guard: GuardConfig
    ) -> tuple[int, dict[int, list[str]]]:
        """The step to go back to, 0 for the beginning, and what is wrong with those that would have come first."""
        healthy = [step for step in store.steps() if step < first_bad and _is_healthy(store, step)]
        damaged: dict[int, list[str]] = {}
        while healthy:
            far = [step for step in healthy if step <= first_bad - guard.reach]
            to = far[-1] if far else healthy[0]
            if not (lines := store.problems(to)):
                return to, damaged
            damaged[to] = lines
            healthy.remove(to)
        if 0 in store.steps():
            lines = damaged.get(0) or store.problems(0)
            raise DataError(
                "a rewind has no checkpoint to go back to",
                where=str(store.directory / "0"),
                why=f"the run began with its weights, and it is damaged: {lines[0]}",
                fix="start again from the same --init_from in another --workdir; command.sh has the flags",
            )
        return 0, damaged

    def given_up(self, store: Store) -> dict[int, str]:
        """The steps of a future that was given up, each with why; some are left where the process died before it moved them."""
        found: dict[int, str] = {}
        if not self.made:
            return found
        for step in store.steps():
            try:
                known = len(store.record(step).meta["rewinds"])
            except DataError:
                continue  # damaged: for the store to deal with
            if step > self.made[-1].to and known < len(self.made):
                found[step] = f"given up by the rewind to {self.made[-1].to}"
        return found


def _is_healthy(store: Store, step: int) -> bool:
    """Whether a step may be gone back to, by its record: nothing was skipped shortly before it."""
    try:
        return store.record(step).healthy
    except DataError:
        return False  # for the next start to deal with
