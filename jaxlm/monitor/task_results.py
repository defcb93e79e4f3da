"""Table and curves of a run's results on tasks, for its report.

Example:
  >>> figures = {"mean": 0.75, "low": 0.7, "high": 0.8, "chance": 0.5}
  >>> result = {"task": "facts", "step": 9, "items": 40, "metrics": {"accuracy": figures}}
  >>> rows([result])
  [['facts, 40 items', '9', 'accuracy', '0.7500', '0.7000 to 0.8000', '0.5000']]
"""

from collections.abc import Sequence
from typing import Any

from jaxlm.monitor import charts, sinks
from jaxlm.monitor.charts import Chart, Series
from jaxlm.monitor.sinks import Record, Shape

HEAD = ["task", "step", "metric", "mean", "95% interval", "chance"]
FILES = "evals/*/results.json"  # in a run directory
LOSSES = ("bits_per_byte", "nats_per_token")  # not in the chart of shares
FIGURES = ("mean", "low", "high", "chance")


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict)
        and sinks.is_number(each.get("mean"))
        and all(each.get(name) is None or sinks.is_number(each[name]) for name in FIGURES)
        for each in value.values()
    )


SHAPE: Shape = {
    "task": sinks.is_text,
    "step": sinks.is_step,
    "items": sinks.is_step,
    "metrics": _is_metrics,
}


def label(result: Record) -> str:
    """Return the name of a task with its settings; results of one label are comparable."""
    shots, form = result.get("shots"), result.get("form")
    parts = [str(result["task"])]
    parts += [f"version {result['version']}"] if result.get("version", 1) != 1 else []
    parts += [f"{shots} shots"] if shots else []
    parts += [str(form)] if form not in (None, "cloze") else []
    return ", ".join([*parts, f"{result['items']} items"])


def rows(results: Sequence[Record]) -> list[list[str]]:
    """Return the cells of HEAD for each metric of the newest result of each label."""
    newest = {label(each): each for each in sorted(results, key=lambda each: each["step"])}
    return [
        [name, str(result["step"]), metric, *_cells(figures)]
        for name, result in sorted(newest.items())
        for metric, figures in result["metrics"].items()
    ]


def _cells(figures: Record) -> list[str]:
    mean, low, high, chance = (figures.get(name) for name in FIGURES)
    interval = "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"
    return [f"{mean:.4f}", interval, "-" if chance is None else f"{chance:.4f}"]


def curves(results: Sequence[Record], records: Sequence[Record]) -> list[Chart]:
    """Return charts over steps of the first metric of each task, for tasks with several steps.

    Thin curves are the ends of the 95% intervals. `records` are those of metrics.jsonl, which have
    the tokens and seconds of each step.
    """
    by_label: dict[str, list[Record]] = {}
    for each in results:
        by_label.setdefault(label(each), []).append(each)
    shares: list[Series] = []
    losses: list[Series] = []
    levels: dict[float, str] = {}
    color = 0
    for name, group in sorted(by_label.items()):
        metric = next(iter(group[0]["metrics"]), None)
        measured = [each for each in group if metric in each["metrics"]]
        if len({each["step"] for each in measured}) < 2:
            continue
        series = losses if metric in LOSSES else shares
        for figure in ("mean", "low", "high"):
            values = [
                {"step": each["step"], "split": name, figure: each["metrics"][metric].get(figure)}
                for each in measured
            ]
            points = charts.points([*records, *values], name, figure)
            is_mean = figure == "mean"
            title = f"{name}, {metric}" if is_mean else f"{name}, {figure}"
            series.append(Series(title, points, color, is_marked=is_mean, is_thin=not is_mean))
        color += 1
        chance = measured[0]["metrics"][metric].get("chance")
        if chance is not None and series is shares:
            levels.setdefault(round(chance, 4), f"chance of {measured[0]['task']}")
    drawn = []
    if shares:
        chances = [(name, value) for value, name in sorted(levels.items())]
        drawn.append(Chart("Tasks", "share", shares, levels=chances))
    if losses:
        drawn.append(Chart("Texts of tasks", "bits or nats", losses))
    return drawn
