"""How long a document may be."""

from collections import Counter

from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import Length


def length(config: Length) -> Stage:
    """Characters between two limits."""

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        size = len(document.text)
        if size < config.least:
            return Removed("short", f"{size} characters")
        if size > config.most:
            return Removed("long", f"{size} characters")
        return document

    return stage
