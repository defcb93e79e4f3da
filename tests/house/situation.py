"""A command line that fails, or ends with what to do next, and the folder in which it does."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = "--config=c.py --workdir=new"
RUN = "--workdir=runs/a"
SHORT = (
    "--config.data.sequence=32 --config.train.steps=2 --config.train.batch=4 "
    "--config.model.width=32 --config.model.depth=1 "
    "--config.model.heads=4 --config.model.kv_heads=2 --config.data.tokenizer=bytes "
    "'--config.sample.prompts=()'"
)


@dataclasses.dataclass(frozen=True)
class Situation:
    """A command line, and the changes that are made before it in a copy of the user's folder.

    Args:
      words: the command line after `jaxlm`.
      change: a shell command that runs in the folder first.
      more: flags that make a pasted command short.
      code: the exit code of the command line; None stands for any but 0 and 70.
      prepare: changes this process first, as a full disk or a missing package would.
    """

    words: str
    change: str = ""
    more: str = ""
    code: int | None = None
    prepare: Callable[[pytest.MonkeyPatch], None] | None = None
