"""Generated answers: greedy continuations of prompts, the part that counts, and the comparison.

Example:
  >>> extracted("so the answer is 7.", r"answer is (\\d+)"), extracted("7", r"answer is (\\d+)")
  ('7', None)
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxlm.core import random
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals import code, metrics, verify
from jaxlm.evals.tasks.config import Answer
from jaxlm.evals.tasks.requests import Request
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampler import Continuation, Sampler
from jaxlm.models.build import Blueprint
from jaxlm.parallel import rules

ROWS = 16  # of a device in a pass


class Writer:
    """Greedy continuations of the prompts of a task, whose passes depend on its items alone.

    Use it under the mesh.

    Args:
      kind: stops and the largest number of tokens.
      blueprint: the model.
      mesh: mesh of the parameters.
      tokenizer: the tokenizer, of a chat or of the run.
    """

    def __init__(self, kind: Answer, blueprint: Blueprint, mesh: Mesh, tokenizer: Tokenizer):
        settings = GenerateConfig(
            prompts=(), max_tokens=kind.max_tokens, temperature=0.0, stop=kind.stop
        )
        self._sampler = Sampler(settings, blueprint, tokenizer)
        self._rows = ROWS * rules.split(mesh, "batch")
        self._filler = [tokenizer.eos]

    def write(self, params: Any, prompts: Sequence[Request]) -> list[Continuation]:
        """Return the continuation of each prompt; prompts of similar length share a pass."""
        lengths = [len(each.ids) for each in prompts]
        order = np.argsort(lengths, kind="stable").tolist()
        key = random.key(0, "sample")  # greedy answers do not depend on it
        written: dict[int, Continuation] = {}
        for first in range(0, len(order), self._rows):
            part = order[first : first + self._rows]
            rows: list[Sequence[int]] = [prompts[index].ids for index in part]
            rows += [self._filler] * (self._rows - len(part))
            answers = self._sampler.continue_rows(
                params, rows, [key] * self._rows, least=max(lengths)
            )
            written |= dict(zip(part, answers, strict=False))  # without those of fillers
        return [written[index] for index in range(len(prompts))]


def extracted(text: str, pattern: str) -> str | None:
    """Return the last match of a regular expression, or of its first group; None without one.

    Without a pattern the whole text is returned.
    """
    if not pattern:
        return text
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    return last[1] if last.re.groups else last[0]


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
    kind: Answer, answer: Continuation, reference: str, program: tuple[str, str] = ("", "")
) -> dict[str, Any]:
    """Return the fields of a sample: metrics, and the text from which they were computed.

    `extracted` is 1 if the answer has the part that is compared, `refused` if a pattern of refusals
    matches, and `listed_words` if a listed word or phrase occurs, in any case. With a `program`,
    the source before and after the answer, it is run: `passed` is 1 if it ended without an
    exception.
    """
    part = extracted(answer.text, kind.extract)
    expected = extracted(reference, kind.extract)
    expected = reference if expected is None else expected
    is_right = part is not None and verify.is_match(kind.match, part, expected)
    fields: dict[str, Any] = {}
    values: dict[str, float] = {}
    if program[1]:
        start, end = program
        fields["outcome"] = code.outcome(f"{start}{part or ''}\n{end}\n")
        values["passed"] = float(fields["outcome"] == code.PASSED)
    values["exact_match"] = float(is_right)
    if kind.extract:
        values["extracted"] = float(part is not None)
    values |= {name: metrics.score(name, part or "", expected) for name in kind.metrics}
    if kind.refusals:
        values["refused"] = float(any(re.search(each, answer.text) for each in kind.refusals))
    if kind.listed:
        fields["listed"] = occurring(answer.text, kind.listed)
        values["listed_words"] = float(bool(fields["listed"]))
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
