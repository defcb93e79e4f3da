"""Where a law of loss comes from: what others published, or finished runs of one's own; and how well those foretell one another."""

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
from jaxlm.recipes.scaling import resize_model
from jaxlm.recipes.scaling.loss_fit import FEWEST_RUNS, FEWEST_SIZES, Points, fit, noise, resample
from jaxlm.recipes.scaling.loss_law import PUBLISHED, PUBLISHED_FLOPS, Law

DRAWS = 200
SHARE = 0.8  # of the draws lie within an interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that came to its end.

    Args:
      run: its config, the vocabulary filled in.
      parameters: that a token meets, embeddings included.
      tokens: trained on, padding not counted.
      flops: of its whole training, by `cost.flops_per_token`.
      loss_nats: of its first validation set, all of it, after the last step.
      data: the fingerprint of its data.
    """

    path: Path
    run: Run
    parameters: int
    tokens: int
    flops: float
    loss_nats: float
    data: dict[str, Any]


def points(runs: Sequence[Finished]) -> Points:
    """The runs as arrays."""
    rows = [(each.parameters, each.tokens, each.loss_nats) for each in runs]
    return Points(*np.array(rows, np.float64).reshape(-1, 3).T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A law, and others that are as likely: published beside it, or from runs drawn again."""

    law: Law
    name: str
    others: list[Law]
    flops: tuple[float, float]  # of the smallest and the largest run behind it


def published() -> Source:
    """The replication, whose optimum agrees with the other two approaches of the original, beside the original."""
    (name, law), *others = PUBLISHED.items()
    return Source(
        law=law, name=name, others=[law, *(each for _, each in others)], flops=PUBLISHED_FLOPS
    )


def fitted(runs: Sequence[Finished]) -> Source:
    """A law of one's own runs."""
    there = points(runs)
    law = fit(there)
    flops = [each.flops for each in runs]
    return Source(
        law=law,
        name=f"{len(runs)} runs",
        others=resample(there, law, DRAWS),
        flops=(min(flops), max(flops)),
    )


def self_check(runs: Sequence[Finished]) -> dict[str, Any] | None:
    """The largest run by FLOPs, predicted from all others; None where those are too few for a law."""
    *others, largest = sorted(runs, key=lambda each: each.flops)
    if not points(others).suffice:
        return None
    source = fitted(others)
    at = (largest.parameters, largest.tokens)
    predicted = float(source.law.loss(*at))
    # A run differs from its law too, by as much as the others do.
    spread = noise(source.law, points(others))
    own = np.exp(spread * np.random.default_rng(0).standard_normal(DRAWS))
    drawn = [float(law.loss(*at)) * factor for law, factor in zip(source.others, own, strict=True)]
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
    """The ends of the middle `share` of the values."""
    return [float(each) for each in np.quantile(values, [(1 - share) / 2, (1 + share) / 2])]


# Finished runs as points of a law: what each was, what it saw, how low its loss came.


# What all runs of a law have in common, beside their data.
COMMON = ("model.family", "optim.name", "schedule.name", "objective.name")


def read(pattern: str, flag: str) -> tuple[list[Finished], list[str]]:
    """The finished runs among the directories that a glob matches, smallest FLOPs first, and why others are left out.

    Raises:
      InputMissing: where it matches no run directory, or too few finished runs for a law.
      ConfigError: where two cannot be compared.
      DataError: where a file of a run is damaged.
    """
    folders = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    folders = [folder for folder in folders if (folder / "config.json").is_file()]
    if not folders:
        raise InputMissing(
            "there is no run directory",
            where=f"{flag}={pattern}",
            why="no folder that it matches holds a config.json",
            fix="find . -name metrics.jsonl",
        )
    found, left_out = [], []
    for folder in folders:
        one = _read(folder)
        if isinstance(one, str):
            left_out.append(f"{folder}: {one}")
        else:
            found.append(one)
    found.sort(key=lambda each: each.flops)
    if found:
        _check_comparable(found)
    check_enough(found, left_out, f"{flag}={pattern}", folders[0])
    return found, left_out


