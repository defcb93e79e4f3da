"""Comparison of generated texts with references: words in common, ROUGE, BLEU and chrF.

Example:
  >>> score("f1", "The cat sat.", "a cat sat down"), score("rouge_l", "the cat", "the big cat")
  (0.8, 0.8)
  >>> normalized("The  Cat, an ANIMAL!")
  'cat animal'
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from importlib import util
from typing import Any, Literal, get_args

Metric = Literal["normalized_match", "f1", "rouge_1", "rouge_2", "rouge_l", "bleu", "chrf"]
METRICS: tuple[Metric, ...] = get_args(Metric)
LOSSES = ("bits_per_byte", "nats_per_token")  # lower is better; other metrics are shares
OF_CORPORA: tuple[Metric, ...] = ("bleu", "chrf")  # by sacrebleu; also computed for all items
DRAWS = 1000  # of the bootstrap of corpus scores
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_WORD = re.compile(r"[^a-z0-9]+")


def needs_sacrebleu(metrics: Sequence[str]) -> bool:
    """Return whether a metric needs sacrebleu, which is not installed."""
    return bool(set(metrics) & set(OF_CORPORA)) and util.find_spec("sacrebleu") is None


def score(metric: str, text: str, reference: str) -> float:
    """Return the score of a text, from 0 to 1.

    `normalized_match` and `f1` compare `normalized` texts, whole or by word. ROUGE is the
    F-measure of single words, of pairs, and of the longest common subsequence, without stemming.
    BLEU and chrF are of the single text, with sacrebleu's defaults and effective order.

    Source: Rajpurkar et al. 2016, arXiv:1606.05250 (F1, the official script); Lin 2004, ROUGE;
    Post 2018, arXiv:1804.08771 (sacrebleu).
    """
    match metric:
        case "normalized_match":
            return float(normalized(text) == normalized(reference))
        case "f1":
            return _f1(Counter(normalized(text).split()), Counter(normalized(reference).split()))
        case "rouge_1" | "rouge_2":
            size = int(metric[-1])
            return _f1(*(_runs(_words(each), size) for each in (text, reference)))
        case "rouge_l":
            words, expected = _words(text), _words(reference)
            return _harmonic(_common(words, expected), len(words), len(expected))
        case "bleu" | "chrf":
            return float(_sacrebleu(metric).sentence_score(text, [reference]).score) / 100
        case _:
            raise ValueError(f"there is no metric {metric!r}")


def corpus_score(metric: str, texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return BLEU or chrF of all texts from 0 to 100, its bootstrap interval, and the signature."""
    library = _sacrebleu(metric, is_corpus=True)
    result = library.corpus_score(texts, [references], n_bootstrap=DRAWS)
    return {
        "score": float(result.score),
        "low": float(result._mean - result._ci),
        "high": float(result._mean + result._ci),
        "signature": str(library.get_signature()),
    }


def normalized(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _sacrebleu(metric: str, *, is_corpus: bool = False) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return CHRF() if metric == "chrf" else BLEU(effective_order=not is_corpus)


def _words(text: str) -> list[str]:
    """Return the words as the package rouge-score does: ASCII letters and digits."""
    return _NO_WORD.sub(" ", text.lower()).split()


def _runs(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[n : n + size]) for n in range(len(words) - size + 1))


def _f1(counts: Counter[Any], expected: Counter[Any]) -> float:
    shared = (counts & expected).total()
    return _harmonic(shared, counts.total(), expected.total())


def _harmonic(shared: int, size: int, expected: int) -> float:
    """Return the harmonic mean of precision and recall."""
    precision, recall = shared / max(size, 1), shared / max(expected, 1)
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def _common(words: Sequence[str], expected: Sequence[str]) -> int:
    """Return the length of the longest common subsequence.

    Source: Hyyro 2004, Bit-parallel LCS-length computation revisited.
    """
    places: dict[str, int] = {}
    for number, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << number
    every = (1 << len(words)) - 1
    state = every
    for word in expected:
        matched = state & places.get(word, 0)
        state = (state + matched | state - matched) & every
    return len(words) - state.bit_count()
