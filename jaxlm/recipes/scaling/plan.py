"""How a budget of FLOPs is best spent: the size and the tokens of lowest loss, by published constants or by runs of one's own."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import CommandError
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips, formatting, plots, sinks
from jaxlm.monitor.chips import Dtype, Machine
from jaxlm.parallel.config import AXES
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from jaxlm.recipes.scaling import resize_model
from jaxlm.recipes.scaling.law import (
    DRAWS,
    SHARE,
    Finished,
    Source,
    fitted,
    published,
    quantiles,
    self_check,
)
from jaxlm.recipes.scaling.loss_law import PUBLISHED, Costs, Law, Optimum

# What a budget takes on a machine: days, and room for the state.


STATE_BYTES = 16  # a parameter: float32 weights, gradients, and two moments


def spend(
    on: Machine,
    flops: float,
    parameters: float,
    dtype: Dtype,
    assumed: list[str],
    risks: list[str],
) -> dict[str, Any]:
    """Days of training (None for a chip of unknown speed), and whether the machine holds the state; if not, the nearest that does.

    Args:
      dtype: of the products.
      assumed, risks: to which lines are added.
    """
    peak = on.devices * predict.peak_flops(dtype, on.chip, assumed)
    low, high = predict.REACHED["cpu" if on.chip.name == "cpu" else "accelerator"]
    if on.chip.is_known:
        assumed.append(
            f"training reaches an MFU between {low:.0%} and {high:.0%} of {peak / 1e12:.3g} TFLOP/s in {dtype}"
        )
    there = on.devices * predict.memory_bytes(on, assumed)
    needed = STATE_BYTES * parameters
    assumed.append(
        f"{STATE_BYTES} bytes a parameter, split over all devices: float32 weights, gradients and two moments; activations come on top"
    )
    nearest = None if needed <= there else _roomier(on, needed)
    if nearest:
        risks.append(
            f"{formatting.size(needed)} of state do not fit {on.name}: --on={nearest} has room"
        )
    return {
        "on": on.name,
        "devices": on.devices,
        "days": [flops / (peak * share) / 86400 for share in (high, low)]
        if on.chip.is_known
        else None,
        "state_bytes": needed,
        "memory_bytes": there,
        "fits": needed <= there,
        "nearest": nearest,
    }


def _roomier(on: Machine, needed: float) -> str:
    """The smallest machine with room for so many bytes: of the same chip, or of H200s where slices end before."""
    slices = [each for each in chips.SLICES.values() if each.chip == on.chip]
    roomy = [each for each in slices if each.devices * predict.memory_bytes(each, []) >= needed]
    if roomy:
        return min(roomy, key=lambda each: each.devices).name
    is_joined = not on.chip.is_tpu and on.chip.name != "cpu"
    chip = on.chip if is_joined else chips.CHIPS["h200"]
    one = predict.memory_bytes(Machine(name=chip.name, chip=chip, devices=1), [])
    return f"{chip.name}x{math.ceil(needed / one)}"


LEAST, MOST = 1e6, 1e28  # FLOPs: a few hundred parameters, and more than was ever computed
FAR = 100.0  # times the FLOPs of the runs behind a law, beyond which it is doubted
SMALLEST = 1e4  # parameters below which no law was looked at
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
    raise CommandError(
        f"a budget of {text}",
        where=f"--budget={text}",
        why=f"it is a number of FLOPs from {LEAST:g} to {MOST:g}",
        fix="jaxlm scale --help",
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
        vocab = predict.vocabulary(run, dict.fromkeys(AXES, 1), said)
        table = resize_model.costs(run, vocab)
    best = source.law.optimum(flops, table)
    band = [law.optimum(flops, table) for law in source.others]
    check = self_check(runs) if runs else None
    said += _assumed(run, runs, source)
    risks += _risks(flops, best, source, table, runs, check)
    ends = _band(band, SHARE if runs else 1.0)
    if not ends["parameters"][0] <= best.parameters <= ends["parameters"][1]:
        risks.append(
            "the size lies outside of its own range: without one or two of the runs the law is another; more runs, of more sizes and steps"
        )
    machine = None
    if on is not None:
        dtype = "bfloat16" if run is None else run.precision.compute
        machine = spend(on, flops, best.parameters, dtype, said, risks)
    return {
        "budget_flops": flops,
        **best._asdict(),
        "tokens_per_parameter": best.tokens / best.parameters,
        "band": {
            "of": f"{SHARE:.0%} of {DRAWS} fits to runs drawn with replacement"
            if runs
            else "the published laws",
            **ends,
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
        "machine": machine,
        "runs": [_row(each, source.law) for each in runs],
        "self_check": check,
        "assumed": said,
        "risks": risks,
    }


def _band(optima: Sequence[Optimum], share: float) -> dict[str, list[float]]:
    return {
        name: quantiles([getattr(each, name) for each in optima], share) for name in Optimum._fields
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
    width = resize_model.nearest(run, vocab, best.parameters)
    decoder = resize_model.decoder(run, vocab, width)
    each = model_cost.flops_per_token(decoder, run.data.sequence, causal=True)
    steps = max(1, round(flops / each / run.tokens_per_step))
    changed = resize_model.settings_at_width(run, width) | {"train.steps": steps}
    return {
        "width": width,
        "depth": decoder.depth,
        "parameters": model_cost.active_parameters(decoder),
        "flops_per_token": each,
        "steps": steps,
        "tokens": steps * run.tokens_per_step,
        "flags": [f"--config.{path}={value}" for path, value in changed.items()],
    }


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
        "where runs do not say otherwise: both exponents about 0.35, give or take 0.15, and E about a third of the lowest loss"
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
        lines.append(
            f"runs read their {formatting.count(known)} tokens more than {MANY_EPOCHS:g} times"
        )
    if known and best.tokens > MANY_EPOCHS * known:
        lines.append(
            f"{formatting.count(best.tokens)} tokens are {best.tokens / known:.3g} times those of data.train; the law takes them as new ones (arXiv:2305.16264)"
        )
    return lines


# The picture of a law of one's own: its runs, its curve for each size, and how low a budget goes.


FILE = "scale.png"
POINTS = 60  # of a curve


def draw(answer: dict[str, Any], runs: Sequence[Finished], folder: Path) -> Path:
    """Writes scale.png into a folder: loss by training FLOPs, from the smallest run to the budget. Raises NotWritable."""
    law = Law(**{name: answer["law"][name] for name in ("E", "A", "B", "alpha", "beta")})
    last = runs[-1].run
    assert last.model.vocab != "auto"
    costs = resize_model.costs(last, last.model.vocab)
    sizes = []
    for size in sorted({each.parameters for each in runs}):
        own = [(each.flops, each.loss_nats) for each in runs if each.parameters == size]
        flops = np.geomspace(min(own)[0] / 2, max(own)[0] * 2, POINTS)
        curve = law.loss(size, flops / costs.at(float(size)))
        sizes.append(plots.Size(formatting.count(size), own, list(zip(flops, curve, strict=True))))
    ends = (runs[0].flops, max(runs[-1].flops, answer["budget_flops"]))
    budgets = np.geomspace(*ends, POINTS)
    best = [(each, law.optimum(each, costs).loss_nats) for each in map(float, budgets)]
    target = folder / FILE
    spent = (answer["budget_flops"], answer["loss_nats"], answer["band"]["loss_nats"])
    sinks.replace(target, plots.scaling(sizes, best, spent))
    return target
