"""Judges of answers: verifiers, functions of a file, a reward model, or a model that is asked.

A judge scores each answer alone, or compares the answers of a prompt with each other.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, DataError
from jaxlm.data import conversations
from jaxlm.data.conversations import Rejected
from jaxlm.recipes.collect.prompts import CollectPrompt
from jaxlm.recipes.use.llm_judge import ComparingModel, YesNoModel
from jaxlm.recipes.use.reward_model import RewardModel
from jaxlm.rl.reward_config import RewardConfig
from jaxlm.rl.rewards import Rewards, Sample

FLAG, TRUTH_FLAG = "--judge", "--truth"
TOO_LONG = "longer than a row of the judge"
COMPARED_LONG = "longer than a row of the judge, with another answer"
FAILURES = 0.05  # largest share of the samples without a score


class DrawnAnswer(NamedTuple):
    """A drawn answer of a prompt."""

    prompt: CollectPrompt
    text: str
    reason: str  # see `engine.Result`
    seed: int
    tokens: int


class JudgedAnswer(NamedTuple):
    """The score of an answer, or the reason why there is none."""

    score: float | None
    problem: str = ""


class Judge(Protocol):
    """Scores answers, in a `with` block; `digest` identifies what determines the scores."""

    digest: str

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def score(self, answers: Sequence[DrawnAnswer]) -> list[JudgedAnswer]:
        """Return the score of each answer, in their order."""
        ...


def build(name: str, say: Log, flag: str = FLAG) -> Judge:
    """Return the judge of a flag: reward:RUN, judge:RUN, compare:RUN, or a reward.

    An empty name is the judge that gives no scores.

    Raises:
      CommandError: if there is no such reward.
      InputMissing: if there is no such run.
      ConfigError: if the run cannot judge.
    """
    if not name:
        return NoJudge()
    kind, _, ref = name.partition(":")
    if kind in ("reward", "judge"):
        model = (RewardModel if kind == "reward" else YesNoModel)(ref, f"{flag}={kind}:", say)
        return ModelJudge(model)
    if kind == "compare":
        return ComparingJudge(ComparingModel(ref, f"{flag}={kind}:", say))
    settings = RewardConfig(functions=(name,))
    for _, why, fix in settings.problems():
        meant = fix.replace("--config.reward.functions=", f"{flag}=").removesuffix("=1")
        raise CommandError("there is no such judge", where=f"{flag}={name}", why=why, fix=meant)
    derived: dict[str, Any] = {setting: value for setting, value, _ in settings.derived()}
    return RewardJudge(dataclasses.replace(settings, **derived))


class _Opened:
    """A judge without anything to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NoJudge(_Opened):
    """Gives no scores: a person is asked instead, or answers are compared later."""

    digest = ""

    def score(self, answers: Sequence[DrawnAnswer]) -> list[JudgedAnswer]:
        """Return no score for each answer."""
        return [JudgedAnswer(None)] * len(answers)


class RewardJudge:
    """Rewards of reinforcement learning as a judge."""

    def __init__(self, settings: RewardConfig):
        self.unanswered = settings.unanswered
        self._rewards = Rewards(settings)
        self._stack = contextlib.ExitStack()
        self.digest = self._rewards.digest

    def __enter__(self) -> Self:
        self._stack.enter_context(self._rewards)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def score(self, answers: Sequence[DrawnAnswer]) -> list[JudgedAnswer]:
        """Return the total reward of each answer."""
        samples = [
            Sample(
                prompt=each.prompt.text,
                completion=each.text,
                answer=each.prompt.answer,
                info=each.prompt.info,
                seed=each.seed,
                reason="length" if each.reason == "length" else "eos_token",
                tokens=each.tokens,
            )
            for each in answers
        ]
        return [JudgedAnswer(each.total, each.problem) for each in self._rewards.score(samples)]


class ModelJudge(_Opened):
    """A model that scores conversations as a judge."""

    def __init__(self, model: RewardModel | YesNoModel):
        self._model = model
        self.digest = model.digest

    def score(self, answers: Sequence[DrawnAnswer]) -> list[JudgedAnswer]:
        """Return the score of each answer; an empty one has none."""
        scored: list[JudgedAnswer] = []
        parsed: dict[int, Any] = {}
        for number, each in enumerate(answers):
            record = {"prompt": each.prompt.messages, "completion": each.text}
            try:
                parsed[number] = conversations.parse(record, "completion", ("assistant",))
                scored.append(JudgedAnswer(None, TOO_LONG))
            except Rejected as error:
                scored.append(JudgedAnswer(None, str(error)))
        scores = self._model.scores(list(parsed.values()))
        for number, score in zip(parsed, scores, strict=True):
            if score is not None:
                scored[number] = JudgedAnswer(score)
        return scored


class ComparingJudge(_Opened):
    """A model that is shown two answers: the score is the mean log-odds against the others.

    Answers of one prompt are adjacent. Each is compared with every other one, in both orders, so n
    answers take n (n - 1) questions. An answer that has no other has no score.
    """

    def __init__(self, model: ComparingModel):
        self._model = model
        self.digest = model.digest

    def score(self, answers: Sequence[DrawnAnswer]) -> list[JudgedAnswer]:
        """Return the mean log-odds of each answer against the others of its prompt."""
        groups = itertools.groupby(range(len(answers)), key=lambda n: answers[n].prompt.id)
        pairs = [pair for _, group in groups for pair in itertools.combinations(group, 2)]
        verdicts = self._model.compare(
            [(answers[a].prompt.question, answers[a].text, answers[b].text) for a, b in pairs]
        )
        odds: list[list[float | None]] = [[] for _ in answers]
        for (a, b), verdict in zip(pairs, verdicts, strict=True):
            odds[a].append(verdict.odds)
            odds[b].append(None if verdict.odds is None else -verdict.odds)
        return [_mean(each) for each in odds]


def _mean(odds: Sequence[float | None]) -> JudgedAnswer:
    values = [each for each in odds if each is not None]
    if not odds or len(values) < len(odds):
        return JudgedAnswer(None, COMPARED_LONG if odds else "it is the only answer of its prompt")
    return JudgedAnswer(sum(values) / len(values))


def check_samples(judge: Judge, samples: int) -> None:
    """Raise CommandError if a judge compares answers of a prompt, and there is only one."""
    if isinstance(judge, ComparingJudge) and samples < 2:
        raise CommandError(
            "a judge that compares answers needs two of each prompt",
            where=f"--samples={samples}",
            why="the score of an answer is its mean log-odds against the others",
            fix="--samples=2",
        )


def check_answers(
    judge: Judge,
    name: str,
    prompts: Sequence[CollectPrompt],
    globs: Sequence[str],
    flag: str = FLAG,
) -> None:
    """Raise DataError if a judge compares with answers, and too many prompts have none.

    Args:
      judge: the judge.
      name: value of its flag.
      prompts: the prompts.
      globs: their files.
      flag: the flag.
    """
    unanswered = getattr(judge, "unanswered", lambda answer, info: "")
    missing = [each for each in prompts if unanswered(each.answer, each.info)]
    if len(missing) > FAILURES * len(prompts):
        raise DataError(
            f"{len(missing)} of {len(prompts)} prompts have no answer",
            where=f"--prompts={globs[0]}",
            why=f"{name} compares with the field answer of a line",
            fix=f"{flag}=ended    # needs no answer",
        )
