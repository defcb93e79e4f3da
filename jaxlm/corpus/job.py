"""What a folder of output is made of: the recipe, its files, and how they are cut into units of work."""

import dataclasses
import fnmatch
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core import config, disk
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.corpus import remote
from jaxlm.corpus.config import WHOLE, Recipe
from jaxlm.corpus.files import changed
from jaxlm.corpus.filters.perplexity import MakeScorer
from jaxlm.corpus.mix.config import Shards, named
from jaxlm.corpus.readers import spans
from jaxlm.corpus.readers.files import can_cut, cut
from jaxlm.corpus.readers.spans import Span
from jaxlm.data.documents import Corpus

FORMAT_VERSION = 2
RECIPE, WORK, CLUSTERS = "recipe.json", "unfinished", "clusters.jsonl"
REPORT, PAGE = "report.json", "report.html"
LEAST_CUT = 2**20  # bytes: of less a part of a file is not worth its own files
VERDICTS, PATHS, SPANS = "verdicts", "paths.json", "spans.json"  # in WORK


class Piece(NamedTuple):
    """A file, or the part of one that is read by itself."""

    path: Path
    name: str
    size: int  # bytes
    span: int | None = None  # its number, where the file is cut


class Cut(NamedTuple):
    """How a file is cut, as it was at a time."""

    written: int  # when it was last, in nanoseconds
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """A recipe over files that are there. The units follow from it, so every process knows them.

    What is made of the clean documents afterwards is not in it: other shards need no other cleaning.
    """

    out: Path
    recipe: Recipe
    sample: float  # share of the records that is read
    files: tuple[tuple[Path, str, int], ...]  # path, name, bytes
    # Of files that are cut, by name; noted by `claim`.
    cuts: dict[str, Cut] = dataclasses.field(default_factory=dict)
    scorer: MakeScorer | None = None  # opens the model of the stage perplexity

    @classmethod
    def find(cls, recipe: Recipe, out: Path, sample: float) -> "Job":
        """The job of a recipe on the files that its patterns find now.

        Raises:
          InputMissing: where a pattern matches no file.
          ConfigError: where a file is in no part, or a part has no file.
        """
        recipe = dataclasses.replace(recipe, shards=Shards())
        files = remote.find(recipe)
        if recipe.parts:
            found = {part_of(recipe.parts, name) for _, name, _ in files}
            if empty := [name for name in recipe.part_names if name not in found]:
                others = [each for each in recipe.parts if each.partition("=")[0] in found]
                raise ConfigError(
                    f"no file is in the part {empty[0]!r}",
                    where="parts",
                    why="its pattern matches no name, or only names that a part before it has",
                    fix=f"--config.parts='{','.join(others)}'",
                )
            order = {name: number for number, name in enumerate(recipe.part_names)}
            files.sort(
                key=lambda file: order[part_of(recipe.parts, file[1])]
            )  # stable: by name in each
        return cls(out, recipe, sample, tuple(files))

    @property
    def units(self) -> list[list[Piece]]:
        """Files of a part in order, as many together as hold `unit_bytes`; one that holds more is cut where it can be.

        They follow from names and sizes: a file that is written anew in as many bytes is in the same units.
        """
        units: list[list[Piece]] = []
        room, before = 0, ""
        for piece in itertools.chain.from_iterable(map(self._pieces, self.files)):
            part = part_of(self.recipe.parts, piece.name)
            if piece.size > room or part != before:
                units.append([])
                room, before = self.recipe.unit_bytes, part
            units[-1].append(piece)
            room -= piece.size
        return units

    @property
    def _most(self) -> int:
        """Bytes of a file above which it is cut."""
        return max(self.recipe.unit_bytes, LEAST_CUT)

    def _pieces(self, file: tuple[Path, str, int]) -> list[Piece]:
        path, name, size = file
        most = self._most
        if size <= most or not can_cut(name):
            return [Piece(*file)]
        return [
            Piece(path, name, min(most, size - number * most), number)
            for number in range(spans.count(size, most))
        ]

    def span(self, piece: Piece) -> Span | None:
        """What is read of a file that is cut.

        Raises:
          DataError: where the file was written since it was cut.
        """
        if piece.span is None:
            return None
        noted = self.cuts[piece.name]
        if piece.path.stat().st_mtime_ns != noted.written:
            raise DataError(
                "a file was written while it is read",
                where=str(piece.path),
                why="it was cut into parts before, which begin elsewhere now",
                fix="the same command again, once it stays as it is",
            )
        return noted.spans[piece.span]

    def is_in(self, file: str, record: int) -> bool:
        """Whether a record is in the sample: by a number drawn from its place, the same in every run."""
        if self.sample >= 1:
            return True
        drawn = hashlib.blake2b(
            f"{file}\0{record}".encode(errors="replace"), digest_size=8
        ).digest()
        return int.from_bytes(drawn, "little") < self.sample * 2**64

    def claim(self, say: Callable[[str], None]) -> "Job":
        """Notes what is made here, or finds that it is what was noted before. Gives the job with its files cut.

        Raises:
          ConfigError: where another recipe or other files were.
          DataError: where the folder holds something else.
        """
        noted = self.out / RECIPE
        mine = {
            "format_version": FORMAT_VERSION,
            "sample": self.sample,
            "recipe": config.to_json(self.recipe),
            "beside": _beside(self.recipe),
            "files": [[name, size] for _, name, size in self.files],
        }
        if noted.exists():
            self._compare(mine, _noted(noted))
        elif any(not path.name.startswith(".") for path in self.out.iterdir()):
            raise DataError(
                "the output folder holds something else",
                where=str(self.out),
                why=f"it has no {RECIPE}, so it was not begun by this command",
                fix=f"--out={self.out}-2",
            )
        # First of all: by it the folder is known to be ours, whenever a kill comes.
        if not noted.exists():
            disk.replace(noted, json.dumps(mine, indent=1).encode())
        (self.out / WORK).mkdir(exist_ok=True)
        paths = [os.path.abspath(path) for path, _, _ in self.files]
        disk.replace(self.out / WORK / PATHS, json.dumps(paths).encode())
        job = dataclasses.replace(self, cuts=self._cut(say))
        disk.replace(self.out / WORK / SPANS, json.dumps(job.cuts).encode())
        return job

    def _cut(self, say: Callable[[str], None]) -> dict[str, Cut]:
        """How each large file is cut: as it was noted where it was not written since, or where all are read."""
        noted = _cuts(self.out)
        if (self.out / WORK / VERDICTS).exists() or (self.out / REPORT).exists():
            return noted
        cuts = {}
        for piece in itertools.chain.from_iterable(self.units):
            if piece.span is None or piece.name in cuts:
                continue
            before, written = noted.get(piece.name), piece.path.stat().st_mtime_ns
            if before is None or before.written != written:
                say(f"{piece.name} is cut into parts, for which its records are counted")
                parts = cut(piece.path, piece.name, self._most)
                before = Cut(written, tuple(parts))
            cuts[piece.name] = before
        return cuts

    @classmethod
    def read(cls, out: Path) -> "Job":
        """The job that a folder was claimed for, as its workers read it."""
        noted = json.loads((out / RECIPE).read_text(encoding="utf-8"))
        paths = json.loads((out / WORK / PATHS).read_text(encoding="utf-8"))
        files = tuple(
            (Path(path), name, size)
            for path, (name, size) in zip(paths, noted["files"], strict=True)
        )
        recipe = config.from_json(Recipe, noted["recipe"])
        return cls(out, recipe, noted["sample"], files, _cuts(out))

    def _compare(self, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        differ = [name for name in mine if mine[name] != theirs.get(name)]
        if not differ:
            return
        why = f"{', '.join(differ)} differ"
        if differ == ["recipe"]:
            before = config.from_json(Recipe, theirs["recipe"])
            changes = config.diff(before, self.recipe)
            why = "; ".join(map(str, changes[:5]))
        raise ConfigError(
            "the output folder was begun with another recipe or other files",
            where=str(self.out / RECIPE),
            why=why,
            fix=f"--out={self.out}-2",
        )


def part_of(parts: tuple[str, ...], name: str) -> str:
    """The part that a file belongs to, by its name: the first whose pattern matches, in which * crosses folders.

    Raises:
      ConfigError: where none does.
    """
    for part, pattern in named(parts).items():
        if fnmatch.fnmatchcase(name, pattern):
            return part
    if parts:
        raise ConfigError(
            "a file is in no part",
            where="parts",
            why=f"{name} matches none of {', '.join(named(parts).values())}",
            fix=f"--config.parts='{','.join((*parts, 'other=*'))}'",
        )
    return WHOLE


def _cuts(out: Path) -> dict[str, Cut]:
    """How files were cut, as it was noted."""
    path = out / WORK / SPANS
    found = json.loads(path.read_bytes()) if path.exists() else {}
    return {
        name: Cut(written, tuple(Span(*each) for each in each_span))
        for name, (written, each_span) in found.items()
    }


def _noted(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise changed(path)


def _beside(recipe: Recipe) -> dict[str, str]:
    """The digest of every list and evaluation set that the stages read, and of earlier reports."""
    asked = {"urls": ("urls.blocked", recipe.urls.blocked)}
    asked["decontaminate"] = ("decontaminate.against", recipe.decontaminate.against)
    asked["against"] = ("against", tuple(f"{folder}/{REPORT}" for folder in recipe.against))
    asked["quality"] = ("quality.model", (f"{recipe.quality.model}/*",))
    run = recipe.perplexity.run
    asked["perplexity"] = (
        "perplexity.run",
        (f"{run}/config.json", f"{run}/checkpoints/*/digests.json"),
    )
    lists = recipe.harmful.words
    judge = (f"{recipe.harmful.model}/*",) if recipe.harmful.model else ()
    asked["harmful"] = ("harmful.words", (*lists, *judge))
    found = {}
    for stage, (setting, patterns) in asked.items():
        if stage in (*recipe.stages, "against"):
            corpus = Corpus.find(patterns, recipe.text_key, setting)
            for path, name in zip(corpus.files, corpus.names, strict=True):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
