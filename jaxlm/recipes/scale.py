"""How a budget of FLOPs is best spent: the size and the tokens of lowest loss, by published constants or by runs of one's own."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import CommandError
from jaxlm.models import cost
from jaxlm.models.loss_law import (
    PUBLISHED,
    PUBLISHED_FLOPS,
    Costs,
    Law,
    Optimum,
    Points,
    fit,
    noise,
    resample,
)
from jaxlm.monitor import chips, words
from jaxlm.monitor.chips import Machine
from jaxlm.recipes import plan, shapes
from jaxlm.recipes.config import Run

LEAST, MOST = 1e6, 1e30  # FLOPs: a few hundred parameters, and more than was ever computed
DRAWS = 200
SHARE = 0.8  # of the draws lie within an interval
FAR = 100.0  # times the FLOPs of the runs behind a law, beyond which it is doubted
SMALLEST = 1e4  # parameters below which no law was looked at
STATE_BYTES = 16  # a parameter: float32 weights, gradients, and two moments
MANY_EPOCHS = 4.0  # arXiv:2305.16264: up to here repeated tokens are nearly as good as new ones


def budget(text: str) -> float:
    """FLOPs from the command line.

    Raises:
      CommandError: where they are no number to spend; with the nearest that is.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if LEAST <= value <= MOST:
        return value
    near = 1e20 if math.isnan(value) or not value else min(max(abs(value), LEAST), MOST)
    raise CommandError(
        f"a budget of {text}",
        where=f"--budget={text}",
        why=f"it is a number of FLOPs from {LEAST:g} to {MOST:g}",
        fix=f"--budget={near:g}",
    )


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


def answer(
    flops: float,
    run: Run | None = None,
    runs: Sequence[Finished] = (),
    on: Machine | None = None,
    assumed: Sequence[str] = (),
) -> dict[str, Any]:
    """The plan of a budget, as `jaxlm scale --json` says it.

    Args:
      flops: the budget.
      run: whose family, vocabulary and rows the model has; None has none, and a token costs 6 FLOPs a parameter.
      runs: that a law is fitted to; none takes the published constants.
      on: where it would be trained.
      assumed: what was assumed before.
    """
    said, risks = list(assumed), []
    source = fitted(runs) if runs else published()
    table, vocab = None, 0
    if run is not None:
        one = dict.fromkeys(("pipe", "data", "fsdp", "expert", "context", "tensor"), 1)
        vocab = plan.vocabulary(run, one, said)
        table = shapes.costs(run, vocab)
    best = source.law.optimum(flops, table)
    band = [law.optimum(flops, table) for law in source.others]
    check = self_check(runs) if runs else None
    said += _assumed(run, runs, source)
    risks += _risks(flops, best, source, table, runs, check)
    return {
        "budget_flops": flops,
        **best._asdict(),
        "tokens_per_parameter": best.tokens / best.parameters,
        "band": {
            "of": f"{SHARE:.0%} of {DRAWS} fits to runs drawn with replacement"
            if runs
            else "the published laws",
            **_band(band, SHARE if runs else 1.0),
        },
        "flops_per_token": flops / best.tokens,
        "law": dataclasses.asdict(source.law) | {"source": source.name},
        "published": {
            name: dataclasses.asdict(law) | law.optimum(flops, table)._asdict()
            for name, law in PUBLISHED.items()
        }
        if not runs
        else None,
        "shape": None if run is None else _shape(run, vocab, best, flops),
        "machine": None if on is None else _machine(on, flops, best, run, said, risks),
        "runs": [_row(each, source.law) for each in runs],
        "self_check": check,
        "assumed": said,
        "risks": risks,
    }


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
        "interval_nats": _quantiles(drawn, SHARE),
        "error": predicted / largest.loss_nats - 1,
    }


def _quantiles(values: Sequence[float], share: float) -> list[float]:
    return [float(each) for each in np.quantile(values, [(1 - share) / 2, (1 + share) / 2])]


def _band(optima: Sequence[Optimum], share: float) -> dict[str, list[float]]:
    return {
        name: _quantiles([getattr(each, name) for each in optima], share)
        for name in Optimum._fields
    }


def _row(one: Finished, law: Law) -> dict[str, Any]:
    return {
        "run": str(one.path),
        "parameters": one.parameters,
        "tokens": one.tokens,
        "flops": one.flops,
        "loss_nats": one.loss_nats,
        "fitted_nats": float(law.loss(one.parameters, one.tokens)),
    }


def _shape(run: Run, vocab: int, best: Optimum, flops: float) -> dict[str, Any]:
    """The model of the family nearest to the optimum, and the flags that train it for the budget."""
    width = shapes.nearest(run, vocab, best.parameters)
    decoder = shapes.decoder(run, vocab, width)
    each = cost.flops_per_token(decoder, run.data.sequence, causal=True)
    steps = max(1, round(flops / each / run.tokens_per_step))
    changed = shapes.of_width(run, width) | {"train.steps": steps}
    return {
        "width": width,
        "depth": decoder.depth,
        "parameters": cost.active_parameters(decoder),
        "flops_per_token": each,
        "steps": steps,
        "tokens": steps * run.tokens_per_step,
        "flags": [f"--config.{path}={value}" for path, value in changed.items()],
    }


