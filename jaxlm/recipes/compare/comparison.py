"""Runs side by side: settings that differ, results with their uncertainty, curves. Free of JAX."""

import collections
import dataclasses
import itertools
import json
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from jaxlm.core import disk
from jaxlm.core.errors import CommandError, InputMissing
from jaxlm.monitor import report, sinks
from jaxlm.objectives.config import Causal, Objective
from jaxlm.recipes.compare import summary
from jaxlm.recipes.compare.summary import RunSummary
from jaxlm.training.rundir import STARTS_FILE, imported_facts

if TYPE_CHECKING:
    from jaxlm.recipes.compare.tasks import TaskComparison

SEED = "seed"
UNITS = ("nats", "bits per byte")
AXES = ("steps", "tokens", "seconds")
AS_CAUSAL = {each.name for each in get_args(Objective) if each.evaluated_as_causal}
TOKENIZER = "data.tokenizer"
SHARED_DATA = (TOKENIZER, "data.train", "data.validation")  # of losses that compare
TEXT = ("tokenizer", "template", "train", "validation")  # parts of a fingerprint that have digests
STARTS: sinks.Shape = {"data": lambda value: isinstance(value, dict)}
COLUMNS = 5  # amounts of an axis in a table of losses


class TableValue(NamedTuple):
    """A loss or reward at an amount of an axis, and whether an evaluation had it there."""

    value: float
    is_measured: bool


class CurvePoint(NamedTuple):
    """A loss in nats or a reward, and what was spent: steps, tokens and seconds in the steps."""

    steps: int
    tokens: float
    seconds: float
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Runs that differ in their seed alone, or one run.

    Args:
      name: values of the settings that differ, except the seed.
      runs: names of the runs.
      nats, bits_per_byte, reward: means of the last evaluations of the set that ranks checkpoints;
        nats and bits are None if rewards are compared, and the reward is None if they are not.
      doubt: standard error of `nats` or `reward`: over seeds, or of the sampled rows of one run;
        None if neither is known.
      doubt_of: source of the doubt: "seeds", "rows", or "".
      over_best: `nats` over the lowest result, or `reward` over the highest.
    """

    name: str
    runs: list[str]
    nats: float | None
    bits_per_byte: float | None
    reward: float | None
    doubt: float | None
    doubt_of: str
    over_best: float | None = None

    @property
    def value(self) -> float | None:
        """Return what is compared."""
        return self.nats if self.reward is None else self.reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs by name, settings that differ, results, curves, and reasons against comparing them.

    Args:
      runs: the runs by name.
      differences: values of each run, by the path of a setting that differs.
      results: the lowest loss or the highest reward first.
      curves: losses or rewards of the set that ranks checkpoints, or of training without one, by
        run.
      training: those of training, by run.
      tables: by axis, amounts of it, and each run's loss or reward at them, None after its end.
      notes: what the reader must know.
      is_rewarded: rewards are compared, as all runs have them.
      tasks: tasks that the first run and another one have results of.
    """

    runs: dict[str, RunSummary]
    differences: dict[str, list[Any]]
    results: list[ComparedRun]
    curves: dict[str, list[CurvePoint]]
    training: dict[str, list[CurvePoint]]
    tables: dict[str, tuple[list[float], dict[str, list[TableValue | None]]]]
    notes: list[str]
    is_rewarded: bool = False
    tasks: "list[TaskComparison]" = dataclasses.field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        name_of_value = "reward" if self.is_rewarded else "loss"
        points = {
            name: [dict(zip((*AXES, name_of_value), point, strict=True)) for point in points]
            for name, points in self.curves.items()
        }
        return {
            "runs": {name: run.record() for name, run in self.runs.items()},
            "differences": {
                path: dict(zip(self.runs, values, strict=True))
                for path, values in self.differences.items()
            },
            "results": [dataclasses.asdict(each) for each in self.results],
            "curves": points,
            "notes": self.notes,
            "tasks": [each.record() for each in self.tasks],
        }


