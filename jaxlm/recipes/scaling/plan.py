"""Best use of a budget of FLOPs: size and tokens of lowest loss by a scaling law. Free of JAX."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
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
from jaxlm.recipes.scaling import law as laws
from jaxlm.recipes.scaling import resize_model
from jaxlm.recipes.scaling.law import DRAWS, SHARE, FinishedRun, LawSource
from jaxlm.recipes.scaling.loss_law import PUBLISHED, Costs, Law, Optimum

STATE_BYTES = 16  # per parameter: float32 weights, gradients, and two moments
MIN_BUDGET, MAX_BUDGET = 1e6, 1e28  # FLOPs: a few hundred parameters, more than ever computed
MAX_EXTRAPOLATION = 100.0  # times the FLOPs of a law's runs, beyond which the law is doubtful
MIN_PARAMETERS = 1e4  # no law was fitted to smaller models
MANY_EPOCHS = 4.0  # arXiv:2305.16264: up to here repeated tokens are nearly as good as new ones
FILE = "scale.png"
POINTS = 60  # of a curve


def _spend(
    on: Machine, flops: float, parameters: float, dtype: Dtype, assumed: list[str], risks: list[str]
) -> dict[str, Any]:
    """Return days of training (None if unknown), and the nearest machine with enough memory."""
    peak = on.devices * predict.peak_flops(dtype, on.chip, assumed)
    low, high = predict.REACHED["cpu" if on.chip.name == "cpu" else "accelerator"]
    days = [flops / (peak * share) / 86400 for share in (high, low)]
    if on.chip.is_known:
        reached = f"training reaches an MFU between {low:.0%} and {high:.0%}"
        assumed.append(f"{reached} of {peak / 1e12:.3g} TFLOP/s in {dtype}")
    available = on.devices * predict.memory_bytes(on, assumed)
    needed = STATE_BYTES * parameters
    state = "float32 weights, gradients and two moments; activations come on top"
    assumed.append(f"{STATE_BYTES} bytes per parameter, split over all devices: {state}")
    nearest = None if needed <= available else _larger_machine(on, needed)
    if nearest:
        state = f"{formatting.size(needed)} of state do not fit {on.name}"
        risks.append(f"{state}: --on={nearest} has room")
    return {
        "on": on.name,
        "devices": on.devices,
        "days": days if on.chip.is_known else None,
        "state_bytes": needed,
        "memory_bytes": available,
        "fits": needed <= available,
        "nearest": nearest,
    }


def _larger_machine(on: Machine, needed: float) -> str:
    """Return the smallest machine with the memory: of the same chip, or of H200s."""
    slices = [each for each in chips.SLICES.values() if each.chip == on.chip]
    roomy = [each for each in slices if each.devices * predict.memory_bytes(each, []) >= needed]
    if roomy:
        return min(roomy, key=lambda each: each.devices).name
    is_joined = not on.chip.is_tpu and on.chip.name != "cpu"
    chip = on.chip if is_joined else chips.CHIPS["h200"]
    one = predict.memory_bytes(Machine(name=chip.name, chip=chip, devices=1), [])
    return f"{chip.name}x{math.ceil(needed / one)}"


def budget(text: str) -> float:
    """Return FLOPs from the command line. Raises CommandError if out of range."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if MIN_BUDGET <= value <= MAX_BUDGET:
        return value
    what, where = f"the budget {text} is not a number in range", f"--budget={text}"
    why = f"a budget is a number of FLOPs from {MIN_BUDGET:g} to {MAX_BUDGET:g}"
    raise CommandError(what, where=where, why=why, fix="jaxlm scale --help")


