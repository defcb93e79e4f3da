"""What went in and what became of it: sums, so that units of work add up in any order."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxlm.core.errors import JaxlmError


@dataclasses.dataclass
class Counts:
    """Documents and their characters by fate: `read`, `kept`, `removed.STAGE.RULE`, `broken.CLASS`; and what was changed."""

    documents: Counter[str] = dataclasses.field(default_factory=Counter)
    characters: Counter[str] = dataclasses.field(default_factory=Counter)
    notes: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, fate: str, text: str = "") -> None:
        """One more document of this fate."""
        self.documents[fate] += 1
        self.characters[fate] += len(text)

    def __iadd__(self, other: "Counts") -> "Counts":
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))
        return self

    def check(self, where: str) -> None:
        """Whether every document that was read is kept, removed or broken, and none twice.

        Raises:
          JaxlmError: where it is not, which is a bug of ours.
        """
        fates = Counter[str]()
        for fate, count in self.documents.items():
            fates[fate.partition(".")[0]] += count
        if fates["read"] != fates["kept"] + fates["removed"] + fates["broken"]:
            numbers = ", ".join(f"{fates[name]} {name}" for name in ("kept", "removed", "broken"))
            raise JaxlmError(
                "documents were lost or counted twice",
                where=where,
                why=f"{fates['read']} read, but {numbers}",
                fix="report it with the recipe",
            )

    def under(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Fates below one, by what is left of their names, the commonest first."""
        found = {
            name.removeprefix(f"{prefix}."): count
            for name, count in self.documents.items()
            if name.startswith(f"{prefix}.") and count
        }
        yield from sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it, in the order of names: the same counts are the same bytes."""
        return {
            field.name: dict(sorted(getattr(self, field.name).items()))
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Counts":
        """What `to_json` gave."""
        return cls(**{field.name: Counter(data[field.name]) for field in dataclasses.fields(cls)})