def compare(paths: Sequence[Path]) -> Comparison:
    """Compare runs by the files in their directories.

    Raises:
      CommandError: if fewer than two runs are named.
      InputMissing: if a directory contains no run.
      DataError: if a file of a run is damaged.
    """
    if len({path.resolve() for path in paths}) < 2:
        raise CommandError(
            "a comparison needs two runs",
            where=f"jaxlm compare {' '.join(map(str, paths))}".rstrip(),
            why=_too_few(len(paths)),
            fix="jaxlm runs    # lists the runs",
        )
    for path in paths:
        if not (path / "config.json").is_file():
            raise InputMissing(
                "the directory contains no run",
                where=str(path),
                why="a run directory has config.json, which `jaxlm train` writes",
                fix="jaxlm runs    # lists the runs",
            )
    runs = dict(zip(_names(paths), map(summary.read, paths), strict=True))
    differences = _differences(runs)
    texts = {name: _text(run.path) for name, run in runs.items()}
    splits = {
        name: summary.ranking_split(run.config, run.records) or "train"
        for name, run in runs.items()
    }
    has_reward = {
        name: summary.has_rewards(run.records, splits[name])
        for name, run in runs.items()
        if run.records
    }
    is_rewarded = bool(has_reward) and all(has_reward.values())
    metric = "reward" if is_rewarded else "loss_nats"
    curves = {name: points(run, splits[name], metric) for name, run in runs.items()}
    training = {name: points(run, "train", metric) for name, run in runs.items()}
    compared: list[TaskComparison] = []
    notes: list[str] = []
    if any((path / "evals").is_dir() for path in paths):
        from jaxlm.recipes.compare import tasks  # scipy takes half a second

        compared, notes = tasks.compare({name: run.path for name, run in runs.items()})
    return Comparison(
        runs=runs,
        differences=differences,
        results=_results(runs, splits, differences, texts, metric),
        curves=curves,
        training=training,
        tables={axis: _table(curves, axis) for axis in AXES},
        notes=[
            *_changed_texts(differences, texts),
            *_notes(runs, splits, differences, has_reward),
            *notes,
        ],
        is_rewarded=is_rewarded,
        tasks=compared,
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))


def _differences(runs: Mapping[str, RunSummary]) -> dict[str, list[Any]]:
    flat = [dict(report.leaves(run.config)) for run in runs.values()]
    known = dict.fromkeys(itertools.chain.from_iterable(flat))
    values = {path: [each.get(path) for each in flat] for path in known}
    return {path: each for path, each in values.items() if any(x != each[0] for x in each)}


def _text(path: Path) -> dict[str, Any]:
    """Return the digests of the text of a run's newest start; an empty one if they are unknown."""
    starts = sinks.read(path / STARTS_FILE, STARTS)
    data = starts[-1]["data"] if starts else {}
    return {name: each for name, each in data.items() if name.partition(".")[0] in TEXT}


