"""Win rate of a run against another: how often a judge scores its answers higher."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError
from jaxlm.evals import samples, statistics
from jaxlm.recipes.collect.run import CollectSettings, collect
from jaxlm.recipes.use import load

FLAG = "--against"


def win_rate(
    workdir: Path,
    against: str,
    settings: CollectSettings,
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Return the share of the prompts that the run wins, with its 95% interval, wins and ties.

    Both runs draw `settings.samples` answers to each prompt with the same seeds, and each answer is
    scored alone, so that no order of two answers can matter. Sample k of one run is compared with
    sample k of the other; equal scores are half a win. The interval is that of the mean of prompts.

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
    settings = dataclasses.replace(settings, keep="all")
    other = load.open_run_ref(against, FLAG, say)
    of_other = dict.fromkeys(selection) | {"weights": "raw", "step": other.step}
    scores: list[dict[tuple[str, int], float | None]] = []
    names: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (run, chosen) in enumerate(((workdir, selection), (other.workdir, of_other))):
            out = Path(folder) / str(number)
            answer = collect(run, out, settings, say, **chosen)
            names.append(f"{run}@{answer['step']}")
            lines, _ = samples.read(out / samples.SAMPLES)
            scores.append({(each["id"], each["sample"]): each["score"] for each in lines})
    prompts: dict[str, list[float]] = {}
    missing = 0
    for place in scores[0].keys() & scores[1].keys():
        one, two = (each[place] for each in scores)
        if one is None or two is None:
            missing += 1
        else:
            prompts.setdefault(place[0], []).append((one > two) + 0.5 * (one == two))
    if not prompts:
        raise DataError(
            "no prompt has a score of both runs",
            where=f"--judge={settings.judge}",
            why=f"{missing} pairs of answers have no score of one run",
            fix="correct the prompts and the judge",
        )
    wins = [each for values in prompts.values() for each in values]
    means = [sum(prompts[name]) / len(prompts[name]) for name in sorted(prompts)]
    return {
        "run": names[0],
        "against": names[1],
        "judge": settings.judge,
        "prompts": len(prompts),
        "win_rate": statistics.estimate(means)._asdict(),
        "wins": wins.count(1.0),
        "ties": wins.count(0.5),
        "losses": wins.count(0.0),
        "unscored": missing,
    }
