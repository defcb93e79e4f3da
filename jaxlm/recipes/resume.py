"""What a run may change when it goes on, and what not."""

from typing import Any

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.optim.config import Constant, Schedule
from jaxlm.recipes.config import Run

# Sections and settings that change nothing of what is computed.
FREE = ("log", "eval", "sample", "checkpoint", "profile", "mesh", "data.workers", "data.prefetch")
FREE_TRAIN = ("train.stack", "train.remat", "train.patience", "loss.chunk")


def check(saved: Run, wanted: Run, allowed: tuple[str, ...], completed: int) -> list[config.Change]:
    """The changes that a run takes over when it goes on with another config.

    How a run is watched, saved and laid out may change. `train.steps` may where the schedule does not depend on it.
    The rest needs the user's word, field by field.

    Raises:
      ConfigError: where a change is not allowed; shows all of them.
    """
    changes = config.diff(saved, wanted)
    refused = [change for change in changes if not _is_free(change, wanted, allowed, completed)]
    if refused:
        shown = [str(change) for change in refused[:4]]
        if len(refused) > 4:
            shown.append(f"and {len(refused) - 4} more")
        raise ConfigError(
            f"{len(refused)} setting{'s differ' if len(refused) > 1 else ' differs'} from the run in this directory",
            where=f"after step {completed} of {saved.train.steps}",
            why="\n".join(shown),
            fix=f"--workdir=runs/another, or --allow_change={','.join(change.path for change in refused)}",
        )
    return changes


def check_data(saved: dict[str, Any], found: dict[str, Any], allowed: tuple[str, ...]) -> None:
    """Raises ConfigError where the data is not what the run read before."""
    names = [name for name in saved | found if saved.get(name) != found.get(name)]
    if names and "data" not in allowed:
        raise ConfigError(
            "the data is not what this run read before",
            where="data",
            why="\n".join(
                f"{name}: {_short(saved.get(name))} -> {_short(found.get(name))}"
                for name in names[:4]
            ),
            fix="--allow_change=data goes on with it, from the same step; or --workdir=runs/another",
        )


def _is_free(change: config.Change, wanted: Run, allowed: tuple[str, ...], completed: int) -> bool:
    path = change.path
    if path in FREE_TRAIN or any(path == free or path.startswith(f"{free}.") for free in FREE):
        return True
    if path == "train.steps" and is_absolute(wanted.schedule) and wanted.train.steps >= completed:
        return True
    return any(path == name or path.startswith(f"{name}.") for name in allowed)


def is_absolute(schedule: Schedule) -> bool:
    """Whether the learning rate at a step does not depend on the number of steps."""
    if schedule.warmup.unit == "share":
        return False
    return isinstance(schedule, Constant) or schedule.end.unit != "share"


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
