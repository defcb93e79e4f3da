"""Samples of prompts with their rewards, and the figures of held-out prompts."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxlm.core import faults
from jaxlm.data.loader import EVALUATION_SEED, Loader, shuffled
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals.statistics import pass_at_k
from jaxlm.models.build import Blueprint
from jaxlm.rl.config import RLConfig
from jaxlm.rl.rewards import Rewards, Sample, Verdict, check_scored, unscored
from jaxlm.rl.rollout import DrawnSample, RolloutSampler, RolloutSizes, root_key, row_keys
from jaxlm.rl.turns import Ended, Turns

PASSED = 1.0  # value of the first reward of a sample that passes


class ScoredSamples(NamedTuple):
    """Samples of some prompts, those of a prompt one after another, with their verdicts."""

    documents: list[int]  # the prompt of each sample
    prompts: list[Int[np.ndarray, "n"]]  # its ids
    samples: list[Sample]
    drawn: list[DrawnSample]
    verdicts: list[Verdict]
    texts: list[str]  # of all turns
    draw_seconds: float
    score_seconds: float  # after the last sample was drawn

    @property
    def rewards(self) -> Float[np.ndarray, "N"]:
        """The reward of each sample; NaN without one."""
        totals = [each.total for each in self.verdicts]
        return np.array([np.nan if total is None else total for total in totals], np.float64)

    @property
    def has_passed(self) -> Bool[np.ndarray, "N"]:
        """The samples whose first reward is at least `PASSED`."""
        firsts = [next(iter(each.by_name.values()), None) for each in self.verdicts]
        return np.array([first is not None and first >= PASSED for first in firsts])

    def with_groups(
        self, groups: Sequence[int], others: "ScoredSamples", count: int
    ) -> "ScoredSamples":
        """Return the samples with those of some prompts, `count` of each, replaced by others."""

        def joined(mine: list[Any], theirs: list[Any]) -> list[Any]:
            column = [*mine]
            for place, group in enumerate(groups):
                new = theirs[place * count : (place + 1) * count]
                column[group * count : (group + 1) * count] = new
            return column

        return ScoredSamples(
            joined(self.documents, others.documents),
            joined(self.prompts, others.prompts),
            joined(self.samples, others.samples),
            joined(self.drawn, others.drawn),
            joined(self.verdicts, others.verdicts),
            joined(self.texts, others.texts),
            draw_seconds=self.draw_seconds + others.draw_seconds,
            score_seconds=self.score_seconds + others.score_seconds,
        )

    def figures(self) -> dict[str, float]:
        """Return the means over samples that every record has."""
        rewards, lengths = self.rewards, np.array([each.tokens for each in self.samples])
        figures = {
            "reward": mean(rewards),
            "reward_stderr": _standard_error(rewards, self.documents),
            "ended_share": float(np.mean([each.reason == "eos_token" for each in self.samples])),
            "sample_tokens": float(lengths.mean()),
            "unscorable_share": float(np.isnan(rewards).mean()),
        }
        if any(each.is_drawn is not None for each in self.drawn):
            figures["turns"] = float(np.mean([each.turns for each in self.drawn]))
        for name in self.verdicts[0].by_name:
            values = [each.by_name[name] for each in self.verdicts]
            known = [value for value in values if value is not None]
            figures[f"reward/{name}"] = mean(np.array(known))
        return figures


class Samplers(NamedTuple):
    """Programs that draw samples: by the temperature of the run, and the likeliest ids."""

    drawing: RolloutSampler
    greedy: RolloutSampler

    @classmethod
    def of(
        cls,
        blueprint: Blueprint,
        tokenizer: Tokenizer,
        settings: RLConfig,
        *,
        rows: int,
        longest: int,
    ) -> "Samplers":
        """Return the samplers of a run.

        Args:
          blueprint: the model, a decoder.
          tokenizer: its tokenizer.
          settings: samples and their length.
          rows: samples of an update.
          longest: most ids of a prompt.

        Raises:
          ConfigError: if a prompt and its sample do not fit the positions of the model.
        """
        slots = settings.slots_of(rows)
        sizes = RolloutSizes(slots, longest, settings.max_tokens, settings.samples)
        sampler = functools.partial(RolloutSampler, blueprint, tokenizer, sizes)
        return cls(sampler(settings.temperature), sampler(0.0))


class PromptScorer:
    """Draws samples of prompts and rewards them, under the mesh of the parameters.

    Args:
      samplers: the programs that draw samples.
      tokenizer: the tokenizer of the model.
      rewards: the rewards, in their `with` block.
      turns: the turns after those of the model, in their `with` block; None for samples of one.
      share: returns the verdicts of the first process in every process; None for one process.
      is_scorer: False in a process whose verdicts are shared by another one.
    """

    def __init__(
        self,
        samplers: Samplers,
        tokenizer: Tokenizer,
        rewards: Rewards,
        turns: Turns | None = None,
        share: Callable[[Any], Any] | None = None,
        *,
        is_scorer: bool = True,
    ):
        self._samplers, self._tokenizer, self._rewards = samplers, tokenizer, rewards
        self._share, self._is_scorer, self._turns = share, is_scorer, turns

    def score(
        self,
        params: Any,
        loader: Loader,
        documents: Sequence[int],
        count: int,
        keys: Array,
        *,
        where: str,
        is_greedy: bool = False,
    ) -> ScoredSamples:
        """Draw `count` samples of each prompt with a key each, and score them.

        Rewards of processes are computed while other samples are drawn.

        Args:
          params: all parameters, of the blueprint.
          loader: the prompts.
          documents: numbers of the prompts.
          count: samples of each.
          keys: the keys of the samples, those of a prompt one after another.
          where: place of the samples in an error.
          is_greedy: draw the likeliest ids instead.

        Raises:
          DataError: if too many samples have no score.
        """
        begun = time.perf_counter()
        ids = {document: prompt_ids(loader, document) for document in documents}
        repeated = [document for document in documents for _ in range(count)]
        seeds = (np.asarray(jax.random.key_data(keys))[:, -1] % 2**31).tolist()
        samples: dict[int, Sample] = {}
        waiting: dict[int, Callable[[], Verdict]] = {}

        def deliver(number: int, drawn: DrawnSample) -> None:
            sample = self._sample(loader, repeated[number], drawn, seeds[number])
            samples[number] = sample
            if self._is_scorer:
                waiting[number] = self._rewards.begin(sample)

        def ended(number: int, drawn: DrawnSample) -> Ended:
            document = repeated[number]
            sample = self._sample(loader, document, drawn, seeds[number])
            size = len(ids[document]) + len(drawn.ids)
            return Ended(sample, size, drawn.turns, loader.shards.prompts[document].is_plain)

        def follow(open_turns: Sequence[tuple[int, DrawnSample]]) -> list[np.ndarray | None]:
            assert self._turns is not None
            ids: Sequence[Any] = ()
            if self._is_scorer:
                ids = self._turns.following([ended(*each) for each in open_turns])
            if self._share is not None:  # a tool that fails may fail in one process alone
                ids = self._share([each if each is None else each.tolist() for each in ids])
            return [each if each is None else np.array(each, np.int32) for each in ids]

        sampler = self._samplers.greedy if is_greedy else self._samplers.drawing
        prompts = [ids[document] for document in repeated]
        has_turns = self._turns is not None
        drawn = sampler.draw(
            params, prompts, keys, follow=follow if has_turns else None, deliver=deliver
        )
        drawn_at = time.perf_counter()
        faults.point("rollout.score")
        verdicts = [waiting[number]() for number in sorted(waiting)]
        if self._share is not None:
            verdicts = [Verdict(*each) for each in self._share(verdicts)]
        ordered = [samples[number] for number in range(len(repeated))]
        missing = unscored(ordered, verdicts)
        check_scored(missing, len(ordered), self._rewards.tolerance, where=where)
        return ScoredSamples(
            repeated,
            prompts,
            ordered,
            drawn,
            verdicts,
            [self._text(each.ids) for each in drawn],
            draw_seconds=drawn_at - begun,
            score_seconds=time.perf_counter() - drawn_at,
        )

    def evaluate(
        self, params: Any, loader: Loader, most: int | None, *, samples: int, seed: int
    ) -> dict[str, Any]:
        """Return the figures of the prompts of a validation set, or of `most` of them.

        Each prompt has a greedy sample, and drawn ones by the same keys at every evaluation.
        `pass_k` is the probability that one of k drawn samples passes, without bias. `loss_nats` is
        the negative mean reward of drawn samples, which ranks checkpoints.

        Args:
          params: all parameters, of the blueprint.
          loader: the prompts.
          most: maximum number of prompts; None for all.
          samples: drawn samples of each prompt.
          seed: seed of the keys.
        """
        count = loader.shards.documents
        chosen = [shuffled(n, count, EVALUATION_SEED) for n in range(min(most or count, count))]
        keys = row_keys(root_key(seed, "held out"), 0, len(chosen), samples)
        where = f"evaluation on {loader.shards.source}"
        drawn = self.score(params, loader, chosen, samples, keys, where=where)
        greedy = self.score(params, loader, chosen, 1, keys[::samples], where=where, is_greedy=True)
        figures = drawn.figures()
        passed = drawn.has_passed.reshape(-1, samples).sum(1)
        figures |= {f"pass_{k}": pass_at_k(passed, samples, k) for k in sorted({1, samples})}
        figures["greedy_reward"] = mean(greedy.rewards)
        figures["greedy_pass"] = float(greedy.has_passed.mean())
        return {"loss_nats": -figures["reward"], "prompts": len(chosen)} | figures

    def _sample(self, loader: Loader, document: int, drawn: DrawnSample, seed: int) -> Sample:
        ids = drawn.last_turn
        ids = ids[:-1] if drawn.reason == "eos_token" else ids
        prompt = loader.shards.prompts[document]
        return Sample(
            prompt=prompt.text,
            completion=self._text(ids),
            answer=prompt.answer,
            info=prompt.info,
            seed=seed,
            reason="eos_token" if drawn.reason == "eos_token" else "length",
            tokens=int(drawn.mask.sum()),
        )

    def _text(self, ids: np.ndarray) -> str:
        return b"".join(self._tokenizer.table[n] for n in ids.tolist()).decode("utf-8", "replace")


def _standard_error(rewards: np.ndarray, documents: Sequence[int]) -> float:
    """Return the standard error of the mean reward, between prompts; 0 of a single one."""
    groups = [rewards[np.array(documents) == each] for each in dict.fromkeys(documents)]
    means = [known.mean() for each in groups if len(known := each[~np.isnan(each)])]
    return float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else 0.0


def prompt_ids(loader: Loader, document: int) -> np.ndarray:
    """Return the ids of a prompt."""
    length = int(loader.shards.lengths(document, document + 1)[0])
    return loader.shards.read(document, 0, length).astype(np.int32)


def mean(values: Float[np.ndarray, "n"]) -> float:
    """Return the mean of the values that are not NaN; 0 without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0
