"""Draws of answers by one engine, and the ids of what they answer."""

import functools
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from jaxlm.core.callbacks import Log
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.engine import Engine
from jaxlm.generate.requests import CompletedRequest, Delta, Request, joined
from jaxlm.generate.rows import Sampling
from jaxlm.recipes.collect.prompts import Messages
from jaxlm.recipes.use import generate
from jaxlm.recipes.use.load import LoadedRun

Ask = tuple[Sequence[int], int]  # ids to continue, and the seed of the draws


class PromptEncoder:
    """Ids of prompts: of text, or of messages by the template of the run."""

    def __init__(self, opened: LoadedRun, say: Log):
        self._opened, self._say = opened, say

    def ids(self, prompts: Sequence[Messages]) -> list[list[int]]:
        """Return the ids of each prompt. Raise ConfigError if the run has no template."""
        tokenizer: Tokenizer = self._opened.tokenizer
        texts = [each for each in prompts if isinstance(each, str)]
        chats = [each for each in prompts if not isinstance(each, str)]
        plain = iter([[*tokenizer.before, *ids] for ids in tokenizer.encode_many(texts)])
        rendered = iter(self._chat.encode_chats(chats) if chats else ())
        return [next(plain if isinstance(each, str) else rendered) for each in prompts]

    def ends(self, prompts: Iterable[Messages]) -> tuple[int, ...]:
        """Return the ids that end an answer."""
        if all(isinstance(each, str) for each in prompts):
            return tuple(self._opened.tokenizer.ends)
        return tuple(self._chat.ends)

    @functools.cached_property
    def _chat(self) -> ChatTokenizer:
        template = generate.template_of(self._opened.workdir, say=self._say)
        return ChatTokenizer(self._opened.tokenizer, template)


def chunk_of(lengths: Sequence[int]) -> int:
    """Return the ids of a prompt that are read at a time: the median prompt, from 16 to 64.

    The last id is read with the answer. A longer chunk of short prompts is mostly padding, which
    costs as much as some tokens of an answer.
    """
    size = 1 << max(int(statistics.median(lengths)) - 2, 0).bit_length()
    return min(max(size, 16), 64)


class Drawer:
    """An engine that draws answers, in a `with` block, under the mesh of the run.

    Args:
      opened: the run.
      slots: answers that are drawn at a time.
      context: most tokens of ids and answer.
      chunk: ids that are read at a time, see `chunk_of`.
      max_tokens: most tokens of an answer.
      temperature: of the draws.
      ends: ids that end an answer.
    """

    def __init__(
        self,
        opened: LoadedRun,
        *,
        slots: int,
        context: int,
        chunk: int,
        max_tokens: int,
        temperature: float,
        ends: tuple[int, ...],
    ):
        self._slots = slots
        self._terms: dict[str, Any] = {
            "max_tokens": max_tokens,
            "sampling": Sampling(temperature=temperature),
            "ends": ends,
            "top": 0,
        }
        self._engine = Engine(
            opened.model.blueprint,
            opened.params,
            opened.tokenizer,
            rows=slots,
            context=context,
            prefix_bytes=2**28,
            chunk=chunk,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def results(self, groups: Iterable[Sequence[Ask]]) -> Iterator[list[CompletedRequest]]:
        """Yield the answers to each group, in order; later groups are drawn meanwhile."""
        engine, remaining = self._engine, iter(groups)
        running: deque[list[list[Delta]]] = deque()
        is_done = False
        while not is_done or running:
            while not is_done and engine.waiting < self._slots:
                group = next(remaining, None)
                if group is None:
                    is_done = True
                    break
                answers: list[list[Delta]] = [[] for _ in group]
                for (ids, seed), parts in zip(group, answers, strict=True):
                    engine.submit(Request(ids=tuple(ids), seed=seed, **self._terms), parts.append)
                running.append(answers)
            while running and all(parts and parts[-1].reason for parts in running[0]):
                yield [joined(parts) for parts in running.popleft()]
            if running:
                engine.advance()
                if engine.failure is not None:
                    raise engine.failure
