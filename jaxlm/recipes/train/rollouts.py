"""Rollouts of a run: samples of its own parameters, their rewards, and rows to train on."""

import contextlib
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.experimental import multihost_utils

from jaxlm.core import faults
from jaxlm.core.errors import ConfigError, DataError, Diverged
from jaxlm.data import loader as loaders
from jaxlm.data.batch import Rollout, Tokens
from jaxlm.data.loader import Loader, with_values
from jaxlm.data.mixture import MixtureLoader
from jaxlm.data.prompts import ONE_PROMPT
from jaxlm.monitor import sinks
from jaxlm.objectives.config import Distill, Sampling
from jaxlm.ops.advantage import is_dead
from jaxlm.recipes import setup
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.programs import Skips, TrainPrograms
from jaxlm.recipes.train.records import ROLLOUTS
from jaxlm.recipes.train.rescoring import Rescorer
from jaxlm.rl.groups import Groups, by_group
from jaxlm.rl.rewards import Rewards
from jaxlm.rl.rollout import DrawnSample, Weighted, as_rows, empty_last, root_key, row_keys
from jaxlm.rl.scoring import PromptScorer, Samplers, ScoredSamples, mean
from jaxlm.rl.turns import Turns
from jaxlm.training.state import TrainState
from jaxlm.training.step import Step

SHOWN = 60  # characters of a prompt in an error
FOLDER = (
    "rollouts"  # of a run directory: rollouts that were drawn and not used up when it was saved
)
NOTES = "notes"  # of such a file: what is logged when the rollout is trained on
NOTHING = DrawnSample(np.zeros(0, np.int32), np.zeros(0, np.float32), "length")
Note = Callable[[int, Sequence[Mapping[str, Any]]], None]


class Drawing(NamedTuple):
    """A rollout: its rows, the record of each sample, figures, and if all its groups are dead."""

    rows: Tokens
    records: Callable[[], list[dict[str, Any]]]  # made while a step is computed
    figures: dict[str, float]
    is_dead: bool


