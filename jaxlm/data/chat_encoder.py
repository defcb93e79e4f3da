"""Encoding of conversations as ids and weights: its settings, and that of one batch."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxlm.core.errors import DataError
from jaxlm.data import chat_templates, formats
from jaxlm.data.assistant_mask import MaskRenderer, Rendered
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.control_tokens import CUT, ControlTokens, WeightedIds, WeightedSpan
from jaxlm.data.conversations import (
    EQUAL,
    NO_MASK,
    NO_STEP_END,
    TOO_LONG,
    TOO_SHORT,
    UNTRAINED,
    Conversation,
    LabeledStep,
    Rejected,
)
from jaxlm.data.prompts import Prompt
from jaxlm.data.records import Document, not_a_conversation
from jaxlm.data.tokenizer import Tokenizer

VERSION = 4  # of ids and weights; cached tokens of another version are made again
MIN_PROMPT = 2  # ids, as of every document

Overlong = Literal["drop", "left", "error"]

Item = tuple[Document, Conversation]


class Encoded(NamedTuple):
    """A document and its ids; `weights` are those of the ids of a conversation.

    `bytes` are those of the text if the document has only ids. `side` and `margin` are those of an
    answer that was compared or judged, see `Conversation`. `prompt` is what is rewarded.
    """

    document: Document
    ids: Sequence[np.ndarray]
    weights: np.ndarray | None = None
    bytes: int | None = None
    side: int = 0
    margin: float = 0.0
    prompt: Prompt | None = None


@dataclasses.dataclass(frozen=True)
class ChatEncoder:
    """The encoding of conversations for rows of one length.

    Args:
      tokenizer: the tokenizer.
      template: the chat template.
      sequence: slots of a row; a conversation has at most one id more.
      overlong: treatment of longer conversations, see `DataConfig.overlong`.
      max_refused: share of the conversations that the template may refuse.
      answers: the kind of the data if its answers were compared or judged; empty for others. A
        pair is two documents, the chosen answer first, and both together fit in a row.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    sequence: int
    overlong: Overlong = "drop"
    max_refused: float = 0.0
    answers: str = ""

    @property
    def key(self) -> list[str | int]:
        """Return what determines ids and weights, besides the tokenizer."""
        return [VERSION, chat_templates.digest(self.template), self.sequence, self.overlong]


class EncodedBatch(NamedTuple):
    """Result of a batch.

    Args:
      used: numbers of conversations in the batch, in order, with their ids and weights.
      left_out: numbers of the others in the batch, of a pair that of its first, and the reason.
      figures: counts of turns and tokens of those used.
      refused: conversations that the template refused.
      error: that of the first of them.
    """

    used: list[tuple[int, Int[np.ndarray, "n"], Float[np.ndarray, "n"]]]
    left_out: list[tuple[int, str]]
    figures: Counter[str]
    refused: int
    error: DataError | None


