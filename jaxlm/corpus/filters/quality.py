"""Quality classification."""

from collections import Counter
from pathlib import Path

from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import Quality
from jaxlm.corpus.filters.linear import LinearClassifier


def quality(config: Quality) -> Stage:
    """Keep documents with a high probability of the label; it becomes metadata.

    Raises:
      InputMissing: there is no classifier.
      ConfigError: the classifier lacks the label.
    """
    model = LinearClassifier.read(Path(config.model), "quality.model")
    index = model.number(config.label, "quality.label")

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        probability = round(float(model.probabilities(document.text)[index]), 4)
        if probability < config.least:
            return Removed("low", f"{config.label} {probability}")
        return document.with_text(document.text, quality=probability)

    return stage
