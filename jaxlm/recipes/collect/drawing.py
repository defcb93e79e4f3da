"""Draws of answers by one engine, and the ids of what they answer."""

import dataclasses
import functools
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from jaxlm.core.callbacks import Log
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.requests import CompletedRequest, Delta, Request, joined
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
      settings: sizes of the engine.
      answer: the request of an answer, but for its ids and its seed.
    """

    def __init__(self, opened: LoadedRun, settings: EngineSettings, answer: Request):
        self._slots, self._answer = settings.rows, answer
        model = opened.model.blueprint, opened.params, opened.tokenizer
        self._engine = Engine(*model, settings)

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
                    request = dataclasses.replace(self._answer, ids=tuple(ids), seed=seed)
                    engine.submit(request, parts.append)
                running.append(answers)
            while running and all(parts and parts[-1].reason for parts in running[0]):
                yield [joined(parts) for parts in running.popleft()]
            if running:
                engine.advance()
                if engine.failure is not None:
                    raise engine.failure
