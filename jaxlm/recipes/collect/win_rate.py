"""Win rate of a run against another: how often a judge prefers its answers."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError
from jaxlm.evals import samples, statistics
from jaxlm.recipes.collect import judges
from jaxlm.recipes.collect.prompts import CollectPrompt
from jaxlm.recipes.collect.run import CollectSettings, collect
from jaxlm.recipes.use import load
from jaxlm.recipes.use.llm_judge import ComparingModel, Preferred

FLAG = "--against"
COMPARE = "compare:"


def win_rate(
    workdir: Path,
    against: str,
    settings: CollectSettings,
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Return the share of the prompts that the run wins, with its 95% interval, wins and ties.

    Both runs draw `settings.samples` answers to each prompt with the same seeds, and sample k of
    one run is compared with sample k of the other; a tie is half a win. A judge scores each answer
    alone, except compare:RUN, which sees both in both orders: then `orders_agree` is the share of
    the comparisons in which both orders prefer the same answer. The interval is that of the mean of
    prompts.

    Args:
      workdir: the run.
      against: RUN[@STEP] of the other run.
      settings: prompts, judge and draws.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`, of the run.

    Raises:
      DataError: if no prompt has a score of both runs.
      JaxlmError: as `collect`.
    """
    judge, settings = settings.judge, dataclasses.replace(settings, keep="all")
    comparing: ComparingModel | None = None
    if judge.startswith(COMPARE):
        comparing = ComparingModel(judge.removeprefix(COMPARE), f"{judges.FLAG}={COMPARE}", say)
        settings = dataclasses.replace(settings, judge="")
    other = load.open_run_ref(against, FLAG, say)
    of_other = dict.fromkeys(selection) | {"weights": "raw", "step": other.step}
    drawn: list[dict[tuple[str, int], Mapping[str, Any]]] = []
    names: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (run, chosen) in enumerate(((workdir, selection), (other.workdir, of_other))):
            out = Path(folder) / str(number)
            answer = collect(run, out, settings, say, **chosen)
            names.append(f"{run}@{answer['step']}")
            lines = samples.read(out / samples.SAMPLES)
            drawn.append({(each["id"], each["sample"]): each for each in lines})
    prompts: dict[str, list[float]] = {}
    places = sorted(drawn[0].keys() & drawn[1].keys())
    pairs = [(drawn[0][place], drawn[1][place]) for place in places]
    verdicts = [] if comparing is None else _compared(comparing, pairs)
    gaps = [_gap(*pair) for pair in pairs] if comparing is None else [x.odds for x in verdicts]
    for (name, _), gap in zip(places, gaps, strict=True):
        if gap is not None:
            prompts.setdefault(name, []).append((gap > 0) + 0.5 * (gap == 0))
    missing = gaps.count(None)
    if not prompts:
        raise DataError(
            "no prompt has a score of both runs",
            where=f"--judge={judge}",
            why=f"{missing} pairs of answers have no score of one run",
            fix="correct the prompts and the judge",
        )
    wins = [each for values in prompts.values() for each in values]
    means = [sum(prompts[name]) / len(prompts[name]) for name in sorted(prompts)]
    return {
        "run": names[0],
        "against": names[1],
        "judge": judge,
        "prompts": len(prompts),
        "win_rate": statistics.estimate(means, is_share=True)._asdict(),
        "wins": wins.count(1.0),
        "ties": wins.count(0.5),
        "losses": wins.count(0.0),
        "unscored": missing,
        "orders_agree": sum(x.agrees for x in verdicts) / len(verdicts) if verdicts else None,
    }


def _gap(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Return the difference of two scores; None without one of them."""
    if one["score"] is None or other["score"] is None:
        return None
    return one["score"] - other["score"]


def _compared(
    model: ComparingModel, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[Preferred]:
    """Return the verdict of a model on the two answers of each pair of samples."""
    questions = (CollectPrompt(one["prompt"], None, {}).question for one, _ in pairs)
    texts = zip(questions, pairs, strict=True)
    return model.compare([(asked, one["text"], other["text"]) for asked, (one, other) in texts])
