"""Filters of jaxlm against the same ones of datatrove, on the same documents, on one core.

    pip install datatrove nltk regex 'xxhash<4' tldextract spacy orjson
    python scripts/bench_datatrove.py [--source='texts/**/*.html'] [--megabytes=2] [--turns=5]

The sides take turns. datatrove cuts English into words with spaCy; a second arm gives it a
tokenizer that splits at white space, so that the filter is the remaining cost. Time is that of the
process; the median of the turns is shown, and the median of their ratios. The last row reads JSON
lines, passes five stages, and writes JSON lines; jaxlm also writes all removed documents.
"""

import argparse
import contextlib
import functools
import io
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datatrove.data import CorpusDocument as Theirs
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.text import split_into_parts
from datatrove.utils.word_tokenizers import WordTokenizer

from jaxlm.corpus import run
from jaxlm.corpus.config import MinHash, Pii, Recipe, StageName
from jaxlm.corpus.dedup import minhash
from jaxlm.corpus.document import CorpusDocument
from jaxlm.corpus.readers.files import read
from jaxlm.corpus.stages import MAKERS
from jaxlm.data.documents import Corpus

STAGES: tuple[StageName, ...] = "gopher", "repetition", "c4", "fineweb", "pii"
BANDS = MinHash(bands=14)  # as many values as datatrove's default


class WhiteSpace(WordTokenizer):
    """Words as jaxlm takes them."""

    _ends = re.compile(r"(?<=[.!?])\s+")

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return self._ends.split(text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = [*(match.end() for match in self._ends.finditer(text)), len(text)]
        return list(zip([0, *ends[:-1]], ends, strict=True))


def ours(recipe: Recipe) -> dict[str, Callable[[CorpusDocument], object]]:
    counts: Counter[str] = Counter()

    def work(
        stage: Callable[[CorpusDocument, Counter[str]], object], each: CorpusDocument
    ) -> object:
        return stage(each, counts)

    arms: dict[str, Callable[[CorpusDocument], object]] = {
        name: functools.partial(work, MAKERS[name](recipe, None)) for name in STAGES
    }
    return arms | {"minhash": lambda each: minhash.signature(each.text, BANDS)}


def theirs(
    language: str | WordTokenizer, folder: str
) -> dict[str, Callable[[CorpusDocument], object]]:
    filters = {
        "gopher": GopherQualityFilter(language=language),
        "repetition": GopherRepetitionFilter(language=language),
        "c4": C4QualityFilter(language=language),
        "fineweb": FineWebQualityFilter(language=language),
    }
    pii = PIIFormatter()
    signer = MinhashDedupSignature(folder, MinhashConfig(), language=language)

    def work(stage: Any, each: CorpusDocument) -> object:
        return stage.filter(Theirs(each.text, "1"))

    arms: dict[str, Callable[[CorpusDocument], object]] = {
        name: functools.partial(work, stage) for name, stage in filters.items()
    }
    arms["pii"] = lambda each: pii.format(each.text)
    return arms | {"minhash": lambda each: signer.get_signature(signer.get_shingles(each.text))}


def _over(work: Callable[[CorpusDocument], object], documents: list[CorpusDocument]) -> None:
    for document in documents:
        work(document)


def seconds(work: Callable[[], object]) -> float:
    """Seconds of a core that a call takes."""
    split_into_parts.cache_clear()
    begun = time.process_time()
    work()
    return time.process_time() - begun


def show(name: str, size: float, turns: list[list[float]]) -> None:
    """A row: megabytes a second of each arm, and how many times as fast the first is."""
    speeds = [statistics.median(size / spent for spent in arm) for arm in turns]
    ratios = [
        statistics.median(other / mine for mine, other in zip(turns[0], arm, strict=True))
        for arm in turns[1:]
    ]
    cells = "".join(f"{speed:>14.2f}" for speed in speeds)
    print(f"{name:<12}{cells}{''.join(f'{ratio:>10.1f}x' for ratio in ratios)}", flush=True)


def documents(patterns: tuple[str, ...], most: float) -> list[CorpusDocument]:
    corpus = Corpus.find(patterns, "text", "source")
    texts: list[CorpusDocument] = []
    size = 0
    for path, name in zip(corpus.files, corpus.names, strict=True):
        for each in read(path, name, Recipe(source=patterns), Counter()):
            if isinstance(each, CorpusDocument) and each.text.strip():
                texts.append(each)
                size += len(each.text)
        if size > most:
            break
    return texts


def whole(
    corpus: list[CorpusDocument], recipe: Recipe, folder: Path
) -> tuple[Callable[[], object], ...]:
    """From a file to a file: ours, and theirs with either tokenizer."""
    source = folder / "in" / "texts.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": each.text, "id": str(n)}) for n, each in enumerate(corpus))
    source.write_text("".join(f"{line}\n" for line in lines))
    recipe = Recipe(source=(str(source),), stages=STAGES, dedup=(), pii=recipe.pii)

    def pipeline(language: str | WordTokenizer) -> None:
        out = tempfile.mkdtemp(dir=folder)
        steps = [
            JsonlReader(str(source.parent)),
            GopherQualityFilter(language=language),
            GopherRepetitionFilter(language=language),
            C4QualityFilter(language=language),
            FineWebQualityFilter(language=language),
            PIIFormatter(),
            JsonlWriter(f"{out}/kept", compression=None),
        ]
        with contextlib.redirect_stderr(io.StringIO()):
            LocalPipelineExecutor(steps, logging_dir=f"{out}/logs").run()

    return (
        lambda: run.run(recipe, Path(tempfile.mkdtemp(dir=folder)) / "out"),
        lambda: pipeline("eng"),
        lambda: pipeline(WhiteSpace()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", default="stdlib:train")
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    recipe = Recipe(pii=Pii(kinds=("email", "ip")))  # all that datatrove looks for
    corpus = documents((arguments.source,), arguments.megabytes * 1e6)
    size = sum(len(each.text) for each in corpus) / 1e6
    print(f"{len(corpus)} documents, {size:.1f} MB; MB/s of a core, and how many times as fast")
    print(f"{'':<12}{'jaxlm':>14}{'spaCy':>14}{'white space':>14}{'spaCy':>11}{'white':>11}")
    with tempfile.TemporaryDirectory() as place:
        arms = [ours(recipe), theirs("eng", place), theirs(WhiteSpace(), place)]
        for name in arms[0]:
            for arm in arms:
                arm[name](corpus[0])  # what is loaded with the first is loaded
            turns: list[list[float]] = [[] for _ in arms]
            for _ in range(arguments.turns):
                for arm, spent in zip(arms, turns, strict=True):
                    spent.append(seconds(functools.partial(_over, arm[name], corpus)))
            show(name, size, turns)
        jobs = whole(corpus, recipe, Path(place))
        turns = [[] for _ in jobs]
        for _ in range(arguments.turns):
            for job, spent in zip(jobs, turns, strict=True):
                spent.append(seconds(job))
        show("all, files", size, turns)


if __name__ == "__main__":
    main()
