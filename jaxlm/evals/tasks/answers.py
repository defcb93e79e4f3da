"""Generated answers: greedy and drawn ones, the part that counts, and the comparison.

Example:
  >>> extracted("so the answer is 7.", r"answer is (\\d+)"), extracted("7", r"answer is (\\d+)")
  ('7', None)
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.corpus.filters.linear import LinearClassifier
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals import code, metrics, statistics, verify
from jaxlm.evals.tasks.config import Answer
from jaxlm.evals.tasks.requests import ScoringRequest
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.continuer import Ask, Continuer, sizes_of
from jaxlm.generate.sampler import Continuation
from jaxlm.models.build import Blueprint

ROWS = 16  # answers at a time, whose number changes the last bits of a product
PASS_AT = (1, 10, 100)  # besides the number of drawn answers


class Writer:
    """Continuations of the prompts of a task. Use it under the mesh.

    Args:
      kind: stops, the largest number of tokens, and the drawn answers.
      blueprint: the model.
      tokenizer: the tokenizer, of a chat or of the run.
      lengths: tokens of each prompt of the task.
      seed: seed of drawn answers.
      both_ways: the model reads a prompt in both directions.
    """

    def __init__(
        self,
        kind: Answer,
        blueprint: Blueprint,
        tokenizer: Tokenizer,
        lengths: Sequence[int],
        seed: int,
        *,
        both_ways: bool = False,
    ):
        self._kind, self._seed, self.max_tokens = kind, seed, kind.max_tokens
        self.sizes = sizes_of(lengths, kind.max_tokens, ROWS)
        limits = GenerateConfig(prompts=(), max_tokens=kind.max_tokens, stop=kind.stop)
        model = blueprint, tokenizer
        self._continuer = Continuer(*model, self.sizes, limits, both_ways=both_ways)

    def write(
        self, params: Any, prompts: Sequence[ScoringRequest], names: Sequence[str]
    ) -> list[list[Continuation]]:
        """Return the greedy answer to each prompt, and then its drawn ones.

        Drawn answers are functions of the seed and the name of their prompt.
        """
        kind = self._kind
        asks = [
            ask
            for prompt, name in zip(prompts, names, strict=True)
            for ask in asks_of(prompt.ids, name, self._seed, kind.samples, kind.temperature)
        ]
        texts = iter(self._continuer.texts(params, asks))
        return [[*itertools.islice(texts, 1 + kind.samples)] for _ in prompts]


def asks_of(
    ids: Sequence[int], name: str, seed: int, samples: int, temperature: float
) -> Iterator[Ask]:
    """Yield the greedy answer to a prompt to be written, and then its drawn ones.

    Args:
      ids: the prompt.
      name: its name, from which the seeds of drawn answers follow.
      seed: seed of all drawn answers.
      samples: number of drawn answers.
      temperature: their temperature.
    """
    yield Ask(ids)
    for number in range(samples):
        yield Ask(ids, seed_of(seed, name, number), temperature)


def seed_of(seed: int, name: str, sample: int) -> int:
    """Return the seed of a drawn answer, as that of `jaxlm generate`."""
    digest = hashlib.sha256(f"{seed}/{name}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def extracted(text: str, pattern: str) -> str | None:
    """Return the last match of a regular expression, or of its first group that has a text.

    Without a pattern the whole text is returned, and None without a match.
    """
    if not pattern:
        return text
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    return next(filter(None, last.groups()), last[1]) if last.re.groups else last[0]


def occurring(text: str, listed: Sequence[str]) -> list[str]:
    """Return the listed words and phrases that occur in a text, whole and in any case.

    Example:
      >>> occurring("An Assassin's class", ["class", "ass"])
      ['class']
    """
    return [
        each
        for each in listed
        if re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text, re.IGNORECASE)
    ]


def judged(
    kind: Answer,
    answer: Continuation,
    reference: str,
    program: tuple[str, str] = ("", ""),
    drawn: Sequence[Continuation] = (),
    classifier: tuple[LinearClassifier, int] | None = None,
) -> dict[str, Any]:
    """Return the fields of a sample: metrics, and the text from which they were computed.

    `extracted` is 1 if the answer has the part that is compared, `refused` if a pattern of refusals
    matches, `listed_words` if a listed word or phrase occurs, in any case, and `classified` if the
    likeliest label is that of the task; the sample has its probability. With a `program`,
    the source before and after the answer, it is run: `passed` is 1 if it ended without an
    exception.

    Args:
      kind: the kind of the task.
      answer: the greedy answer.
      reference: the right answer.
      program: source before and after the answer; empty if no program is run.
      drawn: further answers. `pass_at_k` is the unbiased estimate from all of them.
      classifier: classifier of answers and the index of its label, see `Task.classifier`.
    """
    expected = extracted(reference, kind.extract)
    expected = reference if expected is None else expected

    def checked(text: str) -> tuple[str | None, dict[str, Any], bool]:
        """Return the extracted part, the outcome of the program, and if the answer is right."""
        part = extracted(text, kind.extract)
        if program[1]:
            outcome = code.outcome(f"{program[0]}{part or ''}\n{program[1]}\n")
            return part, {"outcome": outcome}, outcome == code.PASSED
        return part, {}, part is not None and verify.is_match(kind.match, part, expected)

    part, fields, is_right = checked(answer.text)
    values: dict[str, float] = {}
    if program[1]:
        values["passed"] = float(is_right)
        is_right = part is not None and verify.is_match(kind.match, part, expected)
    values["exact_match"] = float(is_right)
    if drawn:
        fields["drawn"] = []
        for each in drawn:
            _, outcome, is_right = checked(each.text)
            fields["drawn"].append({"text": each.text, "right": is_right, **outcome})
        right = np.array([sum(each["right"] for each in fields["drawn"])])
        count = len(drawn)
        for k in [*(k for k in PASS_AT if k < count), count]:
            values[f"pass_at_{k}"] = statistics.pass_at_k(right, count, k)
    if kind.extract:
        values["extracted"] = float(part is not None)
    values |= {name: metrics.score(name, part or "", expected) for name in kind.metrics}
    if kind.refusals:
        values["refused"] = float(any(re.search(each, answer.text) for each in kind.refusals))
    if kind.listed:
        fields["listed"] = occurring(answer.text, kind.listed)
        values["listed_words"] = float(bool(fields["listed"]))
    if classifier is not None:
        probabilities = classifier[0].probabilities(answer.text)
        fields["probability"] = float(probabilities[classifier[1]])
        values["classified"] = float(probabilities.argmax() == classifier[1])
    return fields | {
        "metrics": values,
        "weight": 1.0,
        "reference": reference,
        "expected": expected,
        "ids": answer.ids,
        "text": answer.text,
        "extracted": part,
        "finish_reason": answer.finish_reason,
    }
