"""What an examination found."""

import dataclasses
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A problem has a fix; a warning may cost time or end a larger run."""

    name: str
    verdict: Literal["ok", "warning", "problem"]
    said: str
    fix: str = ""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        mark = "" if self.verdict == "ok" else f"{self.verdict.upper()}: "
        fix = "".join(f"\n{'':14}fix: {line}" for line in self.fix.splitlines())
        return f"{self.name:<14}{mark}{self.said}{fix}"
