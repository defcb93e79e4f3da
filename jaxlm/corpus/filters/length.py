"""Length limits."""

from collections import Counter

from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import Length


def length(config: Length) -> Stage:
    """Keep documents with a length between two limits."""

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        size = len(document.text)
        if size < config.least:
            return Removed("short", f"{size} characters")
        if size > config.most:
            return Removed("long", f"{size} characters")
        return document

    return stage
