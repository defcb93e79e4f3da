"""Trained characters of rendered conversations, for any chat template.

A trained turn starts behind the generation prompt and ends with the token that ends the turn.

1. If the template marks assistant text by `{% generation %}`, the marks are used.
2. Else each trained content is enclosed in two characters. If the rendered text without them is
   that of the plain conversation, they show the place of the content.
3. Else the turn is the difference of two renderings, of the messages before it and up to it. Both
   must be beginnings of the whole text.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxlm.data.chat import ChatTemplate, Message, Refusal, Renderer, RenderRequest
from jaxlm.data.control_tokens import BEGINS, CLOSES, ENDS, OPENS, ControlTokens, WeightedSpan
from jaxlm.data.conversations import NO_MASK, REFUSED, Conversation, Rejected

MARKS = re.compile(f"[{BEGINS}{ENDS}]")
PROBE = [
    {"role": role, "content": f"{OPENS}{text}{CLOSES}"}
    for role, text in (("user", "a"), ("assistant", "b"))
]
FIX = (
    "--config.data.max_dropped=1    # leaves such conversations out\n--config.data.template=chatml"
)
SHOWN = 40  # characters of a difference in an error


class Rendered(NamedTuple):
    """The guarded text of a conversation, its trained spans, and if the end of text follows."""

    text: str
    spans: list[WeightedSpan]
    is_open: bool


class MaskRenderer:
    """Renders conversations in one process and locates their trained turns; a context manager.

    Args:
      template: the chat template.
      control: control tokens of the tokenizer.
    """

    def __init__(self, template: ChatTemplate, control: ControlTokens):
        self._control = control
        self._has_marks = "endgeneration" in template.source
        self._renderer = Renderer(template, (BEGINS, ENDS))
        self._tail, self._asking = "", ""  # text behind an answer, and from a prompt to its answer
        # White space and the control tokens behind it, and places where a header may end.
        self._run = re.compile(f"\\s*(?:{control.pattern.pattern})+")
        self._border = re.compile(f"{control.pattern.pattern}|[>\n]")

    def __enter__(self) -> "MaskRenderer":
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._renderer)
            stops = [(2, False), (1, True)]
            ((answered, asked),) = self._renderer.render([RenderRequest(PROBE, {}, stops)])
            stack.pop_all()  # the process ends with this context
        self._tail, self._asking = (
            _plain(text.partition(mark)[2]) if isinstance(text, str) else ""
            for text, mark in ((answered, f"b{CLOSES}"), (asked, f"a{CLOSES}"))
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._renderer.__exit__()

    @property
    def ending(self) -> str | None:
        """Return the control token that ends an answer; None without one."""
        match = self._control.pattern.search(self._tail)
        return match[0] if match else None

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered | Rejected]:
        """Return the text and spans of each conversation, or the reason to leave it out.

        Raise DataError if the template is invalid or exceeds a limit.
        """
        guarded = [each.mapped(self._control.guarded) for each in conversations]
        texts = self._renderer.render([item for each in guarded for item in self._items(each)])
        remaining = iter(texts)
        answers = [[next(remaining)[0] for _ in self._items(each)] for each in guarded]
        located = [
            self._located(each, (), *texts) for each, texts in zip(guarded, answers, strict=True)
        ]
        unclear = [number for number, each in enumerate(located) if each is None]
        items = [_prompts(guarded[number]) for number in unclear]
        for number, prompts in zip(unclear, self._renderer.render(items), strict=True):
            located[number] = self._located(guarded[number], prompts, *answers[number])
        unclear = [number for number in unclear if located[number] is None]
        items = [_differences(guarded[number]) for number in unclear]
        for number, beginnings in zip(unclear, self._renderer.render(items), strict=True):
            located[number] = self._subtracted(guarded[number], beginnings)
        return located  # type: ignore[return-value]

    def render_prompts(self, prompts: Sequence[Conversation]) -> list[Rendered | Rejected]:
        """Return the text of each conversation with the header of the next answer.

        Raise DataError as `render` does.
        """
        guarded = [each.mapped(self._control.guarded) for each in prompts]
        items = [_item(each, [(len(each.messages), True)]) for each in guarded]
        return [
            Rejected(REFUSED, text.why, FIX)
            if isinstance(text, Refusal)
            else Rendered(_plain(text), [], is_open=False)
            for (text,) in self._renderer.render(items)
        ]

    def _items(self, conversation: Conversation) -> list[RenderRequest]:
        """Return what is rendered first: the conversation, and without marks its enclosed form."""
        messages, weights = conversation.messages, conversation.weights
        whole = _item(conversation, [(len(messages), False)])
        if self._reads_marks(conversation):
            return [whole]
        enclosed = [
            _enclosed(message) if weight else message
            for message, weight in zip(messages, weights, strict=True)
        ]
        return [whole, whole._replace(messages=enclosed)]

    def _reads_marks(self, conversation: Conversation) -> bool:
        roles = {message["role"] for _, message, _ in _trained(conversation)}
        return self._has_marks and roles == {"assistant"}

    def _located(
        self,
        conversation: Conversation,
        prompts: Sequence[str | Refusal],
        whole: str | Refusal,
        enclosed: str | Refusal = "",
    ) -> Rendered | Rejected | None:
        """Return the text and its spans; None if only more renderings can locate them.

        Args:
          conversation: the guarded conversation.
          prompts: the generation prompts of its trained turns; empty if not rendered.
          whole: its text.
          enclosed: its text with enclosed contents.
        """
        if isinstance(whole, Refusal):
            return Rejected(REFUSED, whole.why, FIX)
        if self._reads_marks(conversation):
            return self._marked(conversation, whole)
        whole = _plain(whole)
        if isinstance(enclosed, Refusal):
            return None
        enclosed = _plain(enclosed)
        if enclosed.replace(OPENS, "").replace(CLOSES, "") != whole:
            return None
        places = list(_places(enclosed))
        trained = list(_trained(conversation))
        if len(places) != len(trained):
            return None
        spans: list[WeightedSpan] = []
        stop = 0
        for number, ((_, message, weight), place) in enumerate(zip(trained, places, strict=True)):
            prompt = prompts[number] if prompts else None
            start, close = self._start(message, prompt, whole, stop, place), place[1]
            if start is None:
                return None
            stop = self._stop(whole, close)
            spans.append(WeightedSpan(start, stop, weight))
        return self._rendered(conversation, whole, spans)

    def _start(
        self,
        message: Message,
        prompt: str | Refusal | None,
        whole: str,
        least: int,
        place: tuple[int | None, int],
    ) -> int | None:
        """Return the start of a trained turn: behind the generation prompt, or the content's own.

        If the template cut the start of the content, the generation prompt may end with what was
        cut; then the turn starts behind the last token or line of the prompt that is in the text.
        """
        opened, close = place
        if opened is not None:
            lead = message["content"][: -len(message["content"].lstrip())]
            opened -= len(lead) if whole.endswith(lead, 0, opened) else 0
            is_asked = bool(self._asking) and whole.endswith(self._asking, 0, opened)
            if is_asked or message["role"] != "assistant":
                return opened
        if prompt is None:
            return None
        if isinstance(prompt, Refusal):
            return opened
        most = close if opened is None else opened
        same = _common(_plain(prompt), whole)
        if same == len(_plain(prompt)) and least <= same <= most:
            return same
        if opened is None and same >= len(_plain(prompt)) - len(self._asking):
            places = self._border.finditer(whole, least, min(same, most))
            return max((match.end() for match in places), default=None)
        return opened

    def _marked(self, conversation: Conversation, marked: str) -> Rendered | None:
        """Return the text and the spans that the template marks; None if turns are ambiguous."""
        parts = MARKS.split(marked)
        text = "".join(parts)
        answers = [
            weight
            for message, weight in zip(conversation.messages, conversation.weights, strict=True)
            if message["role"] == "assistant"
        ]
        if len(parts) // 2 != len(answers) and len(set(answers)) > 1:
            return None
        if len(parts) // 2 != len(answers):
            answers = answers[:1] * (len(parts) // 2)
        spans = []
        place = 0
        for number, part in enumerate(parts):
            if number % 2 and answers[number // 2]:
                spans.append(
                    WeightedSpan(
                        place, self._stop(text, place + len(part), place), answers[number // 2]
                    )
                )
            place += len(part)
        return self._rendered(conversation, text, spans)

    def _stop(self, text: str, close: int, start: int | None = None) -> int:
        """Return the end of the turn whose content ends at `close`, with the token that ends it.

        A marked turn, which starts at `start`, may contain that token already.
        """
        if start is not None:
            last = self._last(text, start, close)
            if last > start and not text[last:close].strip():
                return close
        rest = text[close:]
        for white in range(len(rest) - len(rest.lstrip()) + 1):  # a content may end with it
            begin = close + white
            same = begin + _common(text[begin : begin + len(self._tail)], self._tail)
            if match := self._run.match(text, begin, same):
                return match.end()
            if self.ending is None and same > begin:
                return same
        match = self._control.pattern.search(text, close)
        is_next = match is not None and not text[close : match.start()].strip()
        return match.end() if match is not None and is_next else close

    def _last(self, text: str, start: int, stop: int) -> int:
        """Return the end of the last control token from `start` to `stop`; `start` without one."""
        ends = (match.end() for match in self._control.pattern.finditer(text, start, stop))
        return max(ends, default=start)

    def _subtracted(
        self, conversation: Conversation, answers: list[str | Refusal]
    ) -> Rendered | Rejected:
        """Return the text and the spans between renderings of its beginnings."""
        texts = []
        for answer in answers:
            if isinstance(answer, Refusal):
                return Rejected(NO_MASK, f"a beginning is refused: {answer.why}", FIX)
            texts.append(_plain(answer))
        whole, *beginnings = texts
        for text in beginnings:
            if not whole.startswith(text):
                return Rejected(
                    NO_MASK,
                    _difference(text, whole),
                    f"mark answers in the template by {{% generation %}}\n{FIX}",
                )
        spans = []
        for number, (_, _, weight) in enumerate(_trained(conversation)):
            start, stop = (len(text) for text in beginnings[2 * number : 2 * number + 2])
            last = self._last(whole, start, stop)
            is_end = last > start and not whole[last:stop].strip()
            spans.append(WeightedSpan(start, last if is_end else stop, weight))
        return self._rendered(conversation, whole, spans)

    def _rendered(
        self, conversation: Conversation, text: str, spans: list[WeightedSpan]
    ) -> Rendered:
        """Return the result; the end of text ends a last turn that no control token ends."""
        is_last = bool(conversation.weights[-1]) and bool(spans)
        is_open = is_last and not self._control.pattern.search(text, spans[-1].start)
        return Rendered(text, spans, is_open)


def _plain(text: str) -> str:
    """Return a text without the marks of its template."""
    return text.replace(BEGINS, "").replace(ENDS, "")


def _item(conversation: Conversation, stops: Sequence[tuple[int, bool]]) -> RenderRequest:
    more = {"tools": conversation.tools} if conversation.tools else {}
    return RenderRequest(conversation.messages, more, stops)


def _prompts(conversation: Conversation) -> RenderRequest:
    """Return the item of the generation prompt of each trained turn."""
    return _item(conversation, [(turn, True) for turn, _, _ in _trained(conversation)])


def _trained(conversation: Conversation) -> Iterator[tuple[int, Message, float]]:
    """Yield number, message and weight of each trained turn."""
    pairs = zip(conversation.messages, conversation.weights, strict=True)
    return ((turn, message, weight) for turn, (message, weight) in enumerate(pairs) if weight)


def _enclosed(message: Message) -> Message:
    """Return a message with its content enclosed, inside the white space that templates strip."""
    content = message["content"]
    if not content or message.get("tool_calls"):
        return message
    core = content.strip()
    lead = len(content) - len(content.lstrip())
    rest = content[lead + len(core) :]
    return {**message, "content": f"{content[:lead]}{OPENS}{core}{CLOSES}{rest}"}


def _places(enclosed: str) -> Iterator[tuple[int | None, int]]:
    """Yield the places of both marks of each content; a template may cut the first."""
    place = 0
    *contents, _ = enclosed.split(CLOSES)
    for content in contents:
        _, *others = content.split(OPENS)
        place += len(content) - len(others)
        yield (place - len(others[-1]) if others else None), place


def _differences(conversation: Conversation) -> RenderRequest:
    """Return the item of the whole text, and of the text before and up to each trained turn."""
    stops = [(len(conversation.messages), False)]
    for turn, message, _ in _trained(conversation):
        stops += [(turn, message["role"] == "assistant"), (turn + 1, False)]
    return _item(conversation, stops)


def _common(one: str, other: str) -> int:
    """Return the number of first characters that two texts share."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _difference(text: str, whole: str) -> str:
    """Return the first characters at which a rendered beginning leaves the whole text."""
    place = _common(text, whole)
    first, second = (each[place : place + SHOWN] for each in (text, whole))
    return f"at character {place} a beginning has {first!r}, and the whole conversation {second!r}"
