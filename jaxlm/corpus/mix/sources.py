"""Cleaned corpora as a mix reads them: their reports, their kept files, and which of their documents are taken."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.corpus.files import Written, checked_lines
from jaxlm.corpus.job import RECIPE, REPORT, part_of
from jaxlm.corpus.mix.config import Mix, named
from jaxlm.data.parts import Selection
from jaxlm.data.records import Document

BY_WEIGHT = "by its source's weight"
PART = "!"  # in FOLDER!PART


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of `jaxlm data run`, finished, or a part of one."""

    name: str
    folder: Path
    share: float  # of its documents that is taken
    licence: str
    report: dict[str, Any]  # with the counts of the part
    recipe: dict[str, Any]  # recipe.json: the recipe, the files of the part
    sha256: str  # of its report, which holds the digest of every file
    kept: tuple[tuple[str, Written], ...]  # path in the folder

    def named(self, file: str) -> str:
        """What shards call a file of its folder: by the source, as where the folder lies must not change a byte of them."""
        return f"{self.name}/{file}"

    def documents(
        self, files: Sequence[tuple[str, Written]], selection: Selection, counts: Counter[str]
    ) -> Iterator[Document]:
        """The documents of some of its files that are taken and lie on one side of a split; the others are counted.

        Raises:
          DataError: where a file is not the one that was written.
        """
        before = 0
        for name, written in files:
            path = self.folder / name
            place = before
            for number, line in enumerate(checked_lines(path, written)):
                place += len(line)
                text = json.loads(line)["text"]
                if self.share < 1 and _drawn(text) >= self.share:
                    counts[BY_WEIGHT] += 1
                elif selection.take(text):
                    yield Document(text, self.named(name), number, place)
            before += written.bytes


def find(mix: Mix) -> list[Source]:
    """The sources of a mix, in its order.

    Raises:
      InputMissing: where a folder holds no finished run.
      DataError: where its report cannot be read, or nothing was kept there.
    """
    licences = named(mix.licences)
    found = [
        _source(name, folder, licences.get(name, "")) for name, folder in named(mix.sources).items()
    ]
    weights = {name: float(text) for name, text in named(mix.weights).items()}
    if not weights:
        return found
    # The source that has least for its weight is taken whole.
    room = {each.name: each.report["characters"]["kept"] / weights[each.name] for each in found}
    least = min(room.values())
    return [dataclasses.replace(each, share=least / room[each.name]) for each in found]


def _source(name: str, place: str, licence: str) -> Source:
    before, mark, part = place.rpartition(PART)
    folder = Path(before if mark else place)
    path = folder / REPORT
    if not path.is_file():
        raise InputMissing(
            f"the source {name!r} is no finished corpus",
            where=str(folder),
            why=f"it has no {REPORT}",
            fix=f"find . -name {REPORT}",
        )
    try:
        content = path.read_bytes()
        report = json.loads(content)
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        itemgetter("stages", "dedup")(recipe["recipe"])
        kept = tuple(
            (each, Written(**fields))
            for each, fields in report["files"].items()
            if each.startswith("kept/")
        )
        if mark:
            report |= report["parts"][part]
            kept = tuple(file for file in kept if int(Path(file[0]).stem) in report["units"])
            parts = recipe["recipe"]["parts"]
            recipe["files"] = [file for file in recipe["files"] if part_of(parts, file[0]) == part]
        if not kept or not report["characters"]["kept"] > 0:
            raise DataError(
                f"the source {name!r} kept nothing",
                where=str(path),
                why=f"it read {report['characters']['read']:,} characters"
                if "read" in report["characters"]
                else "its report names no kept files",
                fix="leave it out of --config.sources",
            )
        itemgetter("funnel", "notes", "removed", "sample", "kept", "read")(report)
        digest = hashlib.sha256(content).hexdigest()
        return Source(name, folder, 1.0, licence, report, recipe, digest, kept)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the report of the source {name!r} cannot be read",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="the same jaxlm data run with another --out",
        ) from error


def _drawn(text: str) -> float:
    """A number from 0 to 1 that follows from a text, and is independent of the one that holds out."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"weight")
    return int.from_bytes(digest.digest(), "little") / 2**64