class BatchEncoder(contextlib.ExitStack):
    """Encoding of batch after batch, in a context that ends the process of the template."""

    def __init__(self, encoder: ChatEncoder):
        super().__init__()
        self._settings = encoder
        self._control = ControlTokens(encoder.tokenizer)
        self._renderer: MaskRenderer | None = None

    def encode(self, batch: Sequence[Item]) -> EncodedBatch:
        """Return the ids and weights of a batch, in which both conversations of a pair are.

        Raises:
          DataError: if the template is invalid, or one is too long and `overlong` is `error`.
        """
        figures, errors, left_out = Counter[str](), list[DataError](), list[tuple[int, str]]()
        outcomes = self._outcomes(batch, figures, errors)
        used = []
        size = 2 if self._settings.answers == "pairs" else 1
        for first in range(0, len(batch), size):
            group = [outcomes[number] for number in range(first, first + size)]
            results = [each for each in group if isinstance(each, _Result)]
            reason = next((each for each in group if isinstance(each, str)), None)
            if reason is None and size == 2:
                reason = self._unfit(*(each.ids.ids for each in results))
            if reason is not None:
                left_out.append((first, reason))
                continue
            used += [(first + n, each.ids.ids, each.ids.weights) for n, each in enumerate(results)]
            if size == 2:
                figures["pairs"] += 1
            for each in results:
                self._count(each, figures)
        return EncodedBatch(used, left_out, figures, len(errors), errors[0] if errors else None)

    def _outcomes(
        self, batch: Sequence[Item], figures: Counter[str], errors: list[DataError]
    ) -> dict[int, "_Result | str"]:
        """Return the result of each conversation by its number, or the reason to leave it out.

        Count turns that are cut in `figures`, and add the errors of refused ones to `errors`.
        """
        outcomes: dict[int, _Result | str] = {}
        items = dict(enumerate(batch))
        while items:
            rendered = self._rendered([conversation for _, conversation in items.values()])
            usable = self._usable(items, rendered, outcomes, errors)
            encodings = self._control.encode([(each.text, each.spans) for each in usable.values()])
            shorter: dict[int, Item] = {}
            for (number, text), encoding in zip(usable.items(), encodings, strict=True):
                document, conversation = items[number]
                ids = _ended(encoding, text, self._settings.tokenizer)
                if conversation.steps:
                    ids = _labeled(ids, len(encoding.ids), conversation.steps)
                if len(ids.ids) - 1 > self._settings.sequence:
                    cut = self._cut(document, conversation, len(ids.ids))
                    if cut is None:
                        outcomes[number] = TOO_LONG
                    else:
                        figures["turns_cut"] += len(conversation.messages) - len(cut.messages)
                        shorter[number] = document, cut
                elif conversation.goal is not None and len(ids.ids) < MIN_PROMPT:
                    outcomes[number] = TOO_SHORT
                elif conversation.steps and np.count_nonzero(ids.weights) < len(conversation.steps):
                    outcomes[number] = NO_STEP_END
                elif ids.weights[1:].any() or conversation.goal is not None:
                    outcomes[number] = _Result(conversation, text, ids)
                else:
                    outcomes[number] = UNTRAINED
            items = shorter
        return outcomes

    def _unfit(self, one: Int[np.ndarray, "n"], other: Int[np.ndarray, "m"]) -> str | None:
        """Return the reason to leave out a pair of ids; None if it can be used."""
        if np.array_equal(one, other):
            return EQUAL
        return TOO_LONG if positions([one, other]) > self._settings.sequence else None

    def _rendered(self, conversations: Sequence[Conversation]) -> list[Rendered | Rejected]:
        """Render conversations by the template; join prompt and completion of plain ones."""
        chats = [each for each in conversations if not each.is_plain]
        if chats and self._renderer is None:
            self._renderer = self.enter_context(
                MaskRenderer(self._settings.template, self._control)
            )
        answers: Iterator[Rendered | Rejected] = iter(())
        if chats and self._renderer is not None:  # all or no others are prompts
            is_prompt = chats[0].goal is not None
            render = self._renderer.render_prompts if is_prompt else self._renderer.render
            answers = iter(render(chats))
        return [self._joined(each) if each.is_plain else next(answers) for each in conversations]

    def _joined(self, conversation: Conversation) -> Rendered:
        tokenizer = self._settings.tokenizer
        names = {number: name for name, number in tokenizer.specials.items()}
        begin = "".join(names.get(number, "") for number in tokenizer.before)
        prompt, *completions = (
            self._control.guarded(message["content"]) for message in conversation.messages
        )
        if not completions:
            return Rendered(begin + prompt, [], is_open=False)
        (completion,) = completions
        # What is generated from begins with a token of its own.
        cut = "" if tokenizer.lead else CUT
        start = len(begin + prompt + cut)
        span = WeightedSpan(start, start + len(completion), conversation.weights[-1])
        return Rendered(begin + prompt + cut + completion, [span], is_open=True)

    def _usable(
        self,
        items: dict[int, Item],
        rendered: Sequence[Rendered | Rejected],
        outcomes: dict[int, "_Result | str"],
        errors: list[DataError],
    ) -> dict[int, Rendered]:
        """Return the rendered texts by number; add the reason and the error of refused ones."""
        usable = {}
        for (number, (document, conversation)), text in zip(items.items(), rendered, strict=True):
            if isinstance(text, Rendered) and conversation.steps:
                guarded = [self._control.guarded(step.text) for step in conversation.steps]
                text = _with_steps(text, guarded)
            if isinstance(text, Rendered):
                usable[number] = text
                continue
            outcomes[number] = text.reason
            errors.append(not_a_conversation(text, document.file, document.record))
        return usable

    def _cut(self, document: Document, conversation: Conversation, ids: int) -> Conversation | None:
        """Return a conversation without its first turns; None if it is left out."""
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
        is_cut = self._settings.overlong == "left" and not self._settings.answers
        return without_first_turns(conversation) if is_cut else None

    def _count(self, result: "_Result", figures: Counter[str]) -> None:
        """Count the turns and tokens of a conversation, and its judgment."""
        conversation, ids = result.conversation, result.ids
        figures["turns"] += len(conversation.messages)
        if conversation.is_plain:
            figures["plain"] += 1
        figures["trained_turns"] += len(result.text.spans)
        figures["trained_tokens"] += int(np.count_nonzero(ids.weights[1:]))
        figures["answers_in_prompt_token"] += ids.crossed
        for step in conversation.steps if self._settings.answers == "steps" else ():
            figures["right" if step.is_right else "wrong"] += 1
        if self._settings.answers in ("pairs", "labeled"):
            kind = "chosen" if conversation.side > 0 else "rejected"
            figures[kind] += 1
            figures[f"{kind}_tokens"] += int((ids.weights[1:] > 0).sum())


