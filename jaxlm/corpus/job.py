"""The job of an output folder: the recipe, its files, and how they are divided into units."""

import dataclasses
import fnmatch
import hashlib
import itertools
import json
import operator
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxlm.core import config, disk
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.corpus import remote
from jaxlm.corpus.config import WHOLE, Recipe
from jaxlm.corpus.files import read_object
from jaxlm.corpus.filters.models import MakeScorer
from jaxlm.corpus.mix.config import ShardSettings, named
from jaxlm.corpus.readers import spans
from jaxlm.corpus.readers.files import can_cut, cut
from jaxlm.corpus.readers.spans import FileSpan
from jaxlm.data.documents import UNFINISHED, Corpus

FORMAT_VERSION = 3
RECIPE, WORK, CLUSTERS = "recipe.json", UNFINISHED, "clusters.jsonl"
REPORT, PAGE = "report.json", "report.html"
MIN_PART_BYTES = 2**20  # a smaller part of a file is not worth output files of its own
_T = TypeVar("_T")
VERDICTS, PATHS, SPANS = "verdicts", "paths.json", "spans.json"  # in WORK


class FilePart(NamedTuple):
    """A file, or a part of one that is read by itself."""

    path: Path
    name: str
    size: int  # bytes
    span: int | None = None  # number of the part, if the file is divided


class DividedFile(NamedTuple):
    """The parts of a file at a given modification time."""

    written: int  # modification time in nanoseconds
    spans: tuple[FileSpan, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """A recipe over existing files. Its units follow from it, so every process derives the same.

    The settings of shards are not included: other shards need no new cleaning.
    """

    out: Path
    recipe: Recipe
    sample: float  # share of the records to read
    files: tuple[tuple[Path, str, int], ...]  # path, name, bytes
    # Parts of divided files, by name; `claim` records them.
    cuts: dict[str, DividedFile] = dataclasses.field(default_factory=dict)
    scorer: MakeScorer | None = None  # opens the model of the stage perplexity

    @classmethod
    def find(cls, recipe: Recipe, out: Path, sample: float) -> "Job":
        """Return the job of a recipe on the files that its patterns match now.

        Raises InputMissing if a pattern matches none, ConfigError if a file belongs to no part or a
        part has no file.
        """
        recipe = dataclasses.replace(recipe, shards=ShardSettings())
        files = remote.find(recipe)
        if recipe.parts:
            nonempty = {part_of(recipe.parts, name) for _, name, _ in files}
            if empty := [name for name in recipe.part_names if name not in nonempty]:
                others = [each for each in recipe.parts if each.partition("=")[0] in nonempty]
                what = f"the part {empty[0]!r} has no file"
                why = "its pattern matches no name, or only names of parts before it"
                fix = f"--config.parts='{','.join(others)}'"
                raise ConfigError(what, where="parts", why=why, fix=fix)
            # The sort is stable: files of a part stay in order of their names.
            files.sort(key=lambda file: recipe.part_names.index(part_of(recipe.parts, file[1])))
        return cls(out, recipe, sample, tuple(files))

    @property
    def units(self) -> list[list[FilePart]]:
        """Group files of a part, in order, up to `unit_bytes`; divide larger files if possible.

        Units depend on names and sizes only: a file rewritten at the same size keeps its units.
        """
        pieces = itertools.chain.from_iterable(map(self._pieces, self.files))
        parts = itertools.groupby(pieces, lambda each: part_of(self.recipe.parts, each.name))
        size, most = operator.attrgetter("size"), self.recipe.unit_bytes
        return [unit for _, group in parts for unit in grouped(group, size, most)]

    @property
    def _most(self) -> int:
        """Size above which a file is divided."""
        return max(self.recipe.unit_bytes, MIN_PART_BYTES)

    def _pieces(self, file: tuple[Path, str, int]) -> list[FilePart]:
        (path, name, size), most = file, self._most
        if size <= most or not can_cut(name):
            return [FilePart(*file)]
        numbers = range(spans.count(size, most))
        return [FilePart(path, name, min(most, size - n * most), n) for n in numbers]

    def span(self, piece: FilePart) -> FileSpan | None:
        """Return the span of a part of a file. Raises DataError if it was written since divided."""
        if piece.span is None:
            return None
        noted = self.cuts[piece.name]
        if piece.path.stat().st_mtime_ns != noted.written:
            raise DataError(
                "a file changed while it was read",
                where=str(piece.path),
                why="it was divided before the change, and its records may begin elsewhere now",
                fix="the same command again, once the file no longer changes",
            )
        return noted.spans[piece.span]

    def is_in(self, file: str, record: int) -> bool:
        """Return whether a record is in the sample, by a hash of its file and number."""
        if self.sample >= 1:
            return True
        place = f"{file}\0{record}".encode(errors="replace")
        drawn = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")
        return drawn < self.sample * 2**64

    def claim(self, log: Log) -> "Job":
        """Record the job in its folder, or check that the recorded job is the same.

        Return the job with its large files divided. Raises ConfigError if the folder belongs to
        another recipe or other files, DataError if it contains something else.
        """
        path = self.out / RECIPE
        mine: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "sample": self.sample,
            "recipe": config.to_json(self.recipe),
            **dict(beside=_inputs_digests(self.recipe)),
            "files": [[name, size] for _, name, size in self.files],
        }
        if path.exists():
            theirs = read_object(path)
            if differ := [name for name in mine if mine[name] != theirs.get(name)]:
                why = f"{', '.join(differ)} differ"
                if differ == ["recipe"]:
                    changes = config.diff(config.from_json(Recipe, theirs["recipe"]), self.recipe)
                    why = "; ".join(map(str, changes[:5]))
                what = "the output folder belongs to another recipe or other files"
                fix = shlex.quote(f"--out={self.out}-2")
                raise ConfigError(what, where=str(path), why=why, fix=fix)
        elif any(not each.name.startswith(".") for each in self.out.iterdir()):
            raise other_files(self.out)
        else:  # first, so that the folder is recognized even if the process is killed next
            disk.replace(path, json.dumps(mine, indent=1).encode())
        (self.out / WORK).mkdir(exist_ok=True)
        paths = [os.path.abspath(path) for path, _, _ in self.files]
        disk.replace(self.out / WORK / PATHS, json.dumps(paths).encode())
        job = dataclasses.replace(self, cuts=self._cut(log))
        disk.replace(self.out / WORK / SPANS, json.dumps(job.cuts).encode())
        return job

    def _cut(self, log: Log) -> dict[str, DividedFile]:
        """Divide large files; keep the recorded spans of unchanged files, or of read ones."""
        noted = _cuts(self.out)
        if (self.out / WORK / VERDICTS).exists() or (self.out / REPORT).exists():
            return noted
        cuts, limit = {}, self.recipe.reading.document_bytes
        for piece in itertools.chain.from_iterable(self.units):
            if piece.span is None or piece.name in cuts:
                continue
            before, written = noted.get(piece.name), piece.path.stat().st_mtime_ns
            if before is None or before.written != written:
                log(f"{piece.name} is divided into parts; counting its records")
                parts = cut(piece.path, piece.name, self._most, limit)
                before = DividedFile(written, tuple(parts))
            cuts[piece.name] = before
        return cuts

    @classmethod
    def read(cls, out: Path) -> "Job":
        """Load the job of a claimed folder, in a worker."""
        noted = json.loads((out / RECIPE).read_text(encoding="utf-8"))
        paths = json.loads((out / WORK / PATHS).read_text(encoding="utf-8"))
        files = tuple(
            (Path(path), name, size)
            for path, (name, size) in zip(paths, noted["files"], strict=True)
        )
        recipe = config.from_json(Recipe, noted["recipe"])
        return cls(out, recipe, noted["sample"], files, _cuts(out))


