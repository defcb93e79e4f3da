"""Scores of completions: the weighted sum of the rewards of a run."""

import contextlib
import hashlib
import math
import os
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxlm.core import user_code
from jaxlm.core.errors import DataError
from jaxlm.core.quoting import safe
from jaxlm.rl import programs, verifiers
from jaxlm.rl.reward_config import NEED_ANSWER, PROGRAMS, RewardConfig, Term
from jaxlm.rl.verifiers import Sample, Unscorable
from jaxlm.rl.workers import Worker

__all__ = ["Rewards", "Sample", "Verdict", "check_scored", "unscored"]

MOST_WORKERS = 8
SHOWN = 60  # characters of a prompt in an error


class Verdict(NamedTuple):
    """The score of a sample.

    Args:
      total: weighted sum; None if a reward could not score the sample.
      by_name: value of each reward by its label, None where there is none.
      problem: the reason, with the label of the reward; empty if there is a total.
    """

    total: float | None
    by_name: dict[str, float | None]
    problem: str


class Rewards:
    """The rewards of a run, in a `with` block that starts and ends their processes.

    `digest` identifies the functions, their files, weights and arguments. `tolerance` is the share
    of samples that may have no score.

    Args:
      settings: the rewards and their limits.
    """

    def __init__(self, settings: RewardConfig) -> None:
        self._settings, self._terms = settings, settings.terms
        self.tolerance = settings.tolerance
        identity = repr((self._terms, settings.sources))
        self.digest = hashlib.sha256(identity.encode()).hexdigest()
        self._stack = contextlib.ExitStack()
        self._pool: ThreadPoolExecutor | None = None
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def __enter__(self) -> "Rewards":
        """Start the processes. Raises ConfigError if a function cannot be used."""
        settings = self._settings
        if any(each.name in PROGRAMS for each in self._terms):
            programs.check_sandbox(settings)
        if not any(map(_needs_process, self._terms)):
            return self
        auto = min(os.cpu_count() or 1, MOST_WORKERS)
        count = auto if settings.workers == "auto" else settings.workers
        with contextlib.ExitStack() as stack:
            workers = [
                Worker(self._files(), settings.seconds, settings.bytes) for _ in range(count)
            ]
            for each in workers:
                stack.callback(each.stop)
                self._workers.put(each)
            # Threads of the pool start all workers but the first, and live as long as they do.
            self._pool = stack.enter_context(ThreadPoolExecutor(count))
            if any(each.is_file for each in self._terms):
                self._pool.submit(workers[0].start).result()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self._stack.close()

    def _files(self) -> dict[str, tuple[user_code.Source, list[str]]]:
        """Return each file of functions, as the config records it, with the functions called."""
        files = {}
        for name, digest in self._settings.recorded_files:
            where = f"reward.sources = {name}={digest}"
            functions = [each.argument for each in self._terms if each.name == name]
            files[name] = (user_code.recorded_file(name, digest, where), functions)
        return files

    def begin(self, sample: Sample) -> Callable[[], Verdict]:
        """Begin to score a sample, in a thread if a process does it; return what waits for it.

        Several threads may call it.
        """
        if self._pool is None:
            return lambda: self._verdict(self._values(sample))
        values = self._pool.submit(self._values, sample)
        return lambda: self._verdict(values.result())

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Return the verdict on each sample, in their order."""
        begun = [self.begin(each) for each in samples]
        return [verdict() for verdict in begun]

    def _values(self, sample: Sample) -> list[float | str]:
        """Return the value of each term, or the reason why there is none."""
        return [self._value(each, sample) for each in self._terms]

    def _value(self, each: Term, sample: Sample) -> float | str:
        try:
            if each.name in verifiers.VERIFIERS:
                return verifiers.VERIFIERS[each.name](sample, each.argument)
            if each.name in NEED_ANSWER and sample.answer is None and each.name not in PROGRAMS:
                raise Unscorable("the prompt has no answer")
            if each.name in PROGRAMS:
                return programs.passed(each.name, sample, self._settings)
            request: dict[str, Any] = {"sample": sample._asdict()}
            function = f"{each.name}:{each.argument}"
            request |= {"function": function} if each.is_file else {"pattern": each.argument}
            worker = self._workers.get()
            try:
                return worker.call(request)
            finally:
                self._workers.put(worker)
        except Unscorable as error:
            return str(error)

    def _verdict(self, values: Sequence[float | str]) -> Verdict:
        """Return the sum of the values of the terms; a text is the reason why there is none."""
        by_name: dict[str, float | None] = {}
        total, problem = 0.0, ""
        for each, value in zip(self._terms, values, strict=True):
            if isinstance(value, str):
                by_name[each.label] = None
                problem = problem or f"{each.label}: {value}"
            else:
                by_name[each.label] = value
                total += each.weight * value
        if not problem and not math.isfinite(total):
            problem = f"the sum of the rewards is {total}"
        return Verdict(None if problem else total, by_name, problem)


def _needs_process(each: Term) -> bool:
    return each.name not in verifiers.VERIFIERS


def unscored(samples: Sequence[Sample], verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return reason and prompt of each sample without a score."""
    both = zip(samples, verdicts, strict=True)
    return [(each.problem, sample.prompt) for sample, each in both if each.total is None]


def check_scored(
    problems: Sequence[tuple[str, str]],
    count: int,
    tolerance: float,
    *,
    where: str,
    limit: str = "reward.tolerance",
    fix: str = "jaxlm reward try --help    # scores prompts of a file before a run",
) -> None:
    """Raise DataError, with prompts and reasons, if too many samples have no score.

    Args:
      problems: reason and prompt of each sample without a score.
      count: number of samples.
      tolerance: share that may have none.
      where: place of the samples.
      limit: name of the tolerance.
      fix: of the error.
    """
    if len(problems) <= tolerance * count:
        return
    raise DataError(
        f"{len(problems)} of {count} samples have no score",
        where=where,
        why=f"{limit} allows a share of {tolerance:g}; reasons and prompts:",
        every=[
            f"{problem}: {safe(prompt[:SHOWN])!r}"
            for (problem, prompt), _ in Counter(problems).most_common()
        ],
        fix=fix,
    )
