"""Rollouts of a run: samples of its own parameters, their rewards, and rows to train on."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import safetensors.numpy
from jax.experimental import multihost_utils

from jaxlm.core import faults
from jaxlm.core.errors import ConfigError, DataError, Diverged
from jaxlm.data import loader as loaders
from jaxlm.data.batch import Rollout, Tokens
from jaxlm.data.loader import Loader
from jaxlm.data.prompts import ONE_PROMPT
from jaxlm.objectives.config import Policy
from jaxlm.ops.advantage import advantages, is_dead
from jaxlm.recipes import setup
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.programs import Skips, TrainPrograms
from jaxlm.rl.rewards import Rewards, check_scored, unscored
from jaxlm.rl.rollout import Drawn, Weighted, as_rows, root_key, row_keys
from jaxlm.rl.scoring import PromptScorer, Scored, mean, prompt_ids
from jaxlm.training.state import TrainState
from jaxlm.training.step import Step

SHOWN = 60  # characters of a prompt in an error
FOLDER = "rollouts"  # of a run directory: rollouts with further updates when it was saved
NOTHING = Drawn(np.zeros(0, np.int32), np.zeros(0, np.float32), "length")
Note = Callable[[int, list[dict[str, Any]]], None]


class Rollouts(contextlib.ExitStack):
    """The rollouts of a run, in a `with` block and under the mesh of its programs.

    Rollout r is a function of the seed, of r, and of the parameters after `rl.updates * r` steps: a
    run that resumes draws the same one again. Every process draws all samples; the first one scores
    them.

    Args:
      context: the run.
      programs: the model and the data.
      note: called with the step, and a record of each sample, of every rollout.

    Raises:
      ConfigError: if the data has no prompts, or a sample does not fit the model.
      DataError: if a reward needs answers that prompts do not have.
    """

    def __init__(self, context: RunContext, programs: TrainPrograms, note: Note):
        super().__init__()
        run = context.run
        assert isinstance(run.objective, Policy)
        self._context, self._programs, self._note, self._run = context, programs, note, run
        self._objective = run.objective
        self._loader = programs.data.train
        sets = self._loader, *programs.data.validation.values()
        for each in sets:
            _check_prompts(each)
        self._check_answers()
        self._rewards = Rewards(run.reward)
        blueprint, self._decoded = setup.decoding(programs.model)
        self._scorer = PromptScorer(
            blueprint,
            programs.data.tokenizer,
            run.rl,
            self._rewards,
            rows=run.train.batch,
            longest=max(each.shards.manifest.figures["longest"] for each in sets),
            share=self._shared if context.processes.peers.count > 1 else None,
        )
        self._params: Any = None
        self._rows: Tokens | None = None  # of the rollout that is trained on
        self._dead = 0  # rollouts in a row without a gradient
        self._figures: dict[int, dict[str, float]] = {}

    def _check_answers(self) -> None:
        """Raise DataError if a reward needs answers, and too many prompts have none."""
        reward, prompts = self._run.reward, self._loader.shards.prompts
        missing = [each for each in prompts if each.answer is None] if reward.needs_answer else []
        if len(missing) > reward.tolerance * len(prompts):
            raise DataError(
                f"{len(missing)} of {len(prompts)} prompts have no answer",
                where=", ".join(self._run.data.train),
                why=f"the reward {reward.needs_answer[0]} compares with it; "
                f"the first prompt begins with {missing[0].text[:SHOWN]!r}",
                fix=f"{ONE_PROMPT}\n--config.reward.functions=ended    # needs no answer",
            )

    def __enter__(self) -> Self:
        self.enter_context(self._rewards)
        return self

    def following(self, step: Step, state: TrainState) -> Step:
        """Return the step, after which rollouts are drawn from its parameters; first of `state`."""
        self._params = state.params

        def stepped(state: TrainState, batch: Any) -> Any:
            state, metrics = step(state, batch)
            self._params = state.params
            return state, metrics

        return stepped

    def batches(self, start: int, skips: Skips = ()) -> Generator[Tokens, None, None]:
        """Yield the batches of the steps after `start`, on the devices, without end."""
        updates, size = self._run.rl.updates, self._run.train.batch
        self._rows = None
        for step in itertools.count(start):
            number = loaders.batch_number(step, skips)
            rollout, part = divmod(number, updates)
            if part and self._rows is None:
                self._rows = self._stored(rollout)
            elif part == 0:
                with self._context.processes.watch.phase("data"):
                    self._rows = self._drawn(rollout, step + 1)
            first = part * size
            batch = jax.tree.map(lambda x, low=first: x[low : low + size], self._rows)
            yield self._programs.place(batch, number)

    def keep(self, step: int, skips: Skips = ()) -> None:
        """Write the rollout to the run directory, if a save after a step divides its updates.

        Files of rollouts before the oldest checkpoint are removed.
        """
        updates, directory = self._run.rl.updates, self._context.directory
        rollout, part = divmod(loaders.batch_number(step, skips), updates)
        if not part or self._rows is None or not directory.is_writer:
            return
        folder = directory.path / FOLDER
        folder.mkdir(exist_ok=True)
        oldest = min(self._context.store.steps(), default=0) // updates
        for file in folder.glob("*.safetensors"):
            if int(file.stem) < oldest:
                file.unlink()
        content = safetensors.numpy.save(_columns(self._rows))
        directory.write_bytes(f"{FOLDER}/{rollout}.safetensors", content)

    def _stored(self, number: int) -> Tokens:
        """Return the rows of a rollout whose first updates came before a save.

        Raise DataError if its file is gone, or does not have the shape of the rollouts of this run.
        """
        name = f"{FOLDER}/{number}.safetensors"
        path, rl = self._context.directory.path / name, self._run.rl
        rows = _empty(self._run.train.batch * rl.updates, self._run.data.sequence)
        blank = _columns(rows)
        is_first = self._context.processes.peers.is_first
        stored = _read(path, blank) if is_first else None
        if not self._context.processes.share("rollout", stored is not None):
            step = number * rl.updates
            raise DataError(
                "the samples that the run was trained on when it was saved are gone",
                where=str(path),
                why=f"rl.updates = {rl.updates} steps use a rollout, this one after step {step}",
                fix=f"--start_at={step} --force    # if it is saved\nrestore the file",
            )
        if self._context.processes.peers.count > 1:
            stored = multihost_utils.broadcast_one_to_all(stored or blank)
        assert stored is not None
        arrays: dict[str, Any] = stored
        rollout = Rollout(**{name: arrays.pop(name) for name in Rollout._fields})
        return Tokens(**arrays)._replace(rollout=rollout)

    def take(self, step: int) -> dict[str, float]:
        """Return the figures of the rollout that was drawn for a step; empty if none was."""
        for earlier in [each for each in self._figures if each < step]:
            del self._figures[earlier]
        return self._figures.pop(step, {})

    def evaluate(self, params: Any, loader: Loader, most: int | None) -> dict[str, Any]:
        """Return the figures of a validation set, see `PromptScorer.evaluate`."""
        whole = self._decoded(self._programs.whole(params))
        return self._scorer.evaluate(whole, loader, most, self._run.seed)

    def _shared(self, value: Callable[[], Any]) -> Any:
        processes = self._context.processes
        return processes.share("rewards", value() if processes.peers.is_first else None)

    def _drawn(self, number: int, step: int) -> Tokens:
        """Return the rows of a rollout, and note its samples and figures for a step."""
        run, objective, terms = self._run, self._objective, self._objective.terms
        prompts, samples = run.rl.prompts(run.train.batch), run.rl.samples
        size = self._loader.shards.documents
        places = [divmod(number * prompts + n, size) for n in range(prompts)]
        chosen = [loaders.shuffled(n, size, [run.seed, epoch]) for epoch, n in places]
        keys = row_keys(root_key(run.seed), number, prompts, samples)
        faults.point("rollout.draw", step)
        params = self._decoded(self._programs.whole(self._params))
        scored = self._scorer.score(params, self._loader, chosen, samples, keys)
        where = f"rollout of step {step}"
        missing = unscored(scored.samples, scored.verdicts)
        check_scored(missing, len(scored.samples), run.reward.tolerance, where=where)
        rewards = scored.rewards.reshape(prompts, samples)
        if objective.truncated == "mask":
            is_cut = np.array([each.reason == "length" for each in scored.samples])
            rewards = np.where(is_cut.reshape(rewards.shape), np.nan, rewards)
        values = advantages(rewards, baseline=terms.baseline, scale=terms.scale)
        dead = is_dead(rewards)
        self._count_dead(dead, rewards, step)
        is_left = np.isnan(rewards)
        if terms.has_group_baseline and objective.dead_groups == "drop":
            is_left = is_left | dead[:, None]
        known = [group[~np.isnan(group)] for group in rewards]
        self._figures[step] = scored.figures() | {
            "reward_std": mean(np.array([group.std() for group in known if len(group)])),
            "dead_groups": float(dead.mean()),
            "draw_seconds": scored.draw_seconds,
            "score_seconds": scored.score_seconds,
        }
        pairs = zip(is_left.flat, values.flat, strict=True)
        used = [None if is_out else float(value) for is_out, value in pairs]
        self._note(step, _records(scored, used))
        ids = {document: prompt_ids(self._loader, document) for document in chosen}
        repeated = [ids[document] for document in scored.documents]
        weighted = [Weighted(*each) for each in zip(repeated, scored.drawn, used, strict=True)]
        length, most = run.data.sequence, run.rl.max_tokens
        return as_rows(weighted, length, mean=terms.mean, max_tokens=most)

    def _count_dead(self, dead: np.ndarray, rewards: np.ndarray, step: int) -> None:
        """Raise Diverged if too many rollouts in a row have no group with different rewards."""
        run = self._run
        self._dead = self._dead + 1 if dead.all() else 0
        if self._dead < run.guard.budget or not self._objective.terms.has_group_baseline:
            return
        raise Diverged(
            f"all samples of each prompt had equal rewards in {self._dead} rollouts in a row",
            where=f"rollout of step {step}",
            why=f"the mean reward is {mean(rewards.ravel()):.4g}, and equal rewards of a group "
            "have no gradient: the prompts are too hard for this model, or too easy",
            fix=f"--config.rl.samples={2 * run.rl.samples} "
            f"--config.train.batch={2 * run.train.batch}    # a new run with larger groups\n"
            "choose prompts that the model solves now and then\n"
            "begin with a model that solves some of them",
        )


def _empty(rows: int, length: int) -> Tokens:
    """Return rows without samples."""
    return as_rows([Weighted(np.zeros(1, np.int32), NOTHING, None)] * rows, length)


def _columns(rows: Tokens) -> dict[str, np.ndarray]:
    """Return the arrays of rows by name."""
    assert rows.rollout is not None
    named = rows._asdict() | rows.rollout._asdict()
    return {name: each for name, each in named.items() if isinstance(each, np.ndarray)}


def _read(path: Path, like: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """Return the arrays in a file; None if it is missing, damaged, or of other shapes."""
    try:
        stored = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError):
        return None
    shapes = [{n: (x.shape, x.dtype) for n, x in each.items()} for each in (stored, like)]
    return stored if shapes[0] == shapes[1] else None


def _records(scored: Scored, used: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return the record of each sample, with its advantage; the digest is of its ids."""
    columns = scored.documents, scored.samples, scored.drawn, scored.verdicts, used
    return [
        {
            "document": document,
            "prompt": sample.prompt,
            "text": sample.completion,
            "answer": sample.answer,
            "reward": verdict.total,
            "rewards": verdict.by_name,
            "problem": verdict.problem,
            "advantage": advantage,
            "tokens": sample.tokens,
            "reason": sample.reason,
            "digest": hashlib.sha256(drawn.ids.astype("<i4").tobytes()).hexdigest()[:16],
        }
        for document, sample, drawn, verdict, advantage in zip(*columns, strict=True)
    ]


def _check_prompts(loader: Loader) -> None:
    """Raise ConfigError if token shards have no prompts."""
    if not loader.shards.prompts:
        raise ConfigError(
            "token shards have no prompts",
            where=str(loader.shards.folder),
            why="they were written with another data.kind",
            fix="write the shards again with --config.data.kind=prompts",
        )
