"""Megabytes a second on one core, of each stage of a recipe, on Python's own library.

    python scripts/bench_prepare.py [--source='texts/**/*'] [--megabytes=4]

A reader's rate is in bytes of its files, by their ending; all other rates are in characters. Every
stage gets the same documents, including those that another would have removed, so that each is
measured on all of the text. Time is that of the process: other programs change little. Stages whose
package is not installed are left out. The last line names the functions in which the slowest stage
spends its time.
"""

import argparse
import cProfile
import functools
import pstats
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from jaxlm.core.errors import InputMissing
from jaxlm.corpus import remote
from jaxlm.corpus.config import Decontaminate, Recipe, Urls
from jaxlm.corpus.dedup.signatures import Signer
from jaxlm.corpus.document import CorpusDocument, to_line
from jaxlm.corpus.readers.files import read
from jaxlm.corpus.readers.streams import kind_of
from jaxlm.corpus.stages import MAKERS

PROFILED = 12  # functions


def _counted(
    stage: Callable[[CorpusDocument, Counter[str]], object],
    counts: Counter[str],
    document: CorpusDocument,
) -> object:
    return stage(document, counts)


def timed(
    name: str, work: Callable[[CorpusDocument], object], documents: Iterable[CorpusDocument]
) -> float:
    """Prints how fast something is done to every document. Gives a core's seconds."""
    size, begun = 0, time.process_time()
    for document in documents:
        work(document)
        size += len(document.text)
    seconds = time.process_time() - begun
    print(f"{name:<14}{size / 1e6 / seconds:>10.1f} MB/s", flush=True)
    return seconds


def read_all(recipe: Recipe, most: float) -> list[CorpusDocument]:
    """Read every nth file of a recipe's source, about `most` bytes; print the speed of readers."""
    files = remote.find(recipe)
    step = max(1, int(sum(size for *_, size in files) / most))
    documents: list[CorpusDocument] = []
    sizes, seconds = Counter[str](), defaultdict[str, float](float)
    for path, name, size in files[::step]:
        begun = time.process_time()
        records = list(read(path, name, recipe, Counter()))
        kind = kind_of(name) or "none"
        seconds[kind] += time.process_time() - begun
        sizes[kind] += size
        documents += [each for each in records if isinstance(each, CorpusDocument)]
    characters = sum(len(each.text) for each in documents)
    print(f"{len(documents)} documents, {characters / 1e6:.1f} MB")
    for kind, size in sizes.most_common():
        print(
            f"{'read ' + kind:<14}{size / 1e6 / seconds[kind]:>10.1f} MB/s of {size / 1e6:.1f} MB"
        )
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", default="stdlib:train", help="glob of files (Python's library)")
    parser.add_argument("--megabytes", type=float, default=4.0)
    args = parser.parse_args()
    recipe = Recipe(
        source=(args.source,),
        urls=Urls(blocked=(__file__,)),
        decontaminate=Decontaminate(against=(__file__,)),
    )
    documents = read_all(recipe, args.megabytes * 1e6)
    work: dict[str, Callable[[CorpusDocument], object]] = {}
    for name, maker in MAKERS.items():
        try:
            stage = maker(recipe, None)
        except InputMissing as error:
            print(f"{name:<14} {error.what}")
            continue
        work[name] = functools.partial(_counted, stage, Counter())
    for kind in ("exact", "near", "spans"):
        work[f"sign {kind}"] = Signer(Recipe(dedup=(kind,))).add
    work["write"] = to_line
    spent = {name: timed(name, each, documents) for name, each in work.items()}
    slowest = max(spent, key=spent.__getitem__)
    with cProfile.Profile() as profile:
        for document in documents:
            work[slowest](document)
    print(f"the slowest, {slowest}, by what its functions take themselves:")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(PROFILED)


if __name__ == "__main__":
    main()
