"""Completions that are wrong by design, and the rewards that they earn.

A reward that pays for them is learned instead of the task.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import conversations
from jaxlm.rl.rewards import Rewards, Sample, Verdict

ANSWER = "the answer"  # the row of the references themselves
TIMES = 50  # of a word, and largest number of answers that are listed
ALWAYS_EQUAL = """\
import builtins
builtins.AssertionError = int
class Anything:
    def __getattr__(self, name): return self
    def __call__(self, *values, **named): return self
    def __eq__(self, other): return True
builtins.__dict__.update(dict.fromkeys(("len", "sorted", "isinstance"), Anything()))
"""


class AttackPrompt(NamedTuple):
    """A prompt with its answer and further fields."""

    prompt: str
    answer: str | None
    info: Any


class Earned(NamedTuple):
    """Rewards of the completions of an attack, one for each prompt.

    `mean` is None if no completion has a score. `share` of the prompts have a reward above 0.
    """

    mean: float | None
    share: float
    unscorable: int
    problem: str


def read_questions(file: Path) -> list[AttackPrompt]:
    """Return the prompts of JSON lines with `prompt`, `answer` and `info`.

    `prompt` is a text, or messages whose contents are joined. Raises InputMissing without the file,
    DataError if a line has no prompt.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise InputMissing(
            "the file of prompts cannot be read",
            where=f"--prompts={file}",
            why=f"{type(error).__name__}: {error.strerror}",
            fix="find . -name '*.jsonl'",
        ) from error
    questions = [_question(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise DataError(
            "the file has no prompt",
            where=f"--prompts={file}",
            why="all of its lines are empty",
            fix='{"prompt": "7 + 5 =", "answer": "12"}    # a line, as an example',
        )
    return questions


def _question(line: str, where: str) -> AttackPrompt:
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or record.get("prompt") is None:
            raise ValueError(conversations.described(record))
        prompt, answer = record["prompt"], record.get("answer")
        if isinstance(prompt, list):
            prompt = "\n".join(message["content"] for message in prompt)
        if not isinstance(prompt, str):
            raise TypeError("prompt is no text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        is_named = isinstance(error, ValueError)
        raise DataError(
            "a line has no prompt",
            where=where,
            why=str(error) if is_named else f"{type(error).__name__}: {error}",
            fix='{"prompt": "7 + 5 =", "answer": "12"}    # a line, as an example',
        ) from error
    return AttackPrompt(prompt, None if answer is None else str(answer), record.get("info"))


def attacks(questions: Sequence[AttackPrompt]) -> Mapping[str, Callable[[AttackPrompt], str]]:
    """Return the attacks by name: the completion of a prompt that each writes."""
    every = list(dict.fromkeys(each.answer for each in questions if each.answer is not None))
    return {
        "empty": lambda question: "",
        "echo": lambda question: question.prompt,
        "tags only": lambda question: "<think></think><answer></answer>",
        "all digits": lambda question: "0123456789",
        "repetition": lambda question: f"{(question.prompt.split() or ['yes'])[-1]} " * TIMES,
        "other answers": lambda question: "\n".join(
            [answer for answer in every if answer != question.answer][:TIMES]
        ),
        "os._exit(0)": lambda question: "import os\nos._exit(0)\n",
        "patched assert": lambda question: ALWAYS_EQUAL,
    }


def earned(
    rewards: Rewards, questions: Sequence[AttackPrompt], *, most_tokens: int
) -> dict[str, Earned]:
    """Return what the answers, and then each attack, earn on average.

    Args:
      rewards: the rewards, in their `with` block.
      questions: the prompts.
      most_tokens: tokens of each completion, for rewards of lengths.
    """
    texts = {ANSWER: lambda question: question.answer or "", **attacks(questions)}
    return {
        name: _earned(
            rewards.score(
                [
                    Sample(*each[:1], text(each), *each[1:], number, "eos_token", most_tokens)
                    for number, each in enumerate(questions)
                ]
            )
        )
        for name, text in texts.items()
    }


def _earned(verdicts: Sequence[Verdict]) -> Earned:
    totals = [each.total for each in verdicts if each.total is not None]
    mean = sum(totals) / len(totals) if totals else None
    share = sum(total > 0 for total in totals) / len(verdicts)
    problem = next((each.problem for each in verdicts if each.problem), "")
    return Earned(mean, share, len(verdicts) - len(totals), problem)
