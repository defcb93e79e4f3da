"""How surprising a text is to a small model."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from jaxlm.core.errors import InputMissing
from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import Perplexity

# The perplexity of a text; None of one in which nothing follows anything.
Scorer = Callable[[str], float | None]
MakeScorer = Callable[[Perplexity], Scorer]


def perplexity(config: Perplexity, make: MakeScorer | None) -> Stage:
    """Documents whose perplexity is between two limits; it goes to the meta.

    `make` opens the model, which needs an accelerator's library that cleaning does without: at the first document.

    Raises:
      InputMissing: where there is no such run, or nobody handed a scorer in.

    Source: Wenzek et al. 2020, arXiv:1911.00359, §3.3, with thresholds in place of thirds.
    """
    if make is None or not (Path(config.run) / "config.json").is_file():
        raise InputMissing(
            f"there is no run in {config.run}" if make else "there is nothing to score texts with",
            where="perplexity.run",
            why="it has no config.json"
            if make
            else "only the command `jaxlm data run` hands it in",
            fix="find . -name checkpoints",
        )
    scorers: list[Scorer] = []

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        if not scorers:
            scorers.append(make(config))
        found = scorers[0](document.text)
        if found is None:
            counts["perplexity: too short to have one"] += 1
            return document
        value = float(f"{found:.4g}")
        if value > config.most:
            return Removed("high", f"{value:g}")
        if value < config.least:
            return Removed("low", f"{value:g}")
        return document.with_text(document.text, perplexity=value)

    return stage
