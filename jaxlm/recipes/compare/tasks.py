"""Results of runs on the same tasks, paired by item: differences with their doubt. Free of JAX.

Example:
  >>> Requirement.parse("not_worse:1%")
  Requirement(margin=0.01)
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import CommandError
from jaxlm.evals import statistics
from jaxlm.evals.metrics import LOSSES
from jaxlm.evals.statistics import Difference, Estimate
from jaxlm.monitor import report, sinks
from jaxlm.monitor.sinks import Shape

EVALS, TASK, RESULTS, SAMPLES = "evals", "task.json", "results.json", "samples.jsonl"
# Shares of answers with a property that a task counts: a higher one is not always better.
COUNTS = ("refused", "listed_words", "classified")
SIGNIFICANT = 0.05
SAME = ("task", "items", "examples", "settings")  # facts of task.json that paired results share
FACTS: Shape = {
    "task": lambda value: isinstance(value, dict) and sinks.is_text(value.get("name")),
    "step": sinks.is_step,
    "settings": lambda value: isinstance(value, dict),
}
SAMPLE: Shape = {
    "id": sinks.is_text,
    "group": sinks.is_text,
    "weight": sinks.is_number,
    "metrics": lambda value: isinstance(value, dict) and all(map(sinks.is_number, value.values())),
}


class Requirement(NamedTuple):
    """Largest accepted loss of quality: of shares an absolute one, of losses a relative one."""

    margin: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Return the requirement of `not_worse:1%`. Raises CommandError."""
        match = re.fullmatch(r"not_worse:([0-9]*\.?[0-9]+)%", text)
        if match is None:
            raise CommandError(
                f"there is no requirement {text!r}",
                where=f"--require={text}",
                why="a requirement is not_worse and a margin in percent",
                fix="--require=not_worse:1%",
            )
        return cls(float(match[1]) / 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Samples of a run on a task.

    Args:
      name: the task.
      step: step of the parameters.
      facts: task.json.
      samples: lines of samples.jsonl by item.
    """

    name: str
    step: int
    facts: dict[str, Any]
    samples: dict[str, dict[str, Any]]

    @property
    def file(self) -> str:
        """Return the task file."""
        return str(self.facts.get("path", f"{self.name}.toml"))

    @property
    def key(self) -> str:
        """Return a digest of task, items, examples and settings, without that of the weights."""
        shared = {name: self.facts.get(name) for name in SAME}
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskComparison:
    """A metric of a task in two runs, on the items of both.

    Args:
      task, metric: their names.
      run_a, run_b: the runs with their steps.
      a, b: means with intervals.
      difference: B minus A by pairs of items.
      p_adjusted: p-value, adjusted by Holm's method for the number of tasks with the metric.
      rises, falls: items whose value is higher, and lower, in B.
      alone: items that are in one run alone.
    """

    task: str
    metric: str
    run_a: str
    run_b: str
    a: Estimate
    b: Estimate
    difference: Difference
    p_adjusted: float | None
    rises: list[str]
    falls: list[str]
    alone: int

    @property
    def is_loss(self) -> bool:
        """Return whether a lower value is better."""
        return self.metric in LOSSES

    @property
    def verdict(self) -> str:
        """Return the comparison in words."""
        difference = self.difference
        if self.p_adjusted is None:
            return "has no interval: all items are of one group"
        if self.p_adjusted < SIGNIFICANT:
            is_better = (difference.mean > 0) != self.is_loss
            words = ("higher", "lower") if self.metric in COUNTS else ("better", "worse")
            return f"B is {words[not is_better]} by {self.amount(difference.mean)}"
        items = f"{difference.items} items"
        if difference.groups < difference.items:
            items += f" in {difference.groups} groups"
        facts = [] if self.rises or self.falls else ["have equal values"]
        if difference.smallest:
            facts.append(f"see a difference of {self.amount(difference.smallest)}")
        return f"cannot be distinguished: {items} {' and '.join(facts) or 'are too few'}"

    def amount(self, value: float) -> str:
        """Return the size of a difference with its unit."""
        size, digits, unit = 100 * abs(value), 1, "points"
        if self.is_loss:
            size, digits, unit = abs(value), 4, self.metric.replace("_", " ")
        half = 0.5 / 10**digits
        if size < half:
            return f"less than {half:.{digits + 1}f} {unit}"
        return f"{size:.{digits}f} {unit}"

    def violation(self, requirement: Requirement) -> str | None:
        """Return why the requirement is not met, None if it is.

        It is met if the 95% interval of the difference excludes a loss beyond the margin.
        """
        margin = requirement.margin * (self.a.mean if self.is_loss else 1.0)
        worst = self.difference.high if self.is_loss else self.difference.low
        loss = math.inf if worst is None else worst if self.is_loss else -worst
        if loss <= margin:
            return None
        shown = "without an interval" if worst is None else f"up to {self.amount(loss)}"
        return f"{self.task}, {self.metric}: B may be worse, {shown}; {self.verdict}"

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        estimates = {"a": self.a._asdict(), "b": self.b._asdict()}
        values = dataclasses.asdict(self) | estimates
        return values | {"verdict": self.verdict}


def read(run: Path) -> tuple[list[TaskResult], list[str]]:
    """Return the newest finished result of each version of each task, and notes on others.

    Raises DataError if a file is damaged.
    """
    results: dict[str, TaskResult] = {}
    notes = []
    for folder in sorted(path.parent for path in (run / EVALS).glob(f"*/{TASK}")):
        facts = report.read_object(folder / TASK, FACTS)
        name = facts["task"]["name"]
        if not (folder / RESULTS).is_file():
            notes.append(f"{folder} is not finished: the same jaxlm eval --tasks continues it")
            continue
        result = TaskResult(name=name, step=facts["step"], facts=facts, samples={})
        earlier = results.get(result.key)
        if earlier is None or earlier.step <= result.step:
            results[result.key] = dataclasses.replace(result, samples=_samples(folder))
    return list(results.values()), notes


def read_one(folder: Path) -> TaskResult:
    """Return the result in a folder of a task. Raises DataError if a file is damaged."""
    facts = report.read_object(folder / TASK, FACTS)
    name, step = facts["task"]["name"], facts["step"]
    return TaskResult(name=name, step=step, facts=facts, samples=_samples(folder))


def _samples(folder: Path) -> dict[str, dict[str, Any]]:
    return {line["id"]: line for line in sinks.read(folder / SAMPLES, SAMPLE)}


def compare(paths: Mapping[str, Path]) -> tuple[list[TaskComparison], list[str]]:
    """Compare each run with the first on the tasks that both have; return notes as well.

    Args:
      paths: run directories by name.
    """
    known, notes = {}, []
    for name, path in paths.items():
        known[name], more = read(path)
        notes += more
    first, *others = known
    compared: list[TaskComparison] = []
    for other in others:
        by_key = {each.key: each for each in known[other]}
        for result in known[first]:
            if (same := by_key.get(result.key)) is not None:
                compared += pair(first, result, other, same)
            else:
                notes += _unpaired(first, result, other, known[other], paths[other])
    return adjusted(compared), notes


def violations(
    compared: Sequence[TaskComparison], requirement: Requirement, runs: Sequence[Path]
) -> list[str]:
    """Return why the requirement is not met, for the first metric of each task that fails it.

    Args:
      compared: comparisons of the tasks that the runs share.
      requirement: what must hold of them.
      runs: the directories, for the fix.

    Raises CommandError if no task was compared.
    """
    if not compared:
        raise CommandError(
            "--require needs results of the same tasks in both runs",
            where="jaxlm compare",
            why="the runs have no results of a task that are of the same version",
            fix="\n".join(_missing(runs))
            or "find . -name '*.toml'    # task files, for jaxlm eval --tasks",
        )
    first = {(each.run_b, each.task): each for each in reversed(compared)}
    reasons = (each.violation(requirement) for each in reversed(first.values()))
    return [why for why in reasons if why is not None]


def pair(
    first: str, result_a: TaskResult, other: str, result_b: TaskResult
) -> list[TaskComparison]:
    """Return the comparison of each metric of two results of a task, by items of both."""
    shared = [item for item in result_a.samples if item in result_b.samples]
    lines = [(result_a.samples[item], result_b.samples[item]) for item in shared]
    if not lines:
        return []
    metrics = [name for name in lines[0][0]["metrics"] if name in lines[0][1]["metrics"]]
    groups = [a["group"] for a, _ in lines]
    weights = [float(a["weight"]) for a, _ in lines]
    compared = []
    for metric in metrics:
        a = [float(line["metrics"][metric]) for line, _ in lines]
        b = [float(line["metrics"][metric]) for _, line in lines]
        changes = list(zip(shared, a, b, strict=True))
        is_share = metric not in LOSSES
        compared.append(
            TaskComparison(
                task=result_a.name,
                metric=metric,
                run_a=f"{first}@{result_a.step}",
                run_b=f"{other}@{result_b.step}",
                a=statistics.estimate(a, weights, groups, is_share=is_share),
                b=statistics.estimate(b, weights, groups, is_share=is_share),
                difference=statistics.difference(a, b, weights, groups),
                p_adjusted=None,
                rises=[item for item, x, y in changes if y > x],
                falls=[item for item, x, y in changes if y < x],
                alone=len(result_a.samples) + len(result_b.samples) - 2 * len(shared),
            )
        )
    return compared


def adjusted(compared: Sequence[TaskComparison]) -> list[TaskComparison]:
    """Return the comparisons with p-values adjusted for the number of tasks of each metric."""
    p_values: dict[int, float] = {}
    for metric in {each.metric for each in compared}:
        of_metric = [
            (number, each.difference.p_value)
            for number, each in enumerate(compared)
            if each.metric == metric and each.difference.p_value is not None
        ]
        values = statistics.holm([p_value for _, p_value in of_metric])
        p_values |= {number: p for (number, _), p in zip(of_metric, values, strict=True)}
    return [
        dataclasses.replace(each, p_adjusted=p_values.get(number))
        for number, each in enumerate(compared)
    ]


def _missing(runs: Sequence[Path]) -> list[str]:
    """Return the commands that score the runs on a task; none without its file."""
    known = {path: read(path)[0] for path in runs}
    for result in itertools.chain.from_iterable(known.values()):
        lacking = [path for path in runs if result.key not in (each.key for each in known[path])]
        if lacking and Path(result.file).is_file():
            return [_command(result, path) for path in lacking]
    for file in sorted(itertools.chain(Path().glob("*.toml"), Path().glob("*/*.toml"))):
        if re.search(r"^items *=", file.read_text(errors="replace"), re.MULTILINE):
            flags = [[f"--workdir={path}", f"--tasks={file}"] for path in runs]
            return [shlex.join(["jaxlm", "eval", *each]) for each in flags]
    return []


def _command(result: TaskResult, path: Path) -> str:
    """Return the command that scores another run as `result` was made."""
    flags = [f"--workdir={path}", f"--tasks={result.file}"]
    settings = result.facts["settings"]
    for name in ("shots", "form", "limit", "too_long", "seed"):
        if (value := settings.get(name)) not in (None, 0, "refuse"):
            flags.append(f"--{name}={value}")
    switches = {"is_chat": "--chat", "allow_code": "--allow_code"}
    flags += [flag for name, flag in switches.items() if settings.get(name)]
    return shlex.join(["jaxlm", "eval", *flags])


def _unpaired(
    first: str, result: TaskResult, other: str, candidates: Sequence[TaskResult], path: Path
) -> list[str]:
    """Return the note on a task that the other run has in another version, or not at all."""
    command = _command(result, path)
    same_name = [each for each in candidates if each.name == result.name]
    if not same_name:
        return [f"{other} has no result of the task {result.name}: {command}"]
    changed = [name for name in SAME if result.facts.get(name) != same_name[-1].facts.get(name)]
    return [
        f"{result.name} is not paired, since {', '.join(changed)} of {first} and {other} differ: "
        f"{command}    # with the task file of {first}"
    ]
