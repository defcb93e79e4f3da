"""Units of a mix: some files of one source, tokenized to shards of each split."""

import dataclasses
import functools
import itertools
import json
import time
from collections import Counter
from pathlib import Path

from jaxlm.core import config, faults
from jaxlm.corpus.files import FileDigest
from jaxlm.corpus.job import RECIPE, WORK
from jaxlm.corpus.mix import sources
from jaxlm.corpus.mix.config import Mix
from jaxlm.corpus.mix.sources import MixSource
from jaxlm.corpus.task import Task
from jaxlm.data import cache, tokenizer_file, writer
from jaxlm.data.parts import Selection
from jaxlm.data.tokenizer import Tokenizer

TRAIN, VALIDATION, COUNTS, TOKENIZER = "train", "validation", "counts.json", "tokenizer"


@dataclasses.dataclass(frozen=True)
class TokenizeTask:
    """The task that runs units of the mix in a folder; pickled to the process that runs it."""

    out: Path

    def __call__(self) -> Task:
        noted = json.loads((self.out / RECIPE).read_text(encoding="utf-8"))
        mix = config.from_json(Mix, noted["mix"])
        return MixUnits(self.out, mix, sources.find(mix)).tokenize


@dataclasses.dataclass(frozen=True)
class MixUnits:
    """A mix divided into units. They follow from it, so every process derives the same."""

    out: Path
    mix: Mix
    sources: list[MixSource]

    @functools.cached_property
    def parts(self) -> list[tuple[MixSource, list[tuple[str, FileDigest]]]]:
        """Files of each source, in order, grouped up to `unit_bytes`."""
        units: list[tuple[MixSource, list[tuple[str, FileDigest]]]] = []
        for source in self.sources:
            room = 0
            for file in source.files:
                if file[1].bytes > room or units[-1][0] is not source:
                    units.append((source, []))
                    room = self.mix.unit_bytes
                units[-1][1].append(file)
                room -= file[1].bytes
        return units

    @property
    def sides(self) -> dict[str, Selection]:
        """Train, and validation if documents are held out."""
        if not self.mix.held_out:
            return {TRAIN: Selection()}
        share = self.mix.held_out
        return {
            TRAIN: Selection("documents", share, False),
            VALIDATION: Selection("documents", share, True),
        }

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
        names = [source.shard_name(name) for name, _ in source.files]
        with cache.built(self.tokenized(number)) as folder:
            if folder is not None:
                counts = {side: Counter[str]() for side in self.sides}
                for side, selection in self.sides.items():
                    documents = source.documents(files, selection, counts[side])
                    if (first := next(documents, None)) is not None:
                        stream = itertools.chain([first], documents)
                        writer.write(folder / side, stream, self._tokenizer, Counter(), files=names)
                (folder / COUNTS).write_text(json.dumps(counts[TRAIN]), encoding="utf-8")
                faults.point("prepare.tokenize", number)
        return {"tokenize": time.process_time() - begun}
