"""Scores of answers by a language model that is asked, as log-odds of one token."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError
from jaxlm.data import chat_templates
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.conversations import Conversation
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.parallel import host, rules
from jaxlm.recipes.use import load
from jaxlm.recipes.use.generate import check_generates, template_of
from jaxlm.recipes.use.reward_model import ROWS

WORDS = "Yes", "No"
QUESTION = """\
Question:
{prompt}

Answer:
{answer}

Is this a good answer to the question? Reply with Yes or No.
"""


class AskedModel:
    """A run that is asked if an answer is good: the score is log p(Yes) - log p(No).

    The question is a user's turn if the run has a chat template. Both words are read by their first
    tokens, in one forward pass.

    Attributes:
      digest: of the step's parameters and of the question.

    Args:
      ref: RUN[@STEP].
      flag: the flag that names it, for errors.
      `say`: receives log lines.

    Raises:
      InputMissing: if there is no such run.
      ConfigError: if its model does not continue text, or both words begin with the same token.
    """

    def __init__(self, ref: str, flag: str, say: Log = lambda _: None):
        source = load.open_run_ref(ref, flag, say)
        opened = load.load_run(source.workdir, step=source.step, say=say)
        check_generates(opened, is_chat=False)
        self._opened, self.digest = opened, source.digest
        self._length = opened.run.data.sequence
        self._tokenizer: Tokenizer = opened.tokenizer
        if chat_templates.of_folder(source.workdir / chat_templates.HUB) is not None:
            template = template_of(source.workdir, say=say)
            self._tokenizer = ChatTokenizer(opened.tokenizer, template)
        yes, no = (opened.tokenizer.encode(word)[0] for word in WORDS)
        if yes == no:
            raise ConfigError(
                "the judge cannot answer Yes or No",
                where=f"{flag}={ref}",
                why="both words begin with the same token",
                fix="name a run with another tokenizer",
            )
        ways = rules.split(opened.model.mesh, "batch")
        self._rows = -(-ROWS // ways) * ways
        self._put = functools.partial(host.put, opened.model.mesh)
        blueprint = opened.model.blueprint

        def odds(params: Any, ids: jax.Array, segments: jax.Array) -> jax.Array:
            model, counts = blueprint.merge(params), segments.sum(1)
            places = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
            hidden = model.hidden(ids, positions=places, segments=segments).values
            last = jnp.take_along_axis(hidden, counts[:, None, None] - 1, axis=1)
            logits = model.logits(last)[:, 0].astype(jnp.float32)
            return logits[:, yes] - logits[:, no]

        self._step = jax.jit(odds)

    def scores(self, conversations: Sequence[Conversation]) -> list[float | None]:
        """Return the log-odds of each conversation's last answer; None if it is too long."""
        texts = [
            QUESTION.format(
                prompt="\n".join(str(each["content"]) for each in conversation.messages[:-1]),
                answer=conversation.messages[-1]["content"],
            )
            for conversation in conversations
        ]
        before = list(self._tokenizer.before)
        rows = [before + ids for ids in self._tokenizer.encode_many(texts)]
        fitting = [number for number, ids in enumerate(rows) if len(ids) <= self._length]
        scores = dict[int, float]()
        with jax.set_mesh(self._opened.model.mesh):
            for start in range(0, len(fitting), self._rows):
                part = fitting[start : start + self._rows]
                ids = np.full((self._rows, self._length), self._tokenizer.pad, np.int32)
                segments = np.zeros_like(ids)
                segments[:, 0] = 1
                for row, number in enumerate(part):
                    ids[row, : len(rows[number])] = rows[number]
                    segments[row, : len(rows[number])] = 1
                placed = self._put((ids, segments))
                values = np.asarray(self._step(self._opened.params, *placed)).tolist()
                scores |= zip(part, values, strict=False)
        return [scores.get(number) for number in range(len(rows))]