def grouped(items: Iterable[_T], size: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield adjacent items in groups of at most `most` bytes; a larger item has its own group.

    Example:
      >>> list(grouped([3, 4, 9, 1], int, 8))
      [[3, 4], [9], [1]]
    """
    group: list[_T] = []
    room = most
    for item in items:
        if group and size(item) > room:
            yield group
            group, room = [], most
        group.append(item)
        room -= size(item)
    if group:
        yield group


def other_files(out: Path) -> DataError:
    """Return the error for an output folder that this command did not create."""
    why = f"it has no {RECIPE}, so this command did not create it"
    fix = shlex.quote(f"--out={out}-2")
    return DataError("the output folder contains other files", where=str(out), why=why, fix=fix)


def require_finished(folder: Path, what: str, where: str) -> None:
    """Raise InputMissing with the message `what` if a folder contains no finished run."""
    if not (folder / REPORT).is_file():
        fix, why = f"find . -name {REPORT}", f"it has no {REPORT}"
        if (folder / RECIPE).is_file():
            fix = "repeat the `jaxlm data run` that began it, which continues"
            why += f": `jaxlm data run --out={folder}` has not finished"
        raise InputMissing(what, where=where, why=why, fix=fix)


def part_of(parts: tuple[str, ...], name: str) -> str:
    """Return the part of a file: the first whose pattern matches its name; * crosses folders.

    Raises ConfigError if no pattern matches.

    Example:
      >>> part_of(("web=crawl/*", "other=*"), "crawl/2024/a.warc.gz")
      'web'
    """
    for part, pattern in named(parts).items():
        if fnmatch.fnmatchcase(name, pattern):
            return part
    if parts:
        why = f"{name} matches none of {', '.join(named(parts).values())}"
        fix = f"--config.parts='{','.join((*parts, 'other=*'))}'"
        raise ConfigError("a file belongs to no part", where="parts", why=why, fix=fix)
    return WHOLE


def _cuts(out: Path) -> dict[str, DividedFile]:
    """Return the recorded spans of divided files."""
    path = out / WORK / SPANS
    recorded = json.loads(path.read_bytes()) if path.exists() else {}
    return {
        name: DividedFile(written, tuple(FileSpan(*each) for each in each_span))
        for name, (written, each_span) in recorded.items()
    }


def _inputs_digests(recipe: Recipe) -> dict[str, str]:
    """Digest every list, model and evaluation set that the stages read, and earlier reports."""
    run, judge = recipe.perplexity.run, recipe.harmful.model
    inputs = {
        "urls": ("urls.blocked", recipe.urls.blocked),
        "decontaminate": ("decontaminate.against", recipe.decontaminate.against),
        "against": ("against", tuple(f"{folder}/{REPORT}" for folder in recipe.against)),
        "quality": ("quality.model", (f"{recipe.quality.model}/*",)),
        "perplexity": (
            "perplexity.run",
            (f"{run}/config.json", f"{run}/checkpoints/*/digests.json"),
        ),
        "harmful": ("harmful.words", (*recipe.harmful.words, *([f"{judge}/*"] if judge else []))),
    }
    digests = {}
    for stage, (setting, patterns) in inputs.items():
        if stage in (*recipe.stages, "against"):
            corpus = Corpus.find(patterns, recipe.text_key, setting)
            for path, name in zip(corpus.files, corpus.names, strict=True):
                digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests
