"""Settings of checkpoints.

Example:
    >>> CheckpointConfig(keep_every=1000).keep_last
    2
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import Span, setting

_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://[^/@\s:]+(/[^/@\s:]+)+/?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Interval between checkpoints, and the steps that are kept."""

    directory: str | None = setting(
        None,
        "object store that keeps the checkpoints, gs://bucket/prefix or s3://bucket/prefix; None"
        " keeps them in the run directory",
    )
    every: Span = setting(Span.parse("10%"), "interval between checkpoints")
    keep_last: int = setting(2, "number of newest checkpoints to keep", low=1)
    keep_best: int = setting(
        1, "number of checkpoints with the lowest evaluation loss to keep as well", low=0
    )
    keep_every: int | None = setting(
        None,
        "step multiple whose checkpoints are kept permanently; None keeps none permanently",
        unit="steps",
        low=1,
    )
    space: Literal["check", "ignore"] = setting(
        "check", "check at the start that the kept checkpoints will fit on the disk, or ignore it"
    )

    @staticmethod
    def is_url(text: str) -> bool:
        """Return whether a text is the URL of a prefix in an object store."""
        return _URL.fullmatch(text) is not None

    def of_run(self, name: str) -> list[tuple[str, str]]:
        """Return the setting that gives one of several runs a prefix of its own, if any is needed.

        Example:
          >>> CheckpointConfig(directory="gs://bucket/sweep").of_run("lr=0.1")
          [('checkpoint.directory', 'gs://bucket/sweep/lr=0.1')]
        """
        if self.directory is None:
            return []
        return [("checkpoint.directory", f"{self.directory.rstrip('/')}/{name}")]

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that the directory is a prefix in an object store."""
        if self.directory is not None and not self.is_url(self.directory):
            yield (
                "directory",
                f"{self.directory!r} is not the URL of a prefix in an object store",
                "--config.checkpoint.directory=None    # checkpoints in the run directory\n"
                "--config.checkpoint.directory=s3://bucket/prefix",
            )
