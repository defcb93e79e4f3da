"""Scores of conversations by a trained reward model."""

import dataclasses
import functools
import shlex
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.data.chat_documents import ChatEncoder
from jaxlm.data.conversations import Conversation
from jaxlm.data.records import Document
from jaxlm.objectives.reward import score_texts
from jaxlm.parallel import host, rules
from jaxlm.recipes.use import load
from jaxlm.recipes.use.generate import template_of

ROWS = 16  # conversations that are scored at a time


class RewardModel:
    """A run of `objective.name=reward`, to score conversations as its training did.

    Attributes:
      digest: of the step's parameters.

    Args:
      ref: RUN[@STEP] of the reward model.
      flag: the flag that names it, for errors.
      `say`: receives log lines.

    Raises:
      InputMissing: if there is no such run.
      ConfigError: if it is no reward model.
    """

    def __init__(self, ref: str, flag: str, say: Log = lambda _: None):
        source = load.open_run_ref(ref, flag, say)
        if not source.run.objective.has_reward_head:
            pairs = "--config.objective.name=reward --config.data.kind=pairs"
            run = shlex.quote(str(source.workdir))
            raise ConfigError(
                "the run is no reward model",
                where=f"{flag}={ref}",
                why=f"its objective.name is {source.run.objective.name}",
                fix=f"jaxlm train --init_from={run} {pairs} --config.data.train=pairs.jsonl"
                f" --workdir={shlex.quote(f'{source.workdir}-reward')}",
            )
        opened = load.load_run(source.workdir, step=source.step, say=say)
        self._opened, self.digest = opened, source.digest
        self._length = opened.run.data.sequence
        template = template_of(source.workdir, say=say)
        self._encoder = ChatEncoder(opened.tokenizer, template, self._length, max_refused=1.0)
        blueprint, mesh = opened.model.blueprint, opened.model.mesh
        ways = rules.split(mesh, "batch")
        self._rows = -(-ROWS // ways) * ways
        self._put = functools.partial(host.put, mesh)
        self._step = jax.jit(
            lambda params, batch: score_texts(blueprint.merge(params), batch, None, 1)[0][:, 0]
        )

    def scores(self, conversations: Sequence[Conversation]) -> list[float | None]:
        """Return the score of each conversation, the chosen one of a pair.

        None if it is longer than a row of the run.
        """
        alone = (dataclasses.replace(each, rejected=None) for each in conversations)
        documents = [Document(each.text, "", n, 0, each) for n, each in enumerate(alone)]
        encoded = self._encoder.encode(documents, Counter(), Counter())
        ids = {each.document.record: np.concatenate(each.ids) for each in encoded}
        numbers, scores = list(ids), dict[int, float]()
        with jax.set_mesh(self._opened.model.mesh):
            for start in range(0, len(numbers), self._rows):
                part = numbers[start : start + self._rows]
                values = self._step(self._opened.params, self._put(self._batch(ids, part)))
                scores |= zip(part, np.asarray(values).tolist(), strict=False)
        return [scores.get(number) for number in range(len(conversations))]

    def _batch(self, ids: dict[int, np.ndarray], numbers: Sequence[int]) -> Tokens:
        """Return a batch with one conversation a row."""
        shape = (self._rows, self._length)
        tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
        for row, number in enumerate(numbers):
            text = ids[number]
            here = (row, slice(0, len(text) - 1))
            tokens[here], targets[here] = text[:-1], text[1:]
            segments[here], positions[here] = 1, np.arange(len(text) - 1)
        weights = segments.astype(np.float32)
        # NumPy until it is placed on devices.
        return Tokens(tokens, targets, weights, segments, positions)  # type: ignore[arg-type]
