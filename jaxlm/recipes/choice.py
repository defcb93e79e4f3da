"""From which step a run goes on, and what is not part of it any more.

Choosing reads only: what refuses the start afterwards finds every checkpoint where it was.
"""

import contextlib
import shlex
from collections.abc import Callable
from typing import NamedTuple

from jaxlm.checkpoint.store import Store
from jaxlm.core.errors import CommandError, DataError
from jaxlm.recipes.resume import Wish
from jaxlm.recipes.rewinding import Rewinds


class Aside(NamedTuple):
    """A step that the run goes on without: what the log says of it, and what is written beside it."""

    step: int
    told: str
    reason: str


class Choice(NamedTuple):
    """The step that a run goes on from, None where it begins; and those that are in its way."""

    step: int | None
    aside: list[Aside]

    def clear(self, store: Store, say: Callable[[str], None]) -> None:
        """Moves what is in the way to the quarantine. Raises NotWritable."""
        for each in self.aside:
            place = store.quarantine(each.step, each.reason)
            say(f"checkpoint {each.step} {each.told}; it is in {place}")


def likely(store: Store, wish: Wish, rewinds: Rewinds) -> int | None:
    """The step that will be chosen unless it is damaged: its record is whole, and its arrays nobody has read.

    Raises:
      CommandError: where the step that was asked for is not there.
    """
    given_up = rewinds.given_up(store)
    steps = [step for step in store.steps() if step not in given_up]
    if wish.start_at is not None:
        if wish.start_at not in steps:
            raise CommandError(
                f"there is no checkpoint of step {wish.start_at}",
                where=f"--start_at={wish.start_at}",
                why=f"committed steps: {', '.join(map(str, steps)) or 'none'}",
                fix=f"--start_at={steps[-1]}" if steps else "leave --start_at out",
            )
        steps = [wish.start_at]
    for step in reversed(steps):
        with contextlib.suppress(DataError):
            return store.record(step).step
    return None


def choose(store: Store, wish: Wish, rewinds: Rewinds) -> Choice:
    """The step to go on from, every byte of it as it was written.

    Raises:
      CommandError: where the step that was asked for is not the newest and nobody forced it.
      DataError: where it is damaged, or all are.
    """
    given_up = rewinds.given_up(store)
    damaged: dict[int, list[str]] = {}
    newest = store.newest_sound(damaged.__setitem__, without=given_up)
    aside = [
        Aside(step, "belongs to a future that was given up", reason)
        for step, reason in given_up.items()
    ]
    aside += [
        Aside(step, f"is damaged ({lines[0]})", "\n".join(lines)) for step, lines in damaged.items()
    ]
    if newest is None or wish.start_at is None or wish.start_at == newest:
        return Choice(newest, aside)
    wrong = damaged.get(wish.start_at, [])
    if not wrong and not wish.force:
        raise CommandError(
            f"step {wish.start_at} is not the newest",
            where=f"--start_at={wish.start_at}",
            why=f"going on from it gives up what was trained up to step {newest}",
            fix=f"--start_at={wish.start_at} --force    # moves the later steps to quarantine/",
        )
    if wrong := wrong or store.problems(wish.start_at):
        raise DataError(
            f"checkpoint {wish.start_at} is damaged",
            where=f"--start_at={wish.start_at}",
            why="\n".join(wrong[:4]),
            fix=f"jaxlm checkpoint list --workdir={shlex.quote(str(store.directory.parent))}",
        )
    reason = f"given up: the run was started again at {wish.start_at}"
    known = {each.step for each in aside}
    aside += [
        Aside(step, "was given up", reason)
        for step in store.steps()
        if step > wish.start_at and step not in known
    ]
    return Choice(wish.start_at, aside)