def check_enough(
    runs: Sequence[Finished], left_out: Sequence[str], where: str, example: Path
) -> None:
    """Raises InputMissing, with lines that make the missing runs, where a law cannot be fitted."""
    there = points(runs)
    if there.suffice:
        return
    sizes = there.sizes
    counted = f"{len(runs)} finished, of {sizes} size{'' if sizes == 1 else 's'}"
    why = [f"{counted}; a law takes {FEWEST_RUNS} of {FEWEST_SIZES}", *left_out[:2]]
    if len(left_out) > 2:
        why[-1] += f"; and {len(left_out) - 2} more"
    raise InputMissing(
        "there are too few finished runs for a law",
        where=where,
        why="\n".join(why),
        fix="\n".join(_missing(runs)) or _sweep(f"{example}/config.json"),
    )


def _sweep(file: str) -> str:
    return f"jaxlm scale --budget=1e18 --sweep --config={file} --workdir=runs/scale"


def _missing(runs: Sequence[Finished]) -> list[str]:
    """Commands that make runs of other widths beside the largest, then of fewer steps, as many as are missing."""
    if not runs:
        return []
    largest = max(runs, key=lambda each: each.parameters)
    own, steps = largest.run.model.width, largest.run.train.steps
    known = {each.run.model.width for each in runs}
    narrower = [
        round(own * share / resize_model.UNIT) * resize_model.UNIT for share in (0.5, 0.75, 0.25)
    ]
    widths = [width for width in dict.fromkeys(narrower) if width and width not in known]
    missing_sizes = max(0, FEWEST_SIZES - points(runs).sizes)
    wanted = [(width, steps) for width in widths[:missing_sizes]]
    several = [own, *widths]
    wanted += [(width, max(1, steps // part)) for part in (2, 4) for width in several]
    lines = []
    for width, count in wanted[: max(missing_sizes, FEWEST_RUNS - len(runs))]:
        changed = resize_model.settings_at_width(largest.run, width) | {"train.steps": count}
        flags = " ".join(f"--config.{path}={value}" for path, value in changed.items())
        beside = largest.path.parent / f"w{width}-s{count}"
        lines.append(f"jaxlm train --config={largest.path}/config.json --workdir={beside} {flags}")
    return lines


def _read(folder: Path) -> Finished | str:
    """A run; or why it is no point of a law."""
    # These import JAX, which the plan of a law does not need.
    from jaxlm.recipes import setup
    from jaxlm.recipes.train import resume
    from jaxlm.training.rundir import read_json

    where = str(folder / "config.json")
    run: Run = config.from_json(Run, read_json(folder, "config.json"), where=where)
    records, steps = sinks.read(folder / "metrics.jsonl"), run.train.steps
    trained = [each for each in records if each.get("split", "train") == "train"]
    last = trained[-1]["step"] if trained else 0
    if last < steps:
        return f"stopped at step {last} of {steps}"
    evaluated = [each for each in records if each["step"] == steps and each not in trained]
    if not evaluated or not evaluated[0].get("loss_nats"):
        return "it has no validation loss after its last step"
    end = getattr(run.schedule, "end", None)
    if end is not None and (ends := end.steps(steps, run.pace)) != steps:
        return f"its learning rate falls until step {ends}, and the run ends at {steps}"
    begun = resume.read_starts(folder)
    if not begun:
        return "starts.jsonl, which says what data it read, is not there"
    vocab = setup.vocabulary(run, tokenizer_file.read(folder / "tokenizer").size)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))
    decoder, tokens = run.model.build(), trained[-1]["tokens"]
    return Finished(
        path=folder,
        run=run,
        parameters=model_cost.active_parameters(decoder),
        tokens=tokens,
        flops=tokens * model_cost.flops_per_token(decoder, run.data.sequence, causal=True),
        loss_nats=evaluated[0]["loss_nats"],
        data=begun[-1].data,
    )


def _check_comparable(runs: Sequence[Finished]) -> None:
    """Raises ConfigError where two runs differ in their tokenizer, data, family or the kind of training."""
    first, wanted = runs[0], _identity(runs[0])
    for other in runs[1:]:
        found = _identity(other)
        names = [name for name in wanted | found if wanted.get(name) != found.get(name)]
        if names:
            raise ConfigError(
                "the losses of these runs cannot be compared",
                where=f"{first.path} and {other.path}",
                why="\n".join(
                    f"{name}: {_short(wanted.get(name))} and {_short(found.get(name))}"
                    for name in names[:4]
                ),
                fix="give --runs a pattern that matches one kind alone",
            )


def _identity(one: Finished) -> dict[str, Any]:
    flat = config.flatten(one.run)
    data = {f"data {name}": value for name, value in one.data.items() if name != "seed"}
    return data | {name: flat[name] for name in COMMON}


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
