"""A run directory whose weights came from elsewhere: as a whole, or to be made again."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core import config
from jaxlm.core.errors import CommandError
from jaxlm.recipes.config import Run
from jaxlm.train.loop import Progress
from jaxlm.train.rundir import IMPORTED, RunDir


def check_free(workdir: Path, flag: str, what: str) -> None:
    """Raises CommandError where a run is in the directory; what one that was killed while it was made has left is none."""
    has_steps = any((workdir / "checkpoints").glob("[0-9]*"))
    if (workdir / "config.json").exists() or (has_steps and not (workdir / IMPORTED).exists()):
        raise CommandError(
            "there is a run in this directory",
            where=f"{flag}={workdir}",
            why=f"{what} begins a run, and nothing is overwritten",
            fix=f"{flag}={workdir}-2",
        )


def write(
    directory: RunDir,
    run: Run,
    params: Any,
    tokenizer: bytes,
    facts: dict[str, Any],
    *,
    is_frugal: bool = False,
) -> None:
    """Commits the weights as step 0 of a run, of which nothing else is known. config.json, which makes it one, comes last.

    Raises:
      SaveFailed: where they cannot be written.
    """
    directory.write_json(IMPORTED, facts)
    directory.write_bytes("tokenizer", tokenizer)
    store = Store(
        directory.checkpoints,
        CheckpointConfig(),
        owner=directory.lock.fence,
        is_owner=directory.lock.is_owner,
        is_frugal=is_frugal,
    )
    for step in store.steps():
        store.quarantine(step, "committed by a command that was killed before config.json")
    meta = {
        "step": 0,
        "finished": False,
        "config": config.to_json(run),
        "data": {},
        "progress": dataclasses.asdict(Progress()),
        "evaluation": None,
        "rewinds": [],
    }
    store.save(0, {"params": params}, meta)
    store.close()
    directory.write_json("config.json", config.to_json(run))
