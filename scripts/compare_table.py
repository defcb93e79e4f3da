"""Places, table and picture of the scripts that compare optimizers, objectives and schedules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import CommandError
from jaxlm.monitor import plots

Row = Mapping[str, Any]
INCHES = 0.24  # of the picture's height, for an arm
PAGES = {"schedules": "optimizers"}  # pages of the manual that have another name than the study
OFFSET = 0.12  # of an arm's line, half of that from one measure to the next


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column: its title, its runs and figures, and if arms have places by it."""

    title: str
    runs: str  # equal_tokens, equal_time
    figure: str
    is_ranked: bool = True

    def of(self, row: Row) -> list[float | None]:
        """The figures of an arm's seeds; None where it diverged. Without any, it has none."""
        return [*row[self.runs].get(self.figure, ())]


@dataclasses.dataclass(frozen=True)
class Column:
    """Another column, and its cell."""

    title: str
    cell: Callable[[Row], str]


RATES = (
    Column("learning rate", lambda row: f"{row['rate']:g}{' (edge)' if row['is_edge'] else ''}"),
    Column("next rate costs", lambda row: _sensitivity(row)),
)
COLUMNS = (
    *RATES,
    Column("steps in that time", lambda row: f"{row['equal_time']['steps']}"),
    Column("ms a step", lambda row: f"{1000 * row['step_seconds']:.1f}"),
)


def places(seeds: Mapping[str, Sequence[float | None]]) -> dict[str, tuple[int, int]]:
    """The best and the worst place of each arm that the seeds leave open.

    An arm is behind those whose every seed is better than its best.
    """
    known = {name: [_order(each) for each in values] for name, values in seeds.items() if values}
    return {
        name: (
            1 + sum(max(other) < min(bits) for other in known.values()),
            len(known) - sum(min(other) > max(bits) for other in known.values()),
        )
        for name, bits in known.items()
    }


def table(rows: Sequence[Row], measures: Sequence[Measure], columns: Sequence[Column]) -> str:
    """Markdown, by the mean of the first measure; who has none of it comes last."""
    ranked = {m: places({row["name"]: m.of(row) for row in rows}) for m in measures if m.is_ranked}
    head = ["", *_heads(measures), *(column.title for column in columns)]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in ordered(rows, measures[0]):
        cells = [f"`{row['name']}`"]
        for measure in measures:
            if measure.is_ranked:
                value = ranked[measure].get(row["name"])
                cells.append("" if value is None else _span(*value))
            cells.append(_spread(measure.of(row)))
        lines.append(_line([*cells, *(column.cell(row) for column in columns)]))
    return "\n".join(lines)


def shown(rows: Sequence[Row], measures: Sequence[Measure]) -> str:
    """A sentence for each measure: the lowest arm, and those within its noise."""
    sentences = []
    for measure in measures:
        ranked = places({row["name"]: measure.of(row) for row in rows})
        if not measure.is_ranked or not ranked:
            continue
        first = next(row for row in ordered(rows, measure))
        near = [name for name, (high, _) in ranked.items() if high == 1 and name != first["name"]]
        sentences.append(
            f"- **{measure.title}**: `{first['name']}` has the lowest mean, "
            f"{_spread(measure.of(first))}. "
            + (
                f"Seeds overlap so that {', '.join(f'`{name}`' for name in near)} may be as good."
                if near
                else "Every seed of every other is worse."
            )
        )
    return "\n".join(sentences)


def ordered(rows: Sequence[Row], measure: Measure) -> list[Row]:
    """The arms by their mean, without a figure last."""
    return sorted(rows, key=lambda row: _order(_mean(measure.of(row))))


def draw(rows: Sequence[Row], measures: Sequence[Measure]) -> bytes:
    """A PNG: a line for each arm, with a mark for each seed."""
    figure, axes = plots.new_figure()
    arms = ordered(rows, measures[0])[::-1]
    figure.set_figheight(1.2 + INCHES * len(arms))
    for number, measure in enumerate(measures):
        points = [
            (value, height + OFFSET * (len(measures) - 1 - 2 * number))
            for height, row in enumerate(arms)
            for value in measure.of(row)
            if value is not None
        ]
        values, heights = zip(*points, strict=True) if points else ((), ())
        axes.plot(values, heights, "od^"[number], markersize=4, alpha=0.6, label=measure.title)
    axes.set_yticks(range(len(arms)), [row["name"] for row in arms])
    axes.set(xlabel="bits per byte of the validation set; a mark is a seed")
    axes.margins(y=0.08)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    return plots.to_png(figure)


def around(file: Path, name: str) -> tuple[str, str]:
    """Text of a file before and after a table, its marks included.

    Raises:
      CommandError: the marks are missing.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    whole = file.read_text(encoding="utf-8") if file.is_file() else ""
    before, is_begun, rest = whole.partition(begin)
    _, is_ended, after = rest.partition(end)
    if not (is_begun and is_ended):
        raise CommandError(
            f"there is no place for the table in {file.name}",
            where=f"--page={file}",
            why=f"it has not the lines {begin} and {end}",
            fix=f"--page=jaxlm/docs/{PAGES.get(name, name)}.md",
        )
    return before + begin, end + after


def _heads(measures: Sequence[Measure]) -> list[str]:
    return [
        text
        for measure in measures
        for text in (["place", measure.title] if measure.is_ranked else [measure.title])
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _span(high: int, low: int) -> str:
    return f"{high}" if high == low else f"{high} to {low}"


def _spread(values: Sequence[float | None]) -> str:
    if not values:
        return "-"
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} diverged"
    return f"{sum(known) / len(known):.3f} ({min(known):.3f} to {max(known):.3f})"


def _sensitivity(row: Row) -> str:
    """Cost of the worse of the two rates next to the best one, in bits per byte."""
    if row["is_edge"]:
        return "-"
    rates = [rate for rate, _ in row["rates"]]
    at = rates.index(row["rate"])
    lowest = row["rates"][at][1]
    around_best = [bits for _, bits in row["rates"][at - 1 : at + 2]]
    if lowest is None or None in around_best:
        return "diverges"
    return f"+{max(around_best) - lowest:.3f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _order(value: float | None) -> float:
    return float("inf") if value is None else value
