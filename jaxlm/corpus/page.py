"""The report of a recipe for people: one HTML file that needs no other, with the funnel, reasons and samples of each."""

import html
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.core.quoting import cut, printable
from jaxlm.corpus.report import not_looked_for, shown_share
from jaxlm.monitor.report import STYLE

SAMPLES = 3  # documents of each reason
REASONS = 40  # that are shown
MOST_BYTES = 1500  # of a document
BARS = """
.bar { background: var(--soft); min-width: 14rem; height: .8rem; } .bar i { display: block; height: 100%; background: var(--good); }
.gone i { background: #b35900; } details { margin: .4rem 0; }
"""


def render(out: Path, answer: dict[str, Any]) -> str:
    """The page of a finished folder. The same folder gives the same page: it holds no times and no place."""
    sections = (
        ("Funnel", _funnel(answer)),
        ("Why documents went", _reasons(out, answer)),
        ("Kept", _samples(out, answer, "kept")),
        ("Broken", _samples(out, answer, "broken")),
        ("Changed and counted", _notes(answer)),
    )
    body = "\n".join(
        f"<h2>{name}</h2>\n{text}" for name, part in sections if (text := "\n".join(part))
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>jaxlm data run</title><style>{STYLE}{BARS}</style></head>\n"
        f"<body><h1>jaxlm data run</h1>\n{_summary(answer)}\n{body}\n</body></html>\n"
    )


def _summary(answer: dict[str, Any]) -> str:
    kept, read = answer["characters"]["kept"], answer["characters"]["read"]
    said = (
        f"kept {answer['kept']:,} of {answer['read']:,} documents, {kept:,} of {read:,} characters"
    )
    return f'<p class="soft">{said}</p>'


def _funnel(answer: dict[str, Any]) -> Iterator[str]:
    most = max(1, answer["read"])
    rows = "".join(
        f"<tr><td>{html.escape(row['stage'])}</td><td class=number>{row['in']:,}</td>"
        f"<td class=number>{row['out']:,}</td><td class=number>{html.escape(shown_share(row))}</td>"
        f"<td>{_bar(row['out'] / most)}</td></tr>"
        for row in answer["funnel"]
    )
    head = "<th>stage</th><th class=number>in</th><th class=number>out</th><th class=number>removed</th><th>left</th>"
    yield f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    if answer["sample"] < 1:
        yield (
            f"<p>A sample of {answer['sample']:.2%} of the records, drawn by their places. In brackets is where the share of "
            "all lies with 95% (Wilson). Shares of duplicates have none: duplicates of what is not in the sample are not seen, "
            "so that of all at least as many go.</p>"
        )


def _reasons(out: Path, answer: dict[str, Any]) -> Iterator[str]:
    removed = answer["removed"]
    most = max(removed.values(), default=1)
    for reason, count in itertools.islice(removed.items(), REASONS):
        share = f"{count:,} of {answer['read']:,}, {count / answer['read']:.2%}"
        samples = "".join(_samples(out, answer, f"removed/{reason}"))
        yield (
            f"<details><summary>{html.escape(reason)}: {share}"
            f'<div class="bar gone"><i style="width:{100 * count / most:.1f}%"></i></div></summary>{samples}</details>'
        )
    if len(removed) > REASONS:
        yield f"<p>{len(removed) - REASONS} more reasons are in report.json.</p>"


def _samples(out: Path, answer: dict[str, Any], folder: str) -> Iterator[str]:
    """Some documents, from files far apart."""
    files = [name for name in answer["files"] if name.startswith(f"{folder}/")]
    chosen = files[:: max(1, -(-len(files) // SAMPLES))]
    each = -(-SAMPLES // max(1, len(chosen)))
    for name in chosen:
        with open(out / name, "rb") as file:
            for line in itertools.islice(file, each):
                record = json.loads(line)
                why = " · ".join(
                    str(record[key]) for key in ("reason", "kind", "detail") if record.get(key)
                )
                place = f"{record['file']}, record {record['record']}"
                said = _shown(f"{place} · {why}" if why else place)
                yield f'<p class="soft">{said}</p>'
                if "text" in record:
                    yield f"<pre>{_shown(record['text'])}</pre>"


def _notes(answer: dict[str, Any]) -> Iterator[str]:
    if said := not_looked_for(answer):
        yield f"<p>{said}</p>"
    if answer["notes"]:
        rows = "".join(
            f"<tr><td>{_shown(what)}</td><td class=number>{count:,}</td></tr>"
            for what, count in answer["notes"].items()
        )
        yield f'<div class="scroll"><table>{rows}</table></div>'


def _bar(share: float) -> str:
    return f'<div class="bar"><i style="width:{100 * share:.1f}%"></i></div>'


def _shown(text: str) -> str:
    """Text from outside: cut, its controls spelt out, and nothing in it HTML."""
    return html.escape(printable(cut(text, MOST_BYTES)))