def _machine(
    on: Machine,
    flops: float,
    best: Optimum,
    run: Run | None,
    assumed: list[str],
    risks: list[str],
) -> dict[str, Any]:
    """Days on a machine, and whether it holds the state; where it does not, the nearest that does."""
    dtype = "bfloat16" if run is None else run.precision.compute
    peak = on.devices * plan.peak_flops(dtype, on.chip, assumed)
    low, high = plan.REACHED["cpu" if on.chip.name == "cpu" else "accelerator"]
    assumed.append(
        f"training reaches an MFU between {low:.0%} and {high:.0%} of {peak / 1e12:.3g} TFLOP/s in {dtype}"
    )
    there = on.devices * plan.memory_bytes(on, assumed)
    needed = STATE_BYTES * best.parameters
    assumed.append(
        f"{STATE_BYTES} bytes a parameter, split over all devices: float32 weights, gradients and two moments; activations come on top"
    )
    nearest = None if needed <= there else _roomier(on, needed)
    if nearest:
        risks.append(f"{words.size(needed)} of state do not fit {on.name}: --on={nearest} has room")
    return {
        "on": on.name,
        "devices": on.devices,
        "days": [flops / (peak * share) / 86400 for share in (high, low)],
        "state_bytes": needed,
        "memory_bytes": there,
        "fits": needed <= there,
        "nearest": nearest,
    }


def _roomier(on: Machine, needed: float) -> str:
    """The smallest machine with room for so many bytes: of the same chip, or of H200s where slices end before."""
    slices = [each for each in chips.SLICES.values() if each.chip == on.chip]
    roomy = [each for each in slices if each.devices * plan.memory_bytes(each, []) >= needed]
    if roomy:
        return min(roomy, key=lambda each: each.devices).name
    is_joined = not on.chip.is_tpu and on.chip.name != "cpu"
    chip = on.chip if is_joined else chips.CHIPS["h200"]
    one = plan.memory_bytes(Machine(name=chip.name, chip=chip, devices=1), [])
    return f"{chip.name}x{math.ceil(needed / one)}"


def _assumed(run: Run | None, runs: Sequence[Finished], source: Source) -> list[str]:
    lines = [
        "a token costs 6 FLOPs a parameter"
        if run is None
        else "FLOPs a token: 6 x (parameters that multiply) + 12 x heads x their size x (sequence + 1) / 2 a layer",
        "parameters are all that a token meets, embeddings included, as in arXiv:2203.15556: without them small models look too good (arXiv:2406.12907)",
    ]
    if not runs:
        return [
            *lines,
            f"the law of {source.name}; its losses are of other text and another tokenizer than yours: take N and D, not the loss",
        ]
    first = runs[0].run
    lines.append(
        "both exponents lie about 0.35, give or take 0.15, where runs do not say otherwise"
    )
    lines.append(
        f"every size is trained with {first.optim.name} as its config says; a rate that suits one may not suit another"
    )
    if first.schedule.name == "constant":
        lines.append("the plan's run has a constant learning rate too: one that falls ends lower")
    return lines


def _risks(
    flops: float,
    best: Optimum,
    source: Source,
    table: Costs | None,
    runs: Sequence[Finished],
    check: dict[str, Any] | None,
) -> list[str]:
    lines = []
    low, high = source.flops
    if flops > FAR * high:
        lines.append(f"{flops / high:.3g} times the FLOPs of the largest run behind the law")
    if flops < low / FAR:
        lines.append(f"{low / flops:.3g} times fewer FLOPs than the smallest run behind the law")
    if best.parameters < SMALLEST:
        lines.append(f"{best.parameters:.0f} parameters: no law was fitted below {SMALLEST:g}")
    if table is not None and best.parameters <= 1.01 * table.parameters[0]:
        lines.append(
            "the narrowest model of this config's vocabulary is larger than the law would have it: a smaller --config.model.vocab"
        )
    if not runs:
        return lines
    if check is None:
        lines.append(
            "not checked: the law takes every run that there is; one more, larger, is predicted"
        )
    elif not check["interval_nats"][0] <= check["loss_nats"] <= check["interval_nats"][1]:
        lines.append(
            f"the largest run lies outside of what the others predict, by {abs(check['error']):.1%}"
        )
    known = runs[0].data.get("train.tokens")
    if known and max(each.tokens for each in runs) > MANY_EPOCHS * known:
        lines.append(f"runs read their {words.count(known)} tokens more than {MANY_EPOCHS:g} times")
    if known and best.tokens > MANY_EPOCHS * known:
        lines.append(
            f"{words.count(best.tokens)} tokens are {best.tokens / known:.3g} times those of data.train; the law takes them as new ones (arXiv:2305.16264)"
        )
    return lines
