"""Scores of conversations by a trained reward model."""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError
from jaxlm.data import chat_documents
from jaxlm.data.batch import Tokens
from jaxlm.data.chat_encoder import ChatEncoder
from jaxlm.data.conversations import Conversation, LabeledStep
from jaxlm.data.records import Document, LeftOut
from jaxlm.models.build import Model
from jaxlm.objectives.reward import score_slots, score_texts
from jaxlm.recipes.use import load
from jaxlm.recipes.use.generate import template_of
from jaxlm.recipes.use.row_scorer import RowScorer


class RewardModel:
    """A run of `objective.name=reward` or `process`, to score conversations as its training did.

    The score of a process reward model is the least of the last answer's lines, its steps.

    Attributes:
      digest: of the step's parameters.

    Args:
      ref: RUN[@STEP] of the reward model.
      flag: the flag that names it, for errors.
      `say`: receives log lines.

    Raises:
      InputMissing: if there is no such run.
      ConfigError: if it is no reward model.

    Source: Lightman et al. 2023, arXiv:2305.20050, appendix F.2 (the least score of the steps).
    """

    def __init__(self, ref: str, flag: str, say: Log = lambda _: None):
        source = load.open_run_ref(ref, flag, say)
        objective = source.run.objective
        if not objective.has_reward_head:
            pairs = "--config.objective.name=reward --config.data.kind=pairs"
            run = shlex.quote(str(source.workdir))
            raise ConfigError(
                "the run is no reward model",
                where=load.typed(flag, ref),
                why=f"its objective.name is {objective.name}",
                fix=f"jaxlm train --init_from={run} {pairs} --config.data.train=pairs.jsonl"
                f" --workdir={shlex.quote(f'{source.workdir}-reward')}",
            )
        self.digest, self._has_steps = source.digest, objective.labels_steps
        self._scorer = RowScorer(source, say)
        self._encoder = ChatEncoder(
            self._scorer.opened.tokenizer,
            template_of(source.workdir, say=say),
            self._scorer.length,
            max_refused=1.0,
        )
        score = _least_of_steps if self._has_steps else _of_text
        self._step = self._scorer.compiled(score)

    def scores(self, conversations: Sequence[Conversation]) -> list[float | None]:
        """Return the score of each conversation, the chosen one of a pair.

        None if it is longer than a row of the run, or a step has no token of its own.
        """
        alone = [dataclasses.replace(each, rejected=None) for each in conversations]
        if self._has_steps:
            alone = [dataclasses.replace(each, steps=_steps(each)) for each in alone]
        documents = [Document(each.text, "", n, 0, each) for n, each in enumerate(alone)]
        encoded = {
            each.document.record: each
            for each in chat_documents.encode(self._encoder, documents, LeftOut(), Counter())
        }
        texts: list[np.ndarray | None] = [None] * len(alone)
        weights = [np.zeros(0, np.float32)] * len(alone)
        for number, each in encoded.items():
            assert each.weights is not None
            texts[number], weights[number] = np.concatenate(each.ids), each.weights
        return self._scorer.scores(self._step, texts, weights)


def _steps(conversation: Conversation) -> list[LabeledStep]:
    """Return the lines of the last answer; their labels are not read."""
    lines = str(conversation.messages[-1]["content"]).splitlines()
    return [LabeledStep(line, is_right=True) for line in lines if line.strip()]


def _of_text(model: Model, batch: Tokens) -> jax.Array:
    return score_texts(model, batch, None, 1)[0][:, 0]


def _least_of_steps(model: Model, batch: Tokens) -> jax.Array:
    scores, _ = score_slots(model, batch, None)
    return jnp.where(batch.weights > 0, scores, jnp.inf).min(1)