def answer(
    flops: float,
    run: Run | None = None,
    runs: Sequence[FinishedRun] = (),
    on: Machine | None = None,
    assumed: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON of `jaxlm scale --json` for a budget.

    Args:
      flops: the budget.
      run: its family, vocabulary and sequence length are planned with; without a run a token costs
        6 FLOPs per parameter.
      runs: finished runs to fit a law to; without any the published constants are used.
      on: machine to train on.
      assumed: assumptions made so far.

    Example:
      >>> f"{answer(1e20)['parameters']:.2e}"
      '8.53e+08'
    """
    lines, risks = list(assumed), list[str]()
    source = laws.fitted(runs) if runs else laws.published()
    table, vocab = None, 0
    if run is not None:
        vocab = predict.vocabulary(run, dict.fromkeys(AXES, 1), lines)
        table = resize_model.costs(run, vocab)
    best = source.law.optimum(flops, table)
    check = laws.self_check(runs) if runs else None
    lines += _assumed(run, runs, source)
    risks += _risks(flops, best, source, table, runs, check)
    optima, share = [law.optimum(flops, table) for law in source.others], SHARE if runs else 1.0
    values = zip(Optimum._fields, zip(*optima, strict=True), strict=True)
    ends = {name: laws.quantiles(each, share) for name, each in values}
    of_runs = f"{SHARE:.0%} of {DRAWS} fits to runs drawn with replacement"
    if not ends["parameters"][0] <= best.parameters <= ends["parameters"][1]:
        why = "one or two runs determine the law; train more runs, of more sizes and steps"
        risks.append(f"the size is outside its own range: {why}")
    machine = None
    if on is not None:
        fastest = chips.fastest_dtype(on.chip)
        dtype = "bfloat16" if run is None else run.with_compute(fastest).precision.compute_dtype
        machine = _spend(on, flops, best.parameters, dtype, lines, risks)
    published = {
        name: dataclasses.asdict(law) | law.optimum(flops, table)._asdict()
        for name, law in PUBLISHED.items()
    }
    return {
        "budget_flops": flops,
        **best._asdict(),
        "tokens_per_parameter": best.tokens / best.parameters,
        "band": {"of": of_runs if runs else "the published laws", **ends},
        "flops_per_token": flops / best.tokens,
        "law": dataclasses.asdict(source.law) | {"source": source.name},
        "published": None if runs else published,
        "shape": None if run is None else _shape(run, vocab, best, flops),
        "machine": machine,
        "runs": [_row(each, source.law) for each in runs],
        "self_check": check,
        "assumed": lines,
        "risks": risks,
    }


def _row(one: FinishedRun, law: Law) -> dict[str, Any]:
    names = ("parameters", "tokens", "flops", "loss_nats")
    known = {"run": str(one.path)} | {name: getattr(one, name) for name in names}
    return known | {"fitted_nats": float(law.loss(one.parameters, one.tokens))}


def _shape(run: Run, vocab: int, best: Optimum, flops: float) -> dict[str, Any]:
    """Return the model of the family nearest to the optimum, and the flags that train it."""
    width = resize_model.nearest(run, vocab, best.parameters)
    decoder = resize_model.decoder(run, vocab, width)
    flops_per_token = model_cost.flops_per_token(decoder, run.data.sequence, causal=True)
    steps = max(1, round(flops / flops_per_token / run.tokens_per_step))
    changed = resize_model.settings_at_width(run, width) | {"train.steps": steps}
    return {
        "width": width,
        "depth": decoder.depth,
        "parameters": model_cost.active_parameters(decoder),
        "flops_per_token": flops_per_token,
        "steps": steps,
        "tokens": steps * run.tokens_per_step,
        "flags": [f"--config.{path}={value}" for path, value in changed.items()],
    }


def _assumed(run: Run | None, runs: Sequence[FinishedRun], source: LawSource) -> Iterator[str]:
    products = "6 x (parameters of matrix products)"
    scores = "12 x heads x head_dim x (sequence + 1) / 2 per layer"
    known = f"FLOPs per token: {products} + {scores}"
    yield "a token costs 6 FLOPs per parameter" if run is None else known
    yield (
        "parameters are the active ones, embeddings included, as in arXiv:2203.15556: "
        "without embeddings small models look too good (arXiv:2406.12907)"
    )
    if not runs:
        why = "its losses are of another text and tokenizer than yours: take N and D, not the loss"
        yield f"the law of {source.name}; {why}"
        return
    first = runs[0].run
    prior = "both exponents 0.35 +- 0.15, and E about a third of the lowest loss"
    yield f"unless the runs determine them: {prior}"
    rates = "a learning rate that suits one size may not suit another"
    yield f"every size is trained with {first.optim.name} as in its config; {rates}"
    if first.schedule.name == "constant":
        yield "the plan's run has a constant learning rate too: decay would end lower"


def _risks(
    flops: float,
    best: Optimum,
    source: LawSource,
    table: Costs | None,
    runs: Sequence[FinishedRun],
    check: dict[str, Any] | None,
) -> Iterator[str]:
    low, high = source.flops
    if flops > MAX_EXTRAPOLATION * high:
        yield f"{flops / high:.3g} times the FLOPs of the largest run of the law"
    if flops < low / MAX_EXTRAPOLATION:
        yield f"{low / flops:.3g} times fewer FLOPs than the smallest run of the law"
    if best.parameters < MIN_PARAMETERS:
        yield f"{best.parameters:.0f} parameters: no law was fitted below {MIN_PARAMETERS:g}"
    if table is not None and best.parameters <= 1.01 * table.parameters[0]:
        why = "the narrowest model with this vocabulary is larger than the optimum"
        yield f"{why}: use a smaller --config.model.vocab"
    if not runs:
        return
    if check is None:
        yield "not checked: the law needs all of the runs; one more, larger, would be predicted"
    elif not check["interval_nats"][0] <= check["loss_nats"] <= check["interval_nats"][1]:
        yield f"the largest run is {abs(check['error']):.1%} off the prediction of the others"
    known = runs[0].data.get("train.tokens")
    if known and max(each.tokens for each in runs) > MANY_EPOCHS * known:
        yield f"runs read their {formatting.count(known)} tokens more than {MANY_EPOCHS:g} times"
    if known and best.tokens > MANY_EPOCHS * known:
        times = f"{formatting.count(best.tokens)} tokens are {best.tokens / known:.3g} times those"
        repeated = "the law counts repeated tokens as new (arXiv:2305.16264)"
        yield f"{times} of data.train; {repeated}"


def draw(answer: dict[str, Any], runs: Sequence[FinishedRun], folder: Path) -> Path:
    """Write scale.png: loss over FLOPs, from the smallest run to the budget. Raises NotWritable."""
    law = Law(**{name: answer["law"][name] for name in ("E", "A", "B", "alpha", "beta")})
    last = runs[-1].run
    assert last.model.vocab != "auto"
    costs = resize_model.costs(last, last.model.vocab)
    sizes = []
    for size in sorted({each.parameters for each in runs}):
        pairs = [(each.flops, each.loss_nats) for each in runs if each.parameters == size]
        flops = np.geomspace(min(pairs)[0] / 2, max(pairs)[0] * 2, POINTS)
        curve = zip(flops, law.loss(size, flops / costs.at(float(size))), strict=True)
        sizes.append(plots.Size(formatting.count(size), pairs, list(curve)))
    most = max(runs[-1].flops, answer["budget_flops"])
    budgets = np.geomspace(runs[0].flops, most, POINTS)
    best = [(each, law.optimum(each, costs).loss_nats) for each in map(float, budgets)]
    target = folder / FILE
    spent = (answer["budget_flops"], answer["loss_nats"], answer["band"]["loss_nats"])
    sinks.replace(target, plots.scaling(sizes, best, spent))
    return target
