"""Draws of answers by one engine, and the ids of what they answer."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from jaxlm.core.callbacks import Log
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.requests import CompletedRequest, Request
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


class Drawer:
    """An engine that draws answers, in a `with` block, under the mesh of the run.

    Args:
      opened: the run.
      settings: sizes of the engine.
      answer: the request of an answer, but for its ids and its seed.
    """

    def __init__(self, opened: LoadedRun, settings: EngineSettings, answer: Request):
        self._answer = answer
        model = opened.model.blueprint, opened.params, opened.tokenizer
        self._engine = Engine(*model, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def results(self, asks: Iterable[Ask]) -> Iterator[CompletedRequest]:
        """Yield the answers, in order; later ones are drawn meanwhile."""
        return self._engine.results(
            dataclasses.replace(self._answer, ids=tuple(ids), seed=seed) for ids, seed in asks
        )
