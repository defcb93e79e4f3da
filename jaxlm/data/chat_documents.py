"""Conversations as documents of ids and weights, encoded by batches while the next are rendered."""

import contextlib
import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.data import chat_templates, formats
from jaxlm.data.assistant_mask import MaskRenderer, Rendered
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.control_tokens import CUT, ControlTokens, WeightedIds, WeightedSpan
from jaxlm.data.conversations import TOO_LONG, UNTRAINED, Conversation, Rejected
from jaxlm.data.records import Document, not_a_conversation
from jaxlm.data.tokenizer import Tokenizer

VERSION = 2  # of ids and weights; cached tokens of another version are made again
BATCH = 256  # conversations that are rendered by one request
PROBED = 1000  # conversations among which a single refused one is tolerated

Overlong = Literal["drop", "left", "error"]


Item = tuple[Document, Conversation]


class Encoded(NamedTuple):
    """A document and its ids; `weights` are those of the ids of a conversation.

    `bytes` are those of the text if the document has only ids.
    """

    document: Document
    ids: Sequence[np.ndarray]
    weights: np.ndarray | None = None
    bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class ChatEncoder:
    """The encoding of conversations for rows of one length.

    Args:
      tokenizer: the tokenizer.
      template: the chat template.
      sequence: slots of a row; a conversation has at most one id more.
      overlong: treatment of longer conversations, see `DataConfig.overlong`.
      max_refused: share of the conversations that the template may refuse.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    sequence: int
    overlong: Overlong = "drop"
    max_refused: float = 0.0

    @property
    def key(self) -> list[str | int]:
        """Return what determines ids and weights, besides the tokenizer."""
        return [VERSION, chat_templates.digest(self.template), self.sequence, self.overlong]

    def encode(
        self, documents: Iterable[Document], left_out: Counter[str], figures: Counter[str]
    ) -> Iterator[Encoded]:
        """Yield ids and weights of each conversation.

        Args:
          documents: conversations.
          left_out: counts of conversations left out, by reason.
          figures: counts of turns and tokens of those yielded.

        Raises:
          DataError: if too many are refused by the template, or one is too long and `overlong` is
            `error`.
        """
        with _Batches(self, left_out, figures) as batches:
            waiting: deque[tuple[Sequence[Item], Future[list[Rendered | Rejected]]]] = deque()
            remaining = ((each, each.conversation) for each in documents if each.conversation)
            while batch := list(itertools.islice(remaining, BATCH)):
                waiting.append((batch, batches.render(batch)))
                if len(waiting) > 1:
                    yield from batches.encoded(*waiting.popleft())
            for each in waiting:
                yield from batches.encoded(*each)
            batches.check_refused(is_all=True)


class _Batches(contextlib.ExitStack):
    """Rendering in a thread, one batch after another, and encoding of what is rendered."""

    def __init__(self, encoder: ChatEncoder, left_out: Counter[str], figures: Counter[str]):
        super().__init__()
        self._settings, self._left_out, self._figures = encoder, left_out, figures
        self._control = ControlTokens(encoder.tokenizer)
        self._pool = self.enter_context(ThreadPoolExecutor(1))
        self._renderer: MaskRenderer | None = None
        self._seen = self._refused = 0
        self._first: DataError | None = None

    def render(self, batch: Sequence[Item]) -> Future[list[Rendered | Rejected]]:
        """Begin to render a batch."""
        return self._pool.submit(self._rendered, [conversation for _, conversation in batch])

    def encoded(
        self, batch: Sequence[Item], rendered: Future[list[Rendered | Rejected]]
    ) -> Iterator[Encoded]:
        """Yield the ids of a rendered batch in order; count the others."""
        results: dict[int, Encoded] = {}
        items = dict(enumerate(batch))
        self._seen += len(batch)
        while items:
            usable = self._usable(items, rendered.result())
            encodings = self._control.encode([(each.text, each.spans) for each in usable.values()])
            shorter: dict[int, Item] = {}
            for (number, text), encoding in zip(usable.items(), encodings, strict=True):
                document, conversation = items[number]
                ids = _ended(encoding, text, self._settings.tokenizer)
                if len(ids.ids) - 1 > self._settings.sequence:
                    if (cut := self._cut(document, conversation, len(ids.ids))) is not None:
                        shorter[number] = document, cut
                elif ids.weights[1:].any():
                    results[number] = Encoded(document, [ids.ids], ids.weights)
                    self._count(conversation, text, ids)
                else:
                    self._left_out[UNTRAINED] += 1
            items = shorter
            if items:
                rendered = self.render(list(items.values()))
        self.check_refused()
        for _, result in sorted(results.items()):
            yield result

    def _rendered(self, conversations: Sequence[Conversation]) -> list[Rendered | Rejected]:
        """Render conversations by the template; join prompt and completion of plain ones."""
        chats = [each for each in conversations if not each.is_plain]
        if chats and self._renderer is None:
            self._renderer = self.enter_context(
                MaskRenderer(self._settings.template, self._control)
            )
        answers = iter(self._renderer.render(chats) if self._renderer is not None else ())
        return [self._joined(each) if each.is_plain else next(answers) for each in conversations]

    def _joined(self, conversation: Conversation) -> Rendered:
        tokenizer = self._settings.tokenizer
        names = {number: name for name, number in tokenizer.specials.items()}
        begin = "".join(names.get(number, "") for number in tokenizer.before)
        prompt, completion = (
            self._control.guarded(message["content"]) for message in conversation.messages
        )
        # What is generated from begins with a token of its own.
        cut = "" if tokenizer.lead else CUT
        start = len(begin + prompt + cut)
        span = WeightedSpan(start, start + len(completion), conversation.weights[-1])
        return Rendered(begin + prompt + cut + completion, [span], is_open=True)

    def _usable(
        self, items: dict[int, Item], rendered: Sequence[Rendered | Rejected]
    ) -> dict[int, Rendered]:
        """Return the rendered texts by number; count the refused conversations."""
        usable = {}
        for (number, (document, _)), text in zip(items.items(), rendered, strict=True):
            if isinstance(text, Rendered):
                usable[number] = text
                continue
            self._left_out[text.reason] += 1
            self._refused += 1
            self._first = self._first or not_a_conversation(text, document.file, document.record)
        return usable

    def _cut(self, document: Document, conversation: Conversation, ids: int) -> Conversation | None:
        """Return a conversation without its first turns; None if it is left out, and counted."""
        sequence = self._settings.sequence
        if self._settings.overlong == "error":
            raise DataError(
                "a conversation is longer than a row",
                where=formats.place(document.file, document.record),
                why=f"it has {ids} tokens, and rows of {sequence} hold {sequence + 1}",
                fix=f"--config.data.sequence={ids - 1}\n"
                "--config.data.overlong=drop    # leaves such conversations out\n"
                "--config.data.overlong=left    # leaves their first turns out",
            )
        cut = without_first_turns(conversation) if self._settings.overlong == "left" else None
        if cut is None:
            self._left_out[TOO_LONG] += 1
        else:
            self._figures["turns_cut"] += len(conversation.messages) - len(cut.messages)
        return cut

    def _count(self, conversation: Conversation, text: Rendered, ids: WeightedIds) -> None:
        self._figures["turns"] += len(conversation.messages)
        self._figures["trained_turns"] += len(text.spans)
        self._figures["trained_tokens"] += int((ids.weights[1:] > 0).sum())
        self._figures["answers_in_prompt_token"] += ids.crossed

    def check_refused(self, *, is_all: bool = False) -> None:
        """Raise DataError if the template refused too many conversations."""
        seen = self._seen if is_all else max(self._seen, PROBED)
        if self._first is not None and self._refused > self._settings.max_refused * seen:
            raise DataError(
                self._first.what,
                where=self._first.where,
                why=f"{self._first.why}; {self._refused} of the {self._seen} conversations so far "
                f"are refused, data.max_dropped = {self._settings.max_refused:g} of them may be",
                fix=self._first.fix,
            )


def without_first_turns(conversation: Conversation) -> Conversation | None:
    """Return a conversation without its first exchange; None if no trained turn would be left.

    A leading system message stays.
    """
    roles = [message["role"] for message in conversation.messages]
    begin = int(roles[0] in ("system", "developer"))
    starts = [n for n in range(begin + 1, len(roles)) if roles[n] == "user"]
    if not starts or not any(conversation.weights[starts[0] :]):
        return None
    messages, weights = (
        [*each[:begin], *each[starts[0] :]]
        for each in (conversation.messages, conversation.weights)
    )
    return dataclasses.replace(conversation, messages=messages, weights=weights)


def _ended(encoding: WeightedIds, text: Rendered, tokenizer: Tokenizer) -> WeightedIds:
    """Append the end of text, with the weight of the last turn, to a text that is open."""
    if not text.is_open:
        return encoding
    after = np.array(tokenizer.after, encoding.ids.dtype)
    weights = np.full(len(after), text.spans[-1].weight, encoding.weights.dtype)
    return WeightedIds(
        np.concatenate((encoding.ids, after)),
        np.concatenate((encoding.weights, weights)),
        encoding.crossed,
    )
