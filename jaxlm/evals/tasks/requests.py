"""Requests of items: ids to score, from the token that holds the first byte of the answer on.

Example:
  >>> from jaxlm.data.tokenizer import Bytes
  >>> encode(Bytes(), [("a", " b")])
  [ScoringRequest(ids=(1, 137, 72, 138), begin=2, spans_border=False)]
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.sandbox import SandboxProcess
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals.tasks import items as task_items
from jaxlm.evals.tasks.config import LETTERS, Answer, Choice, Form, Prompted, Task, invalid
from jaxlm.evals.tasks.items import Item


class ScoringRequest(NamedTuple):
    """Ids of a text, and the first that is scored. The token at `begin` may also hold context."""

    ids: tuple[int, ...]
    begin: int
    spans_border: bool

    @property
    def tokens(self) -> int:
        """Number of scored ids."""
        return len(self.ids) - self.begin


class Question(NamedTuple):
    """An item with the requests of its choices, and those without its context, if any."""

    item: Item
    shots: tuple[str, ...]
    choices: tuple[str, ...]
    requests: tuple[ScoringRequest, ...]
    unconditional: tuple[ScoringRequest, ...]

    @property
    def longest(self) -> int:
        """Tokens that the longest request reads."""
        return max(len(each.ids) - 1 for each in (*self.requests, *self.unconditional))


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[ScoringRequest]:
    """Return the request of each pair of a context and an answer, from their joined text.

    Nothing is scored of an empty answer. The start of a document is the run's own. If nothing
    precedes the answer, an end token stands in for a missing start token, since the first token
    needs one before it.
    """
    joined = [context + answer for context, answer in texts]
    encodings = tokenizer.encode_many(joined)
    requests = []
    for (context, answer), text, ids in zip(texts, joined, encodings, strict=True):
        first, spans = _border(tokenizer, text, ids, len(context)) if answer else (len(ids), False)
        before = tokenizer.before or (() if first else tokenizer.after[:1])
        requests.append(ScoringRequest((*before, *ids), len(before) + first, spans))
    return requests


def _border(tokenizer: Tokenizer, text: str, ids: list[int], border: int) -> tuple[int, bool]:
    """Return the index of the id that holds the byte at a border, and if it also holds context."""
    if not border:
        return 0, False
    pieces = [tokenizer.table[i] for i in ids]
    lead = len(tokenizer.lead)
    if b"".join(pieces) == (tokenizer.lead + text).encode():
        starts = np.cumsum([0, *map(len, pieces)])[:-1] - lead
        place = len(text[:border].encode())
    else:  # the tokenizer changes the text, and only its own places are known
        starts = np.array(tokenizer.encode_with_starts([text])[0][1])
        place = border
    index = int(np.searchsorted(starts, place, side="right")) - 1
    # Ids without bytes, or of the bytes of one character, may have the same place.
    index = int(np.searchsorted(starts, starts[index], side="left"))
    return index, bool(starts[index] < place)


def encode_chats(
    chat: ChatTokenizer, tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]
) -> list[ScoringRequest]:
    """Return the request of each pair of a user's turn and the beginning of the answer to it.

    Raises DataError if the template gives two start tokens.
    """
    prompts = chat.encode_many([context for context, _ in texts])
    answers = tokenizer.encode_many([answer for _, answer in texts])
    requests = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if tokenizer.before and prompt[: 2 * len(tokenizer.before)] == [*tokenizer.before] * 2:
            raise DataError(
                "a chat template gives two start tokens",
                where="--chat",
                why=f"the conversation begins with the ids {prompt[:4]}",
                fix="leave out --chat",
            )
        requests.append(ScoringRequest((*prompt, *answer), len(prompt), False))
    return requests


@dataclasses.dataclass(frozen=True)
class Examples:
    """Solved items before each item: `count` of `pool`, drawn by `seed` and the item's id."""

    pool: Sequence[Item] = ()
    count: int = 0
    seed: int = 0


NO_EXAMPLES = Examples()