class Rollouts(contextlib.ExitStack):
    """The rollouts of a run, in a `with` block and under the mesh of its programs.

    Rollout r is a function of the seed, of r, and of the parameters at the start of rollout
    r - `rl.lag`, or those of the run: a run that resumes draws the same one again, or reads it.
    With a lag it is drawn in a thread while earlier ones are trained on; several processes draw
    between two steps, as their collectives have one order. Every process draws all samples; the
    first one scores them.

    Args:
      context: the run.
      programs: the model and the data.
      note: called with the step, and a record of each sample, of every rollout that is trained on;
        while the device computes the first step with it.

    Raises:
      ConfigError: if the data has no prompts, or a sample does not fit the model.
      DataError: if a reward needs answers that prompts do not have.
    """

    def __init__(self, context: RunContext, programs: TrainPrograms, note: Note):
        super().__init__()
        run = context.run
        assert isinstance(run.objective, Sampling)
        self._context, self._programs, self._note, self._run = context, programs, note, run
        self._objective = run.objective
        self._loader = programs.data.train
        sets = self._loader, *programs.data.validation.values()
        for each in sets:
            _check_prompts(each)
            self._check_answers(each)
        self._rewards = Rewards(run.reward)
        blueprint, self._decoded = setup.decoding(programs.model)
        most = max(each.shards.manifest.figures["longest"] for each in sets)
        longest = run.rl.longest(most, run.data.sequence)
        self._turns = None
        if run.rl.turns > 1:
            template, tokenizer = programs.data.template, programs.data.tokenizer
            self._turns = Turns(run.rl, run.reward, tokenizer, template, longest)
        tokenizer = programs.data.tokenizer
        self._scorer = PromptScorer(
            Samplers.of(blueprint, tokenizer, run.rl, rows=run.train.batch, longest=longest),
            tokenizer,
            self._rewards,
            self._turns,
            context.processes.sharer("rewards"),
            is_scorer=context.processes.peers.is_first,
        )
        self._rescorer = Rescorer(programs) if run.rescores_rollouts else None
        self._params: Any = None
        # Rollouts that are drawn or being drawn, from the one that is trained on.
        self._drawings: dict[int, Future[Drawing]] = {}
        self._thread: ThreadPoolExecutor | None = None  # draws ahead
        self._dead = 0  # rollouts in a row without a gradient
        self._unnoted: tuple[int, Drawing] | None = None  # of `note`
        self._figures: dict[int, dict[str, float]] = {}

    def _check_answers(self, loader: Loader) -> None:
        """Raise DataError if a reward needs answers, and too many prompts have none."""
        reward, prompts = self._run.reward, loader.shards.prompts
        missing = [each for each in prompts if reward.unanswered(each.answer, each.info)]
        reader, other = "the reward {} compares with it", "reward.functions=ended"
        is_copied = isinstance(self._objective, Distill) and self._objective.sampled < 1
        if missing:
            reader = reader.format(reward.unanswered(missing[0].answer, missing[0].info))
        elif is_copied and loader is self._loader:
            missing = [each for each in prompts if each.answer is None]
            reader = "answers that are not sampled are those of the data"
            other = "objective.sampled=1"
        if len(missing) > reward.tolerance * len(prompts):
            raise DataError(
                f"{len(missing)} of {len(prompts)} prompts have no answer",
                where=loader.shards.source,
                why=f"{reader}; the first prompt begins with {missing[0].text[:SHOWN]!r}",
                fix=f"{ONE_PROMPT}\n--config.{other}    # needs no answer",
            )

    def __enter__(self) -> Self:
        self.enter_context(self._rewards)
        if self._turns is not None:
            self.enter_context(self._turns)
        if self._run.rl.lag and self._context.processes.peers.count == 1:
            self._thread = self.enter_context(ThreadPoolExecutor(1, "rollouts"))
        return self

    def following(self, step: Step, state: TrainState) -> Step:
        """Return the step, after which rollouts are drawn from its parameters; first of `state`."""
        self._params = state.params

        def stepped(state: TrainState, batch: Any) -> Any:
            state, metrics = step(state, batch)
            self._params = state.params
            self._note_samples()  # the step is being computed
            return state, metrics

        return stepped

    def batches(self, start: int, skips: Skips = ()) -> Generator[Tokens, None, None]:
        """Yield the batches of the steps after `start`, on the devices, without end.

        The first rollouts of a run, and those after batches that a rewind left out, are drawn from
        the parameters there instead of earlier ones, unless they were drawn ahead.
        """
        rl, size = self._run.rl, self._run.train.batch
        self._wait()
        self._drawings = self._resumed(start, skips)
        self._figures = {}  # after a rewind, those of steps that are made again
        self._dead = self._dead_before(start)
        noted = self._in_use(start, skips)
        if noted is not None and not self._is_logged(first := self._begun(start, skips)):
            self._figures[first] = self._drawings[noted].result().figures
        for step in itertools.count(start):
            number = loaders.batch_number(step, skips)
            rollout, part = divmod(number, rl.steps)
            with self._context.processes.watch.phase("data"):
                if noted != rollout:  # a rewind may leave out the first batches of a rollout
                    self._draw_ahead(rollout, step + 1)
                drawing = self._drawings[rollout].result()
            if noted != rollout:
                noted = rollout
                self._begin(drawing, step + 1)
            first = part % rl.updates * size
            batch = jax.tree.map(lambda x, low=first: x[low : low + size], drawing.rows)
            yield self._programs.place(batch, number)

    def _resumed(self, start: int, skips: Skips) -> dict[int, Future[Drawing]]:
        """Return the rollouts that were drawn before the step at which a run resumes."""
        if not start:
            return {}
        stop = self._rollout(start - 1, skips) + self._run.rl.lag + 1
        first = self._rollout(start, skips)
        return {each: _done(self._stored(each, start)) for each in range(first, stop)}

    def _rollout(self, step: int, skips: Skips) -> int:
        """Return the rollout that is trained on after `step` completed steps."""
        return loaders.batch_number(step, skips) // self._run.rl.steps

    def _in_use(self, start: int, skips: Skips) -> int | None:
        """Return the rollout that is trained on before a step and after it; None without one."""
        rollout = self._rollout(start, skips)
        return rollout if start and self._rollout(start - 1, skips) == rollout else None

    def _begun(self, start: int, skips: Skips) -> int:
        """Return the first step that is trained on the rollout of the step after `start`."""
        while self._in_use(start, skips) is not None:
            start -= 1
        return start + 1

    def _dead_before(self, start: int) -> int:
        """Return the number of rollouts in a row before a step whose groups are all dead.

        They are counted by the samples in the run directory, so that a run which resumes ends where
        one that was not stopped does.
        """
        path, processes = self._context.directory.path / ROLLOUTS, self._context.processes
        count, is_counted = 0, self._objective.terms.has_group_baseline
        if start and is_counted and processes.peers.is_first and path.is_file():
            lines = path.read_bytes().splitlines()
            newest = itertools.groupby(map(json.loads, reversed(lines)), lambda each: each["step"])
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # damaged
                for _, records in newest:
                    if count == self._run.guard.budget or not self._is_dead([*records][::-1]):
                        break
                    count += 1
        return int(processes.share("dead_rollouts", count))

    def _is_dead(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether all groups of the samples of a rollout are dead, see `Groups`."""
        rewards = np.array([each["reward"] for each in records], np.float64)  # null becomes NaN
        reasons, truncated = [each["reason"] for each in records], self._objective.truncated
        return bool(is_dead(by_group(rewards, reasons, self._run.rl.samples, truncated)).all())

    def _draw_ahead(self, rollout: int, step: int) -> None:
        """Begin to draw a rollout that is trained on from a step, and those `rl.lag` ahead."""
        rl, params = self._run.rl, self._params
        for earlier in [each for each in self._drawings if each < rollout]:
            del self._drawings[earlier]
        missing = [n for n in range(rollout, rollout + rl.lag + 1) if n not in self._drawings]
        if self._thread is not None:
            params = jax.tree.map(jnp.copy, params)  # the next step donates its own
        for number in missing:
            arguments = number, step + (number - rollout) * rl.steps, params
            if self._thread is None:
                self._drawings[number] = _done(self._drawn(*arguments))
            else:
                self._drawings[number] = self._thread.submit(self._drawn_apart, *arguments)

    def _drawn_apart(self, *arguments: Any) -> Drawing:
        with jax.set_mesh(self._programs.model.mesh):  # of this thread
            return self._drawn(*arguments)

    def _wait(self) -> None:
        """Wait until nothing is drawn; a failure is raised where the rollout is used."""
        for each in self._drawings.values():
            each.exception()

    def _begin(self, drawing: Drawing, step: int) -> None:
        """Keep the figures and samples of a rollout that is trained on from a step."""
        self._figures[step] = drawing.figures
        self._unnoted = step, drawing
        self._count_dead(drawing, step)

    def _note_samples(self) -> None:
        """Note the samples of a rollout, once."""
        if self._unnoted is not None:
            step, drawing = self._unnoted
            self._unnoted = None
            self._note(step, drawing.records())

    def keep(self, step: int, skips: Skips = ()) -> None:
        """Write the rollouts to the run directory that a run which resumes at a step cannot draw.

        They were drawn from the parameters of earlier steps. Files of rollouts before the oldest
        checkpoint are removed.
        """
        steps, directory = self._run.rl.steps, self._context.directory
        current = loaders.batch_number(step, skips) // steps
        remaining = [number for number in sorted(self._drawings) if number >= current]
        if not remaining or not directory.is_writer:
            return
        folder = directory.path / FOLDER
        folder.mkdir(exist_ok=True)
        oldest = min(self._context.store.steps(), default=0) // steps
        for file in folder.glob("*.safetensors"):
            if int(file.stem) < oldest:
                file.unlink()
        for number in remaining:
            rows, records, *others = self._drawings[number].result()
            notes = [records(), *others]
            content = safetensors.numpy.save(_columns(rows), {NOTES: json.dumps(notes)})
            directory.write_bytes(f"{FOLDER}/{number}.safetensors", content)

    def _stored(self, number: int, step: int) -> Drawing:
        """Return a rollout that was drawn before a save at a step.

        Raise DataError if its file is gone, or does not have the shape of the rollouts of this run.
        """
        name = f"{FOLDER}/{number}.safetensors"
        path, rl, processes = (
            self._context.directory.path / name,
            self._run.rl,
            self._context.processes,
        )
        rows = _empty(self._run.train.batch * rl.updates, self._run.data.sequence)
        blank = _columns(with_values(rows) if self._objective.has_value_head else rows)
        stored = _read(path, blank) if processes.peers.is_first else None
        notes = processes.share("rollout", stored and [[], *stored[1][1:]])
        if notes is None:
            begins = step // rl.steps * rl.steps
            raise DataError(
                "the samples that the run was trained on when it was saved are gone",
                where=str(path),
                why=f"rl.updates * rl.epochs = {rl.steps} steps use a rollout, and rl.lag = "
                f"{rl.lag} are drawn before; this one is of step {number * rl.steps + 1}",
                fix=f"--start_at={0 if rl.lag else begins} --force    # if it is saved\n"
                "restore the file",
            )
        arrays: dict[str, Any] = stored[0] if stored else blank
        if processes.peers.count > 1:
            arrays = multihost_utils.broadcast_one_to_all(arrays)
        rollout = Rollout(**{name: arrays.pop(name) for name in Rollout._fields if name in blank})
        _, figures, is_dead = notes
        rows = Tokens(**arrays)._replace(rollout=rollout)
        return Drawing(rows, lambda: stored[1][0] if stored else [], figures, is_dead)

    def take(self, step: int) -> dict[str, float]:
        """Return the figures of the newest rollout, once; empty if none began since the last call.

        A rollout is for several steps, which need not be those that are logged.
        """
        begun = [self._figures.pop(each) for each in sorted(self._figures) if each <= step]
        return begun[-1] if begun else {}

    def _is_logged(self, first: int) -> bool:
        """Return whether a record has the figures of the rollout that is trained on from a step."""
        records = sinks.read(self._context.directory.path / "metrics.jsonl")
        return any(
            each["step"] >= first and each.get("split") == "train" and "reward" in each
            for each in records
        )

    def evaluate(self, params: Any, loader: Loader, most: int | None) -> dict[str, Any]:
        """Return the figures of a validation set, see `PromptScorer.evaluate`."""
        self._wait()  # the sampler draws one thing at a time
        whole = self._decoded(self._programs.whole(params))
        samples = self._run.rl.held_out_samples
        return self._scorer.evaluate(whole, loader, most, samples=samples, seed=self._run.seed)

    def _drawn(self, number: int, step: int, params: Any) -> Drawing:
        """Return a rollout that is trained on from a step."""
        run, objective, terms = self._run, self._objective, self._objective.terms
        faults.point("rollout.draw", step)
        # The step that makes them may still be computed, which is no time of drawing.
        whole = jax.block_until_ready(self._decoded(self._programs.whole(params)))
        if self._turns is not None:
            self._turns.figures(1)  # those of an evaluation
        scored = self._scored(number, step, whole, range(run.rl.prompts(run.train.batch)))
        figures = scored.figures()
        if self._turns is not None:
            figures |= self._turns.figures(len(scored.samples))
        groups = Groups(scored, objective, run.rl.samples)
        if objective.dead_groups == "redraw":
            redraw = functools.partial(self._scored, number, step, whole)
            groups, redrawn = groups.redrawn(redraw, run.rl.redraws)
            figures["redrawn_groups"] = float(redrawn)
        scored, used = groups.scored, groups.advantages()
        figures |= self._source_figures(scored) | groups.figures()
        figures |= {"draw_seconds": scored.draw_seconds, "score_seconds": scored.score_seconds}
        drawn, trained = scored.drawn, used
        if isinstance(objective, Distill):
            used, drawn = self._taught(objective.sampled, number, scored)
            trained = [1.0] * len(used)
            figures["sampled_share"] = float(np.mean([each is not None for each in used]))
        samples = [Weighted(*each) for each in zip(scored.prompts, drawn, trained, strict=True)]
        weighted, size = [], run.train.batch
        for first in range(0, len(samples), size):
            weighted += empty_last(samples[first : first + size], run.train.microbatches)
        rows = as_rows(weighted, run.data.sequence, mean=terms.mean, max_tokens=run.rl.max_tokens)
        if self._rescorer is not None:
            begun = time.perf_counter()
            rows, more = self._rescorer.rescored(rows, params)
            figures |= more | {"rescore_seconds": time.perf_counter() - begun}
        records = functools.partial(_records, scored, used)
        return Drawing(rows, records, figures, figures["dead_groups"] == 1)

    def _taught(
        self, share: float, number: int, scored: ScoredSamples
    ) -> tuple[list[float | None], list[DrawnSample]]:
        """Return 1.0 for each sample of a rollout that is trained on, and all its answers.

        The answer of the data replaces a sample, but for a `share` of them.
        """
        tokenizer, most = self._programs.data.tokenizer, self._run.rl.max_tokens
        draws = np.random.default_rng([self._run.seed, number]).random(len(scored.drawn))
        answers = [each.answer for each in scored.samples]
        answered: list[DrawnSample] = []
        used: list[float | None] = []
        for draw, sample, answer in zip(draws, scored.drawn, answers, strict=True):
            is_own = draw < share or answer is None
            if not is_own:
                ids = np.array([*tokenizer.encode(answer or ""), tokenizer.eos][:most], np.int32)
                sample = DrawnSample(ids, np.zeros(len(ids), np.float32), "eos_token")
            answered.append(sample)
            used.append(1.0 if is_own else None)
        return used, answered

    def _scored(
        self, number: int, step: int, params: Any, groups: Sequence[int], attempt: int = 0
    ) -> ScoredSamples:
        """Return samples of some groups of a rollout; each attempt has prompts of its own.

        Raise DataError if too many have no score.
        """
        run = self._run
        prompts = run.rl.prompts(run.train.batch)
        known = self._loader.documents(number * prompts, (number + 1) * prompts, attempt)
        chosen = [known[group] for group in groups]
        root = root_key(run.seed, f"redraw {attempt}" if attempt else "rollout")
        keys = row_keys(root, number, prompts, run.rl.samples)
        if attempt:
            keys = keys.reshape(prompts, -1)[np.array(groups)].reshape(-1)
        where = f"rollout of step {step}"
        return self._scorer.score(params, self._loader, chosen, run.rl.samples, keys, where=where)

    def _source_figures(self, scored: ScoredSamples) -> dict[str, float]:
        """Return the mean reward of the prompts of each source of a mixture."""
        if not isinstance(self._loader, MixtureLoader):
            return {}
        of_sample = np.array([self._loader.source_of(document) for document in scored.documents])
        names = [name for name in self._loader.names if (of_sample == name).any()]
        return {f"sources/{name}/reward": mean(scored.rewards[of_sample == name]) for name in names}

    def _count_dead(self, drawing: Drawing, step: int) -> None:
        """Raise Diverged if too many rollouts in a row have no group with different rewards."""
        run = self._run
        self._dead = self._dead + 1 if drawing.is_dead else 0
        if self._dead < run.guard.budget or not self._objective.terms.has_group_baseline:
            return
        self._note_samples()
        raise Diverged(
            f"all samples of each prompt had equal rewards in {self._dead} rollouts in a row",
            where=f"rollout of step {step}",
            why=f"the mean reward is {drawing.figures['reward']:.4g}, and equal rewards of a group "
            "have no gradient: the prompts are too hard for this model, or too easy",
            fix=f"--config.rl.samples={2 * run.rl.samples} "
            f"--config.train.batch={2 * run.train.batch}    # a new run with larger groups\n"
            "choose prompts that the model solves now and then\n"
            "begin with a model that solves some of them",
        )


def _done(drawing: Drawing) -> Future[Drawing]:
    """Return a rollout that is drawn in the form of one that is being drawn."""
    future: Future[Drawing] = Future()
    future.set_result(drawing)
    return future


def _empty(rows: int, length: int) -> Tokens:
    """Return rows without samples."""
    return as_rows([Weighted(np.zeros(1, np.int32), NOTHING, None)] * rows, length)


def _columns(rows: Tokens) -> dict[str, np.ndarray]:
    """Return the arrays of rows by name."""
    assert rows.rollout is not None
    named = rows._asdict() | rows.rollout._asdict()
    return {name: each for name, each in named.items() if isinstance(each, np.ndarray)}


def _read(path: Path, like: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list] | None:
    """Return the arrays and notes in a file; None if it is missing, damaged or of other shapes."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            notes = json.loads((file.metadata() or {})[NOTES])
            stored = {name: file.get_tensor(name) for name in like}
    except (OSError, safetensors.SafetensorError, KeyError, ValueError):
        return None
    shapes = [{n: (x.shape, x.dtype) for n, x in each.items()} for each in (stored, like)]
    return (stored, notes) if shapes[0] == shapes[1] else None


def _records(scored: ScoredSamples, used: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return the record of each sample, with its advantage; the digest is of its ids."""
    columns = scored.documents, scored.samples, scored.texts, scored.drawn, scored.verdicts, used
    return [
        {
            "document": document,
            "prompt": sample.prompt,
            "text": text,
            "answer": sample.answer,
            "reward": verdict.total,
            "rewards": verdict.by_name,
            "problem": verdict.problem,
            "advantage": advantage,
            "tokens": sample.tokens,
            "reason": sample.reason,
            "digest": hashlib.sha256(drawn.ids.astype("<i4").tobytes()).hexdigest()[:16],
        }
        for document, sample, text, drawn, verdict, advantage in zip(*columns, strict=True)
    ]


def _check_prompts(loader: Loader) -> None:
    """Raise ConfigError if token shards have no prompts."""
    if not loader.shards.prompts:
        raise ConfigError(
            "token shards have no prompts",
            where=loader.shards.source,
            why="they were written with another data.kind",
            fix="write the shards again with --config.data.kind=prompts",
        )
