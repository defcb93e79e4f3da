"""Perplexity of a text under a small model."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from jaxlm.core.errors import InputMissing
from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.corpus.filters.config import Perplexity

# The perplexity of a text; None if it is too short to predict anything.
Scorer = Callable[[str], float | None]
MakeScorer = Callable[[Perplexity], Scorer]


def perplexity(config: Perplexity, make: MakeScorer | None) -> Stage:
    """Keep documents with a perplexity between two limits; it becomes metadata.

    `make` opens the model at the first document; it needs JAX, which cleaning does without.

    Raises:
      InputMissing: the run does not exist, or there is no scorer.

    Source: Wenzek et al. 2020, arXiv:1911.00359, §3.3, with thresholds in place of thirds.
    """
    if make is None or not (Path(config.run) / "config.json").is_file():
        raise InputMissing(
            f"there is no run in {config.run}" if make else "the stage perplexity has no scorer",
            where="perplexity.run",
            why="it has no config.json"
            if make
            else "only the command `jaxlm data run` provides one",
            fix="find . -name checkpoints",
        )
    scorers: list[Scorer] = []

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        if not scorers:
            scorers.append(make(config))
        score = scorers[0](document.text)
        if score is None:
            counts["perplexity: too short to have one"] += 1
            return document
        value = float(f"{score:.4g}")
        if value > config.most:
            return Removed("high", f"{value:g}")
        if value < config.least:
            return Removed("low", f"{value:g}")
        return document.with_text(document.text, perplexity=value)

    return stage
