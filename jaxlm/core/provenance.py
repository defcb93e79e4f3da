"""Origins of values: default, config file or command line."""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a value, such as `configs/quickstart.py:14` or `--config.optim.lr=1e-3`."""

    kind: Literal["default", "file", "command line"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind

    @property
    def place(self) -> str:
        """File without its line, or the kind."""
        return self.where.rpartition(":")[0] or self.where if self.kind == "file" else self.kind


DEFAULT = Origin("default")


def short(path: str | os.PathLike[str]) -> str:
    """Return a path, relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith("..") else relative


def caller(is_ours: Callable[[str], bool]) -> Origin:
    """Return the source line that called into the files accepted by `is_ours`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return Origin("file", f"{short(frame.f_code.co_filename)}:{frame.f_lineno}")
