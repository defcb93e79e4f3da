"""Page and console text of a comparison. Free of JAX."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlm.monitor import formatting, report, sinks
from jaxlm.monitor.charts import Chart, Series
from jaxlm.recipes.compare.comparison import AXES, Comparison, TableValue, brief
from jaxlm.recipes.compare.summary import RunSummary

RESULT_HEAD = ["result", "nats", "over the lowest", "bits per byte"]
REWARDED_HEAD = ["result", "reward", "over the highest"]
TASK_HEAD = ["task", "metric", "A", "B", "B - A", "p", "higher", "lower", "verdict"]
SHOWN_ITEMS = 20
INTERPOLATED = "~"  # before a value between two evaluations
RUN_HEAD = ["run", "status", "step", "tokens/s"]
AMOUNTS: dict[str, Callable[[float], str]] = {
    "steps": lambda amount: f"{amount:.0f}",
    "tokens": formatting.count,
    "seconds": formatting.duration,
}
Rows = list[list[str]]


def write(comparison: Comparison, target: Path) -> Path:
    """Write the page of a comparison, one self-contained HTML file.

    Raises NotWritable if it cannot be written.
    """
    names = list(comparison.runs)
    title = "jaxlm: " + (", ".join(names) if len(names) <= 4 else f"{len(names)} runs")
    is_evaluated = comparison.curves != comparison.training
    thin = comparison.training if is_evaluated else {}
    series = [
        Series(name, [tuple(point) for point in points], number, is_marked=is_evaluated)
        for number, (name, points) in enumerate(comparison.curves.items())
    ]
    series += [
        Series(name, [tuple(point) for point in points], number, is_thin=True)
        for number, (name, points) in enumerate(thin.items())
    ]
    values = [point.value for points in comparison.curves.values() for point in points]
    has_diverged = bool(values) and max(values) > 10 * min(values) > 0
    if comparison.is_rewarded:
        chart = Chart("Reward", "mean of a sample", series, is_log=False)
    else:
        chart = Chart("Loss", "nats per token", series, is_log=has_diverged)
    result_head, *results = result_table(comparison)
    folder = target.absolute().parent
    links = {
        name: os.path.relpath(run.path.absolute() / "report.html", folder)
        for name, run in comparison.runs.items()
        if (run.path / "report.html").is_file()
    }
    text = report.filled(
        "compare.html.jinja",
        title=title,
        notes=comparison.notes,
        result_head=result_head,
        results=results,
        differences=difference_rows(comparison) if comparison.differences else None,
        task_head=TASK_HEAD,
        tasks=task_tables(comparison),
        changed_items=_changed_items(comparison),
        charts=report.drawn([chart]),
        tables=[(axis, *curve_rows(comparison, axis)) for axis in AXES],
        run_head=RUN_HEAD,
        runs=[run_row(name, run) for name, run in comparison.runs.items()],
        reports=list(links.items()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    sinks.replace(target, text.encode())
    return target


def result_table(comparison: Comparison) -> Rows:
    """Return head and rows of the results."""
    rows = [REWARDED_HEAD if comparison.is_rewarded else RESULT_HEAD]
    for each in comparison.results:
        doubt = "" if each.doubt is None else f" \u00b1 {each.doubt:.2g}"
        over = "-" if each.over_best is None else f"{each.over_best:+.4f}"
        row = [each.name, _figure(each.value) + doubt, over, _figure(each.bits_per_byte)]
        rows.append(row[: len(rows[0])])
    return rows


def difference_rows(comparison: Comparison) -> Rows:
    """Return head and rows of the settings that differ, which have a column each if runs have more.

    A column of each run would be wider than a console for the runs of a sweep.
    """
    names, differences = list(comparison.runs), comparison.differences
    rows = [[path, *map(brief, values)] for path, values in differences.items()]
    table = [["setting", *names], *rows]
    if len(names) <= max(len(rows), 4):
        return table
    return [["run", *differences], *map(list, list(zip(*table, strict=True))[1:])]


def task_tables(comparison: Comparison) -> list[tuple[str, Rows]]:
    """Return a title, and the cells of TASK_HEAD of each metric, for each pair of runs."""
    tables: dict[str, Rows] = {}
    for each in comparison.tasks:
        difference = each.difference
        cells = [
            *(each.task, each.metric, _interval(each.a), _interval(each.b)),
            _interval(difference, sign="+"),
            "-" if each.p_adjusted is None else f"{each.p_adjusted:.3g}",
            *(str(difference.rises), str(difference.falls), each.verdict),
        ]
        tables.setdefault(f"A is {each.run_a}, B is {each.run_b}", []).append(cells)
    return list(tables.items())


def _interval(value: Any, sign: str = "") -> str:
    """Return mean and 95% interval of an estimate or a difference."""
    interval = "" if value.low is None else f" [{value.low:{sign}.4f}, {value.high:{sign}.4f}]"
    return f"{value.mean:{sign}.4f}{interval}"


def _changed_items(comparison: Comparison) -> list[tuple[str, str]]:
    """Return a title and the first ids of items with another result, by task and direction."""
    lists = []
    for each in comparison.tasks:
        for direction, items in (("higher", each.rises), ("lower", each.falls)):
            if items:
                title = f"{each.task}, {each.metric}: {direction} in {each.run_b}"
                more = f" and {len(items) - SHOWN_ITEMS} more" if items[SHOWN_ITEMS:] else ""
                lists.append((title, ", ".join(items[:SHOWN_ITEMS]) + more))
    return lists


def curve_rows(comparison: Comparison, axis: str) -> tuple[list[str], Rows]:
    """Return the head and the rows of each run's loss or reward at some amounts of an axis.

    A value between two evaluations has INTERPOLATED before it.
    """
    amounts, table = comparison.tables[axis]
    what = "reward" if comparison.is_rewarded else "nats"
    head = [f"{what} at {axis}", *map(AMOUNTS[axis], amounts)]
    return head, [[name, *map(_at, values)] for name, values in table.items()]


def _at(place: TableValue | None) -> str:
    mark = INTERPOLATED if place is not None and not place.is_measured else ""
    return mark + _figure(None if place is None else place.value)


def run_row(name: str, run: RunSummary) -> list[str]:
    """Return the cells of RUN_HEAD."""
    status = f"failed ({run.code})" if run.status == "failed" else run.status
    speed = formatting.count(run.tokens_per_second)
    return [name, status, f"{brief(run.step)}/{brief(run.steps)}", speed]


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"
