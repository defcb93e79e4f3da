"""Cleaned corpora as sources of a mix, and the units of work into which a mix divides them."""

import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from jaxlm.core import config, faults
from jaxlm.core.errors import DataError
from jaxlm.corpus.engines import Task
from jaxlm.corpus.files import FileDigest, checked_lines
from jaxlm.corpus.job import RECIPE, REPORT, WORK, grouped, part_of, require_finished
from jaxlm.corpus.mix.config import Mix, named
from jaxlm.data import cache, tokenizer_file, writer
from jaxlm.data.parts import SplitSide
from jaxlm.data.records import Document, LeftOut
from jaxlm.data.tokenizer import Tokenizer

BY_WEIGHT = "by its source's weight"  # reason for a dropped document
PART = "!"  # in FOLDER!PART


@dataclasses.dataclass(frozen=True)
class MixSource:
    """A finished output folder of `jaxlm data run`, or one of its parts."""

    name: str
    folder: Path
    share: float  # of its documents that are taken
    licence: str
    report: dict[str, Any]  # with the counts of the part
    recipe: dict[str, Any]  # recipe.json: the recipe, the files of the part
    sha256: str  # of its report, which contains the digest of every file
    files: tuple[tuple[str, FileDigest], ...]  # kept documents: path in the folder

    def documents(
        self, files: Sequence[tuple[str, FileDigest]], selection: SplitSide, counts: Counter[str]
    ) -> Iterator[Document]:
        """Yield the documents of some files that are taken and on one side of a split.

        The others are counted. Raises DataError if a file has changed.
        """
        offset = 0
        for name, written in files:
            for number, line in enumerate(checked_lines(self.folder / name, written)):
                offset += len(line)
                text = json.loads(line)["text"]
                if self.share < 1 and _drawn(text) >= self.share:
                    counts[BY_WEIGHT] += 1
                elif selection.take(text):
                    yield Document(text, f"{self.name}/{name}", number, offset)


def find(mix: Mix) -> list[MixSource]:
    """Return the sources of a mix, in order.

    Raises InputMissing if a folder contains no finished run, DataError if its report cannot be read
    or it kept nothing.
    """
    places, licences = named(mix.sources), named(mix.licences)
    sources = [_source(name, places[name], licences.get(name, "")) for name in places]
    weights = {name: float(text) for name, text in named(mix.weights).items()}
    if not weights:
        return sources
    # The source with the least text relative to its weight is taken whole.
    room = {each.name: each.report["characters"]["kept"] / weights[each.name] for each in sources}
    least = min(room.values())
    return [dataclasses.replace(each, share=least / room[each.name]) for each in sources]


def _source(name: str, place: str, licence: str) -> MixSource:
    before, mark, part = place.rpartition(PART)
    folder = Path(before if mark else place)
    path = folder / REPORT
    require_finished(folder, f"the source {name!r} is not a finished corpus", str(folder))
    try:
        content = path.read_bytes()
        report = json.loads(content)
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        itemgetter("stages", "dedup")(recipe["recipe"])
        files = tuple(
            (each, FileDigest(**fields))
            for each, fields in report["files"].items()
            if each.startswith("kept/")
        )
        if mark:
            report |= report["parts"][part]
            files = tuple(file for file in files if int(Path(file[0]).stem) in report["units"])
            parts = recipe["recipe"]["parts"]
            recipe["files"] = [file for file in recipe["files"] if part_of(parts, file[0]) == part]
        if not files or not report["characters"]["kept"] > 0:
            what, why = f"the source {name!r} kept no documents", "its report lists no kept files"
            if "read" in report["characters"]:
                why = f"of {report['characters']['read']:,} characters read"
            raise DataError(what, where=str(path), why=why, fix="leave it out of --config.sources")
        itemgetter("funnel", "notes", "removed", "sample", "kept", "read")(report)
        digest = hashlib.sha256(content).hexdigest()
        return MixSource(name, folder, 1.0, licence, report, recipe, digest, files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the report of the source {name!r} could not be read",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="the same jaxlm data run with another --out",
        ) from error


def _drawn(text: str) -> float:
    """Hash a text to [0, 1), independently of the hash that selects held-out documents."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"weight")
    return int.from_bytes(digest.digest(), "little") / 2**64


TRAIN, VALIDATION, COUNTS, TOKENIZER = "train", "validation", "counts.json", "tokenizer"


@dataclasses.dataclass(frozen=True)
class TokenizeTask:
    """The task that runs units of the mix in a folder; pickled to the process that runs it."""

    out: Path

    def __call__(self) -> Task:
        noted = json.loads((self.out / RECIPE).read_text(encoding="utf-8"))
        mix = config.from_json(Mix, noted["mix"])
        return MixUnits(self.out, mix, find(mix)).tokenize


@dataclasses.dataclass(frozen=True)
class MixUnits:
    """A mix divided into units. They follow from it, so every process derives the same."""

    out: Path
    mix: Mix
    sources: list[MixSource]

    @functools.cached_property
    def parts(self) -> list[tuple[MixSource, list[tuple[str, FileDigest]]]]:
        """Files of each source, in order, grouped up to `unit_bytes`."""
        return [
            (source, unit)
            for source in self.sources
            for unit in grouped(source.files, lambda file: file[1].bytes, self.mix.unit_bytes)
        ]

    @property
    def sides(self) -> dict[str, SplitSide]:
        """Train, and validation if documents are held out."""
        if not (share := self.mix.held_out):
            return {TRAIN: SplitSide()}
        sides = {TRAIN: False, VALIDATION: True}
        return {side: SplitSide("documents", share, is_held) for side, is_held in sides.items()}

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        path = self.out / WORK / TOKENIZER
        return tokenizer_file.load(path.read_bytes(), str(path))

    def tokenized(self, number: int) -> Path:
        """Return the folder of a unit until all are done: shards by split."""
        return self.out / WORK / f"{number:05d}"

    def tokenize(self, number: int) -> dict[str, float]:
        """Write the shards of a unit; return CPU seconds."""
        begun = time.process_time()
        source, files = self.parts[number]
        names = [f"{source.name}/{name}" for name, _ in source.files]
        with cache.built(self.tokenized(number)) as folder:
            if folder is not None:
                counts = {side: Counter[str]() for side in self.sides}
                for side, selection in self.sides.items():
                    documents = source.documents(files, selection, counts[side])
                    if (first := next(documents, None)) is not None:
                        stream = itertools.chain([first], documents)
                        writer.write(folder / side, stream, self._tokenizer, LeftOut(), files=names)
                (folder / COUNTS).write_text(json.dumps(counts[TRAIN]), encoding="utf-8")
                faults.point("prepare.tokenize", number)
        return {"tokenize": time.process_time() - begun}
