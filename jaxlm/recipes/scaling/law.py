"""Scaling law of published constants or of finished runs, and its check on the largest run."""

import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, InputMissing
from jaxlm.data import tokenizer_file
from jaxlm.models.cost import model_cost
from jaxlm.monitor import sinks
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.recipes.scaling import loss_law, resize_model
from jaxlm.recipes.scaling.loss_law import MIN_RUNS, MIN_SIZES, Law, Points

DRAWS = 200
SHARE = 0.8  # of the draws are within an interval
# Settings that all runs of a law share, besides their data.
COMMON = ("model.family", "optim.name", "schedule.name", "objective.name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run.

    Args:
      run: its config, with the vocabulary filled in.
      parameters: active for a token, embeddings included.
      tokens: trained on, without padding.
      flops: of the whole training, by `model_cost.flops_per_token`.
      loss_nats: of the first validation set, whole, after the last step.
      data: fingerprint of its data.
    """

    path: Path
    run: Run
    parameters: int
    tokens: int
    flops: float
    loss_nats: float
    data: dict[str, Any]


def points(runs: Sequence[FinishedRun]) -> Points:
    """Return the runs as arrays."""
    rows = [(each.parameters, each.tokens, each.loss_nats) for each in runs]
    return Points(*np.array(rows, np.float64).reshape(-1, 3).T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LawSource:
    """A law and equally likely ones: other published laws, or fits to resampled runs."""

    law: Law
    name: str
    others: list[Law]
    flops: tuple[float, float]  # of the smallest and the largest of its runs


def published() -> LawSource:
    """Return the replication, with the original as the other law.

    The replication agrees with the other two approaches of the original.
    """
    name, laws = next(iter(loss_law.PUBLISHED)), list(loss_law.PUBLISHED.values())
    return LawSource(law=laws[0], name=name, others=laws, flops=loss_law.PUBLISHED_FLOPS)


def fitted(runs: Sequence[FinishedRun]) -> LawSource:
    """Return a law fitted to finished runs."""
    arrays, flops = points(runs), [each.flops for each in runs]
    law = loss_law.fit(arrays)
    others, ends = loss_law.resample(arrays, law, DRAWS), (min(flops), max(flops))
    return LawSource(law=law, name=f"{len(runs)} runs", others=others, flops=ends)


def self_check(runs: Sequence[FinishedRun]) -> dict[str, Any] | None:
    """Predict the largest run by FLOPs from all others; None if those are too few for a law."""
    *others, largest = sorted(runs, key=lambda each: each.flops)
    if not points(others).suffice:
        return None
    source = fitted(others)
    size = (largest.parameters, largest.tokens)
    predicted = float(source.law.loss(*size))
    # The run itself deviates from the law, by as much as the others do.
    spread = loss_law.noise(source.law, points(others))
    noises = np.exp(spread * np.random.default_rng(0).standard_normal(DRAWS))
    pairs = zip(source.others, noises, strict=True)
    drawn = [float(law.loss(*size)) * factor for law, factor in pairs]
    return {
        "run": str(largest.path),
        "from_runs": len(others),
        "flops_beyond": largest.flops / source.flops[1],
        "loss_nats": largest.loss_nats,
        "predicted_nats": predicted,
        "interval_nats": quantiles(drawn, SHARE),
        "error": predicted / largest.loss_nats - 1,
    }


def quantiles(values: Sequence[float], share: float) -> list[float]:
    """Return the ends of the middle `share` of the values."""
    return [float(each) for each in np.quantile(values, [(1 - share) / 2, (1 + share) / 2])]


def read(pattern: str, flag: str) -> tuple[list[FinishedRun], list[str]]:
    """Return the finished runs that match a glob, by rising FLOPs, and why others are left out.

    Raises InputMissing if it matches no run directory, or too few finished runs for a law,
    ConfigError if two runs cannot be compared, and DataError if a file of a run is damaged.
    """
    where = f"{flag}={pattern}"
    folders = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    folders = [folder for folder in folders if (folder / "config.json").is_file()]
    if not folders:
        why, fix = "no matching folder contains a config.json", "find . -name metrics.jsonl"
        raise InputMissing("the pattern matches no run directory", where=where, why=why, fix=fix)
    runs, left_out = [], []
    for folder in folders:
        one = _read(folder)
        if isinstance(one, str):
            left_out.append(f"{folder}: {one}")
        else:
            runs.append(one)
    runs.sort(key=lambda each: each.flops)
    if runs:
        _check_comparable(runs)
    if points(runs).suffice:
        return runs, left_out
    sizes = points(runs).sizes
    counted = f"{len(runs)} finished, of {sizes} size{'' if sizes == 1 else 's'}"
    reasons = [f"{counted}; a law needs {MIN_RUNS} of {MIN_SIZES}", *left_out[:2]]
    if len(left_out) > 2:
        reasons[-1] += f"; and {len(left_out) - 2} more"
    what, file = "the finished runs are too few for a law", f"{folders[0]}/config.json"
    sweep = f"jaxlm scale --budget=1e18 --sweep --config={file} --workdir=runs/scale"
    fix = "\n".join(_missing(runs)) or sweep
    raise InputMissing(what, where=where, why="\n".join(reasons), fix=fix)


def _missing(runs: Sequence[FinishedRun]) -> list[str]:
    """Return commands for the missing runs: other widths of the largest first, then fewer steps."""
    if not runs:
        return []
    largest = max(runs, key=lambda each: each.parameters)
    full, steps = largest.run.model.width, largest.run.train.steps
    known = {each.run.model.width for each in runs}
    unit = resize_model.UNIT
    narrower = [round(full * share / unit) * unit for share in (0.5, 0.75, 0.25)]
    widths = [width for width in dict.fromkeys(narrower) if width and width not in known]
    missing_sizes = max(0, MIN_SIZES - points(runs).sizes)
    planned = [(width, steps) for width in widths[:missing_sizes]]
    several = [full, *widths]
    planned += [(width, max(1, steps // part)) for part in (2, 4) for width in several]
    lines = []
    for width, count in planned[: max(missing_sizes, MIN_RUNS - len(runs))]:
        changed = resize_model.settings_at_width(largest.run, width) | {"train.steps": count}
        flags = divisibility.config_flags(changed)
        workdir = largest.path.parent / f"w{width}-s{count}"
        lines.append(f"jaxlm train --config={largest.path}/config.json --workdir={workdir} {flags}")
    return lines


def _read(folder: Path) -> FinishedRun | str:
    """Return a run, or the reason why it is no point of a law."""
    # Imported here because they import JAX, which planning does not need.
    from jaxlm.recipes import setup
    from jaxlm.recipes.train import resume
    from jaxlm.training.rundir import read_json

    run: Run = config.from_json(Run, read_json(folder, "config.json"), f"{folder}/config.json")
    records, steps = sinks.read(folder / "metrics.jsonl"), run.train.steps
    trained = [record for record in records if record.get("split", "train") == "train"]
    last = trained[-1]["step"] if trained else 0
    if last < steps:
        return f"stopped at step {last} of {steps}"
    evaluated = [record for record in records if record["step"] == steps and record not in trained]
    if not evaluated or not evaluated[0].get("loss_nats"):
        return "it has no validation loss after its last step"
    end = getattr(run.schedule, "end", None)
    if end is not None and (ends := end.steps(steps, run.pace)) != steps:
        return f"its learning rate decays until step {ends}, but the run ends at {steps}"
    if any(record["step"] == 0 for record in records):
        return "it began with the weights of another run"
    starts = resume.read_starts(folder)
    if not starts:
        return "it has no starts.jsonl, which records its data"
    vocab = setup.vocabulary(run, tokenizer_file.read(folder / "tokenizer").size)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))
    decoder, tokens = run.model.build(), trained[-1]["tokens"]
    return FinishedRun(
        path=folder,
        run=run,
        parameters=model_cost.active_parameters(decoder),
        tokens=tokens,
        flops=tokens * model_cost.flops_per_token(decoder, run.data.sequence, causal=True),
        loss_nats=evaluated[0]["loss_nats"],
        data=starts[-1].data,
    )


def _check_comparable(runs: Sequence[FinishedRun]) -> None:
    """Raise ConfigError if two runs differ in tokenizer, data, family or kind of training."""
    first, expected = runs[0], _identity(runs[0])
    for other in runs[1:]:
        identity = _identity(other)
        names = [name for name in expected | identity if expected.get(name) != identity.get(name)]
        if names:
            pairs = [(name, expected.get(name), identity.get(name)) for name in names[:4]]
            why = [f"{name}: {_short(one)} and {_short(two)}" for name, one, two in pairs]
            what = "the losses of these runs cannot be compared"
            fix = "give --runs a pattern that matches one kind of run"
            where = f"{first.path} and {other.path}"
            raise ConfigError(what, where=where, why="\n".join(why), fix=fix)


def _identity(one: FinishedRun) -> dict[str, Any]:
    flat = config.flatten(one.run)
    data = {f"data {name}": value for name, value in one.data.items() if name != "seed"}
    return data | {name: flat[name] for name in COMMON}


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
