"""Documents that a classifier of one's own takes for good ones."""

from collections import Counter
from pathlib import Path

from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import Quality
from jaxlm.corpus.filters.linear import Linear


def quality(config: Quality) -> Stage:
    """Documents whose probability of the label is high enough; it goes to the meta.

    Raises:
      InputMissing: where there is no classifier.
      ConfigError: where it lacks the label.
    """
    model = Linear.read(Path(config.model), "quality.model")
    wanted = model.number(config.label, "quality.label")

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        probability = round(float(model.probabilities(document.text)[wanted]), 4)
        if probability < config.least:
            return Removed("low", f"{config.label} {probability}")
        return document.with_text(document.text, quality=probability)

    return stage
