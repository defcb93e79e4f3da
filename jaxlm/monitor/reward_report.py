"""The part of a report on rewards: their curves, and samples of the first and last rollout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.monitor import charts, sinks
from jaxlm.monitor.charts import Chart, Series
from jaxlm.monitor.sinks import Record, Shape

FILE = "rollouts.jsonl"
READ_BYTES = 2**21  # of each end of the file
SHOWN = 3  # samples of each kind
Z = 1.96  # standard errors of a 95% interval
SAMPLE: Shape = {
    "step": sinks.is_step,
    "prompt": sinks.is_text,
    "text": sinks.is_text,
    "document": sinks.is_number,
}


def curves(records: Sequence[Record]) -> list[Chart]:
    """Return the charts of the rewards: with its interval, of held-out prompts, and by name."""
    bounds = []
    for record in records:
        reward: Any = record.get("reward")
        error: Any = record.get("reward_stderr")
        if sinks.is_number(reward) and sinks.is_number(error):
            ends = {"low": reward - Z * error, "high": reward + Z * error}
            bounds.append({"step": record["step"], "split": record.get("split")} | ends)
    splits = [str(record["split"]) for record in records if sinks.is_number(record.get("reward"))]
    rewards: list[Series] = []
    for color, split in enumerate(dict.fromkeys(splits)):
        for field in ("reward", "low", "high"):
            points = charts.points(records if field == "reward" else bounds, split, field)
            name, is_thin = (split, False) if field == "reward" else (f"{split}, {field}", True)
            is_marked = split != "train" and not is_thin
            if points:
                rewards.append(Series(name, points, color, is_marked=is_marked, is_thin=is_thin))
    names = dict.fromkeys(n for each in records for n in each if n.startswith("reward/"))
    parts = [
        Series(name.partition("/")[2], points, color)
        for color, name in enumerate(names)
        if (points := charts.points(records, "train", name))
    ]
    drawn = [Chart("Reward", "mean reward", rewards)] if rewards else []
    return [*drawn, Chart("Rewards by name", "mean", parts)] if len(parts) > 1 else drawn


def samples(run: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the best, the worst and the changed samples, each with a title.

    They are of the last rollout. Changed is a prompt whose best sample was another in the earliest
    rollout with that prompt. Of a large file only both ends are read.
    """
    first, last = _ends(run / FILE)
    if not last:
        return []
    newest = [each for each in last if each["step"] == last[-1]["step"]]
    scored = [each for each in newest if sinks.is_number(each.get("reward"))]
    scored.sort(key=lambda each: -each["reward"])
    then, now = _best(first), _best(scored)
    changed = []
    for document, sample in now.items():
        other = then.get(document)
        if other is None or other["step"] == sample["step"] or other["text"] == sample["text"]:
            continue
        before = f"step {other['step']}, reward {_figure(other)}: {other['text']}"
        after = f"step {sample['step']}, reward {_figure(sample)}: {sample['text']}"
        changed.append(sample | {"text": f"\n{before}\n{after}"})
    groups = {
        "best": scored[:SHOWN],
        "worst": scored[SHOWN:][-SHOWN:],
        "changed": changed[:SHOWN],
    }
    return [
        (f"{name}, step {newest[0]['step']}", [each | {"reward": _figure(each)} for each in group])
        for name, group in groups.items()
        if group
    ]


def _figure(sample: dict[str, Any]) -> str:
    return f"{sample['reward']:.4g}" if sinks.is_number(sample.get("reward")) else "none"


def _best(samples: Sequence[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the sample of each prompt with the highest reward, of its first rollout."""
    best: dict[Any, dict[str, Any]] = {}
    for each in samples:
        known = best.get(each["document"])
        if not sinks.is_number(each.get("reward")):
            continue
        is_same = known is not None and known["step"] == each["step"]
        if known is None or (is_same and each["reward"] > known["reward"]):
            best[each["document"]] = each
    return best


def _ends(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the samples at the start and at the end of the file; both the same if it is small."""
    if not path.exists():
        return [], []
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = _parsed(file.read(READ_BYTES))
        file.seek(max(size - READ_BYTES, 0))
        return first, _parsed(file.read())


def _parsed(content: bytes) -> list[dict[str, Any]]:
    """Return the whole samples in a part of the file; a part of a line is none."""
    whole = []
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not sinks.misshapen(record, SAMPLE):
            whole.append(record)
    return whole