class _Result(NamedTuple):
    """A conversation that can be used."""

    conversation: Conversation
    text: Rendered
    ids: WeightedIds


def encoded(item: Item, ids: Int[np.ndarray, "n"], weights: Float[np.ndarray, "n"]) -> Encoded:
    """Return ids with the judgment of the answer, or the goal of the prompt."""
    document, conversation = item
    goal = conversation.goal
    return Encoded(
        document,
        [ids],
        weights,
        side=conversation.side,
        margin=conversation.margin,
        prompt=None
        if goal is None
        else Prompt(conversation.text, *goal, is_plain=conversation.is_plain),
    )


def positions(pair: Sequence[Int[np.ndarray, "n"]]) -> int:
    """Return the positions of a row that the ids of both conversations of a pair take."""
    return sum(len(ids) - 1 for ids in pair)


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


def _with_steps(text: Rendered, steps: Sequence[str]) -> Rendered | Rejected:
    """Return a text whose spans are the steps of its last answer, with weights 1, 2, 3, ..."""
    spans: list[WeightedSpan] = []
    place = text.spans[-1].start if text.spans else 0
    for number, step in enumerate(map(str.strip, steps), 1):
        start = text.text.find(step, place)
        if start < 0:
            return Rejected(NO_MASK, f"the template changes step {number}")
        place = start + len(step)
        spans.append(WeightedSpan(start, place, float(number)))
    return text._replace(spans=spans)


def _labeled(ids: WeightedIds, count: int, steps: Sequence[LabeledStep]) -> WeightedIds:
    """Replace the weights of steps by their labels: 1 or -1 at the id behind their last one.

    The first `count` ids are those of the text. A step without an id of its own has no label.
    """
    labels = np.zeros(len(ids.ids), ids.weights.dtype)
    for number, step in enumerate(steps, 1):
        places = np.flatnonzero(ids.weights[:count] == number)
        if len(places) and places[-1] + 1 < len(labels):
            labels[places[-1] + 1] = 1 if step.is_right else -1
    return ids._replace(weights=labels)


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