def _changed_texts(
    differences: Mapping[str, Sequence[Any]], texts: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return notes on runs whose settings of data are equal, and which read different text."""
    alike: dict[str, dict[str, Mapping[str, Any]]] = {}
    for number, (name, text) in enumerate(texts.items()):
        values = [each[number] for path, each in differences.items() if path.startswith("data.")]
        if text:
            alike.setdefault(json.dumps(values), {})[name] = text
    notes = []
    for group in alike.values():
        first, *others = group.values()
        sets = dict.fromkeys(itertools.chain.from_iterable(group.values()))
        changed = [each for each in sets if any(x.get(each) != first.get(each) for x in others)]
        changed = [each for each in changed if not each.endswith((".documents", ".tokens"))]
        if changed:
            names, changes = ", ".join(group), ", ".join(changed)
            notes.append(
                f"the files of {names} changed between the runs ({changes}): "
                "their losses are of different text"
            )
    return notes


def points(run: RunSummary, split: str, metric: str) -> list[CurvePoint]:
    """Return a metric of a split, by steps, tokens, and seconds in steps.

    Seconds are those of the steps alone: without compilation, evaluation and the time between two
    starts. Of an evaluation, tokens and seconds are interpolated between logged steps.
    """
    steps, tokens, seconds = [0], [0.0], [0.0]
    logged = {each["step"]: each for each in run.records if each.get("split") == "train"}
    for step, record in sorted(logged.items()):
        duration = record.get("step_seconds")
        duration = duration if sinks.is_number(duration) else 0.0
        seconds.append(seconds[-1] + (step - steps[-1]) * duration)
        steps.append(step)
        tokens.append(record.get("tokens") or tokens[-1])
    values = summary.values(_scored(run, split, metric), split, metric)
    return [
        CurvePoint(
            step,
            float(np.interp(step, steps, tokens)),
            float(np.interp(step, steps, seconds)),
            value,
        )
        for step, value in values
    ]


def _results(
    runs: Mapping[str, RunSummary],
    splits: Mapping[str, str],
    differences: Mapping[str, Sequence[Any]],
    texts: Mapping[str, Mapping[str, Any]],
    metric: str,
) -> list[ComparedRun]:
    """Return a result for each set of runs that differ in their seed alone, the best first.

    Of runs with the same seed, as a copy and its original, each has a result, and so have runs
    whose last losses are of different steps, or which read different text.
    """
    groups: dict[tuple[str, Any, str, int], list[str]] = {}
    seeds = differences.get(SEED, [None] * len(runs))
    repeated = collections.Counter[tuple[str, Any, str, Any]]()
    for number, name in enumerate(runs):
        label = ", ".join(
            f"{path.rpartition('.')[2]} {brief(values[number])}"
            for path, values in differences.items()
            if path != SEED
        )
        step = _last(runs[name], splits[name], metric).get("step")
        text = json.dumps(texts[name], sort_keys=True)
        same = label, step, text, brief(seeds[number])
        groups.setdefault((label, step, text, repeated[same]), []).append(name)
        repeated[same] += 1
    results, is_rewarded = [], metric == "reward"
    for (label, *_), names in groups.items():
        last = [_last(runs[name], splits[name], metric) for name in names]
        values = _numbers(last, metric)
        doubt, doubt_of = _doubt(values, _numbers(last, "loss_stderr"))
        title = label if len(names) > 1 and label else ", ".join(names)
        title = f"{title}, {len(names)} seeds" if len(names) > 1 else title
        results.append(
            ComparedRun(
                name=title,
                runs=names,
                nats=None if is_rewarded else _mean(values),
                bits_per_byte=None if is_rewarded else _mean(_numbers(last, "bits_per_byte")),
                reward=_mean(values) if is_rewarded else None,
                doubt=doubt,
                doubt_of=doubt_of,
            )
        )
    known = [(each.value, each) for each in results if each.value is not None]
    known.sort(key=operator.itemgetter(0), reverse=is_rewarded)
    compared = [dataclasses.replace(each, over_best=value - known[0][0]) for value, each in known]
    return compared + [each for each in results if each.value is None]


def _last(run: RunSummary, split: str, metric: str) -> Mapping[str, Any]:
    scored = _scored(run, split, metric)
    return scored[-1] if scored else {}


def _scored(run: RunSummary, split: str, metric: str) -> list[sinks.Record]:
    """Return the records of a split that have a metric; none if its losses are negative rewards."""
    if metric != "reward" and summary.has_rewards(run.records, split):
        return []
    return [r for r in run.records if r.get("split") == split and r.get(metric) is not None]


def _numbers(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [each[name] for each in records if sinks.is_number(each.get(name))]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _doubt(values: Sequence[float], errors: Sequence[float]) -> tuple[float | None, str]:
    """Return the standard error of the mean over seeds, or that of the rows of one run."""
    if len(values) > 1:
        return statistics.stdev(values) / math.sqrt(len(values)), "seeds"
    return (errors[0], "rows") if errors else (None, "")


def _table(
    curves: Mapping[str, Sequence[CurvePoint]], axis: str
) -> tuple[list[float], dict[str, list[TableValue | None]]]:
    """Return amounts of an axis, and each run's value at them; None outside of its curve.

    The amounts are those of evaluations, about equally far apart. One is the end of the shortest
    run, where all runs still have a value.
    """
    places = {name: [getattr(p, axis) for p in points] for name, points in curves.items()}
    every = sorted({amount for known in places.values() for amount in known})
    if not every:
        return [], {name: [] for name in curves}
    spaced = np.linspace(every[0], every[-1], COLUMNS + 1)
    nearest = {min(every, key=lambda amount: abs(amount - each)) for each in spaced}
    amounts = sorted({*nearest, min(known[-1] for known in places.values() if known)})
    table = {}
    for name, points in curves.items():
        known, values = places[name], [p.value for p in points]
        table[name] = [
            TableValue(float(np.interp(amount, known, values)), amount in known)
            if known and known[0] <= amount <= known[-1] * (1 + 1e-9)
            else None
            for amount in amounts
        ]
    return amounts, table


def _too_few(count: int) -> str:
    """Return why fewer than two runs cannot be compared."""
    if count > 1:
        return f"all {count} directories that are named are the same run"
    return "one run directory is named" if count else "no run directory is named"


def _rounding(name: str, facts: Mapping[str, Any]) -> str:
    """Return the loss that a run of `jaxlm quantize` had before and after."""
    before, after = (facts[each]["loss_nats"] for each in ("before", "after"))
    how = f"{facts['scheme']} by {facts['method']}"
    return f"{name}: {how} changed the loss from {before:.4f} to {after:.4f} nats"


def _have_one_tokenizer(runs: Mapping[str, RunSummary]) -> bool:
    """Return whether the runs have copies of one tokenizer, which their settings name by path."""
    files = [run.path / "tokenizer" for run in runs.values()]
    return all(map(Path.is_file, files)) and len(set(map(disk.sha256, files))) == 1


def _notes(
    runs: Mapping[str, RunSummary],
    splits: Mapping[str, str],
    differences: Mapping[str, Sequence[Any]],
    has_reward: Mapping[str, bool],
) -> list[str]:
    """Return reasons why results of these runs do not compare, and which runs did not finish."""
    notes = []
    if any(has_reward.values()) and not all(has_reward.values()):
        rewarded = ", ".join(name for name, has in has_reward.items() if has)
        notes.append(
            f"the losses of {rewarded} are negative rewards, not nats of text: they are left out"
        )
    objectives = {
        name: run.config.get("objective", {}).get("name", Causal.name)
        for name, run in runs.items()
        if not has_reward.get(name)
    }
    if len({Causal.name if each in AS_CAUSAL else each for each in objectives.values()}) > 1:
        names = ", ".join(f"{name}: {each}" for name, each in objectives.items())
        notes.append(f"the runs differ in objective.name ({names}): their losses do not compare")
    changed = [path for path in SHARED_DATA if path in differences]
    if TOKENIZER in changed and _have_one_tokenizer(runs):
        changed.remove(TOKENIZER)
    if changed and not all(has_reward.values()):
        notes.append(
            f"the runs differ in {', '.join(changed)}: nats per token compare on the same tokens, "
            "bits per byte on the same text"
        )
    splits = {name: split for name, split in splits.items() if runs[name].records}
    if len(set(splits.values())) > 1:
        names = ", ".join(f"{name}: {split}" for name, split in splits.items())
        notes.append(f"the results are of different sets ({names})")
    elif "train" in splits.values():
        notes.append("without evaluations, the results are those of training")
    for name, run in runs.items():
        facts = imported_facts(run.path)
        if facts and run.steps is None:
            notes.append(
                f"{name} is {run.status}, not trained: it has no steps or losses of its own"
            )
        elif run.status != "finished":
            code = f" ({run.code})" if run.status == "failed" else ""
            place = "" if run.steps is None else f" at step {run.step} of {run.steps}"
            notes.append(f"{name}: {run.status}{code}{place}")
        if "scheme" in facts:
            notes.append(_rounding(name, facts))
    return notes


def brief(value: Any) -> str:
    """Return a value of config.json as short text."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 32 else f"{text[:29]}..."