class Prompter:
    """Questions of the items of a task: contexts with examples, and the encoded requests.

    Args:
      task: the task.
      tokenizer: the tokenizer of the run.
      examples: solved items before each item.
      form: text of the choices, or letters.
      chat: makes each context a user's turn; None for text.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        examples: Examples = NO_EXAMPLES,
        *,
        form: Form = "cloze",
        chat: ChatTokenizer | None = None,
    ):
        self._task, self._tokenizer, self._examples = task, tokenizer, examples
        self._form, self._chat = form, chat

    def questions(self, items: Sequence[Item]) -> list[Question]:
        """Return the questions of some items. Raises DataError if the letters template fails."""
        shots = [self._drawn(item) for item in items]
        every = self._asked([*items, *itertools.chain.from_iterable(shots)])
        asked, solved = every[: len(items)], iter(every[len(items) :])
        texts: list[list[tuple[str, str]]] = []
        if isinstance(self._task.kind, Prompted) and self._chat is None:  # else a turn begins
            between = self._task.kind.delimiter
            asked = [(context, [between + each for each in answers]) for context, answers in asked]
        for (context, answers), examples in zip(asked, shots, strict=True):
            if isinstance(self._task.kind, Prompted):
                context = self._joined(context, examples, [next(solved) for _ in examples])
            if isinstance(self._task.kind, Answer):
                answers = [""]  # it is generated
            texts.append([(context, answer) for answer in answers])
        alone: list[list[tuple[str, str]]] = [[] for _ in items]
        if isinstance(self._task.kind, Choice) and self._form == "cloze":
            empty = self._task.kind.unconditional
            alone = [[(empty, answer) for answer in answers] for _, answers in asked]
        flat = list(itertools.chain.from_iterable([*texts, *alone]))
        encoded = iter(self._encoded(flat))
        requests = [tuple(itertools.islice(encoded, len(each))) for each in texts]
        unconditional = [tuple(itertools.islice(encoded, len(each))) for each in alone]
        return [
            Question(item, tuple(each.id for each in examples), self._shown(item), *parts)
            for item, examples, *parts in zip(items, shots, requests, unconditional, strict=True)
        ]

    def _drawn(self, item: Item) -> list[Item]:
        """Return the examples of an item: other items of the pool."""
        pool, count = self._examples.pool, self._examples.count
        if not count:
            return []
        chosen = task_items.drawn(item.id, len(pool), count + 1, seed=self._examples.seed)
        examples = (pool[number] for number in chosen)
        return [each for each in examples if each.id != item.id][:count]

    def _encoded(self, texts: Sequence[tuple[str, str]]) -> list[ScoringRequest]:
        if self._chat is None or not isinstance(self._task.kind, Prompted):
            return encode(self._tokenizer, texts)
        return encode_chats(self._chat, self._tokenizer, texts)

    def _shown(self, item: Item) -> tuple[str, ...]:
        """Return the texts of an item that are compared."""
        return tuple(LETTERS[: len(item.choices)]) if self._form == "letters" else item.choices

    def _asked(self, items: Sequence[Item]) -> list[tuple[str, list[str]]]:
        """Return the context of each item, without examples, and its answers without delimiter."""
        kind = self._task.kind
        if not isinstance(kind, Prompted):
            return [("", list(item.choices)) for item in items]
        if not isinstance(kind, Choice):
            return [(item.context, [item.gold]) for item in items]
        contexts = [item.context for item in items]
        if self._form == "letters":
            contexts = self._lettered(kind, items)
        return [
            (context, list(self._shown(item)))
            for item, context in zip(items, contexts, strict=True)
        ]

    def _lettered(self, kind: Choice, items: Sequence[Item]) -> list[str]:
        """Return the contexts of the letters form."""
        records = []
        for item in items:
            lines = [f"{LETTERS[n]}. {choice}" for n, choice in enumerate(item.choices)]
            more = {"context": item.context, "options": "\n".join(lines)}
            records.append({**item.record, **more})
        with SandboxProcess({"templates": {"letters": kind.letters}}) as sandbox:
            rendered = sandbox.request(records)
        if isinstance(rendered, dict):
            raise invalid(self._task.path, f"letters: {rendered['error']}")
        texts = [each["letters"] for each in rendered]
        if wrong := next((each for each in texts if not isinstance(each, str)), None):
            raise invalid(self._task.path, f"letters: {wrong[0]}")
        return texts

    def _joined(
        self, context: str, examples: Sequence[Item], texts: Sequence[tuple[str, list[str]]]
    ) -> str:
        """Return a context after its examples with their right answers."""
        kind = self._task.kind
        assert isinstance(kind, Prompted)
        solved = [
            text + kind.delimiter + answers[item.answer]
            for item, (text, answers) in zip(examples, texts, strict=True)
        ]
        return kind.preamble + kind.between.join([*solved, context])


def blocks(sizes: Iterable[int], tokens: int) -> list[slice]:
    """Return slices of consecutive items of about `tokens`, a function of their sizes alone.

    The items of a block are scored and stored together.

    Example:
      >>> blocks([3, 3, 1, 9, 2], 5)
      [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    ranges, first, total = [], 0, 0
    number = 0
    for number, size in enumerate(sizes, 1):
        total += size
        if total >= tokens:
            ranges.append(slice(first, number))
            first, total = number, 0
    return [*ranges, slice(first, number)] if first < number else ranges


def windows(request: ScoringRequest, slots: int) -> tuple[ScoringRequest, ...]:
    """Return requests of at most `slots` read tokens that score each token of a text once.

    A later window begins with the last token of the previous one.
    """
    ids, begin = request.ids, request.begin
    if len(ids) - 1 <= slots:
        return (request,)
    parts = [ScoringRequest(ids[: slots + 1], begin, request.spans_border)]
    for start in range(slots, len(ids) - 1, slots):
        parts.append(ScoringRequest(ids[start : start + slots + 1], 1, False))
    return tuple(parts)
