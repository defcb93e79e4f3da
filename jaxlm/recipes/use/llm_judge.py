"""Scores of answers by a language model that is asked, as log-odds of two tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError
from jaxlm.data import chat_templates
from jaxlm.data.batch import Tokens
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.conversations import Conversation
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.models.build import Model
from jaxlm.recipes.use import load
from jaxlm.recipes.use.generate import template_of
from jaxlm.recipes.use.row_scorer import RowScorer

WORDS, NAMES = ("Yes", "No"), ("A", "B")
QUESTION = """\
Question:
{prompt}

Answer:
{answer}

Is this a good answer to the question? Reply with Yes or No.
"""
COMPARISON = """\
Question:
{prompt}

Answer A:
{one}

Answer B:
{other}

Which answer to the question is better? Reply with A or B.
"""


class AskedModel:
    """A run that is asked a question: the answer is the log-odds of two words.

    The question is a user's turn if the run has a chat template. Both words are read by their first
    tokens, in one forward pass. A model that reads prompts in both directions reads questions so.

    Attributes:
      digest: of the step's parameters.

    Args:
      ref: RUN[@STEP].
      flag: the flag that names it, for errors.
      words: the two words.
      `say`: receives log lines.

    Raises:
      InputMissing: if there is no such run.
      ConfigError: if its model does not continue a text token by token, or both words begin with
        the same token.
    """

    def __init__(self, ref: str, flag: str, words: tuple[str, str], say: Log = lambda _: None):
        source = load.open_run_ref(ref, flag, say)
        self._scorer = RowScorer(source, say)
        opened, self.digest = self._scorer.opened, source.digest
        load.check_scores(opened)
        self._tokenizer: Tokenizer = opened.tokenizer
        if chat_templates.of_folder(source.workdir / chat_templates.HUB) is not None:
            template = template_of(source.workdir, say=say)
            self._tokenizer = ChatTokenizer(opened.tokenizer, template)
        first, second = (opened.tokenizer.encode(word)[0] for word in words)
        if first == second:
            raise ConfigError(
                f"the judge cannot answer {words[0]} or {words[1]}",
                where=load.typed(flag, ref),
                why="both words begin with the same token",
                fix="name a run with another tokenizer",
            )

        is_both_ways = opened.run.objective.prompts == "both ways"

        def odds(model: Model, batch: Tokens) -> jax.Array:
            last = jnp.maximum((batch.segments > 0).sum(1) - 1, 0)
            if is_both_ways:  # the question is a prompt
                slots = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
                batch = batch._replace(visible_until=jnp.maximum(slots, last[:, None]))
            hidden = model.read(batch, key=None).values
            values = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
            logits = model.logits(values)[:, 0].astype(jnp.float32)
            return logits[:, first] - logits[:, second]

        self._step = self._scorer.compiled(odds)

    def odds(self, questions: Sequence[str]) -> list[float | None]:
        """Return log p(first word) - log p(second word) after each question; None if too long."""
        before = list(self._tokenizer.before)
        # The last id is a target, which has no effect.
        rows = [[*before, *ids, 0] for ids in self._tokenizer.encode_many(questions)]
        return self._scorer.scores(self._step, [np.array(ids) for ids in rows])


class YesNoModel(AskedModel):
    """A run that is asked if an answer is good: the score is log p(Yes) - log p(No)."""

    def __init__(self, ref: str, flag: str, say: Log = lambda _: None):
        super().__init__(ref, flag, WORDS, say)

    def scores(self, conversations: Sequence[Conversation]) -> list[float | None]:
        """Return the log-odds of each conversation's last answer; None if it is too long."""
        return self.odds(
            [
                QUESTION.format(
                    prompt="\n".join(str(each["content"]) for each in conversation.messages[:-1]),
                    answer=conversation.messages[-1]["content"],
                )
                for conversation in conversations
            ]
        )


class Preferred(NamedTuple):
    """The verdict on two answers."""

    odds: float | None  # mean log-odds of the first answer in both orders; None if one is too long
    agrees: bool  # both orders prefer the same answer


class ComparingModel(AskedModel):
    """A run that is shown two answers, in both orders, and asked which one is better."""

    def __init__(self, ref: str, flag: str, say: Log = lambda _: None):
        super().__init__(ref, flag, NAMES, say)

    def compare(self, pairs: Sequence[tuple[str, str, str]]) -> list[Preferred]:
        """Return the verdict on each (prompt, one answer, other answer).

        With f(a, b) = log p(A) - log p(B) if a is shown first, the odds are (f(a, b) - f(b, a)) /
        2: a preference for the first place has no effect, and equal answers have 0.
        """
        shown = [
            COMPARISON.format(prompt=prompt, one=first, other=second)
            for prompt, one, other in pairs
            for first, second in ((one, other), (other, one))
        ]
        odds = self.odds(shown)
        verdicts = []
        for forward, backward in zip(odds[::2], odds[1::2], strict=True):
            if forward is None or backward is None:
                verdicts.append(Preferred(None, agrees=False))
            else:
                verdicts.append(Preferred((forward - backward) / 2, forward * backward < 0))
        return verdicts
