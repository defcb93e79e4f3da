"""The report of a recipe: counts and funnel of its stages as JSON, as a table and as a page."""

import functools
import itertools
import json
import operator
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from jaxlm.core import wilson
from jaxlm.core.quoting import cut, printable
from jaxlm.corpus.config import DedupName
from jaxlm.corpus.dedup.minhash import recall
from jaxlm.corpus.document import Counts
from jaxlm.corpus.filters.blocklists import evaluations
from jaxlm.corpus.job import FORMAT_VERSION, Job, part_of
from jaxlm.data.records import NO_TEXT
from jaxlm.monitor.report import CONTENTS, STYLE, with_contents

if TYPE_CHECKING:
    import jinja2

SHOWN = 3  # reasons of a stage shown in the table
SIMILARITIES = 0.7, 0.75, 0.8, 0.85, 0.9
SAMPLES = 3  # documents shown of each reason
MAX_REASONS = 40  # shown on the page
MAX_BYTES = 1500  # shown of a document


def report(job: Job, parts: Mapping[str, Counts], files: dict[str, Any]) -> dict[str, Any]:
    """Return all counts. They contain no times and no paths: equal input gives an equal report."""
    counts = functools.reduce(operator.iadd, parts.values(), Counts())
    counts.check("all units")
    head = {"format_version": FORMAT_VERSION, "sample": job.sample}
    answer: dict[str, Any] = {**head, **_totals(job, counts), "files": files}
    if job.recipe.parts:
        of_units = [part_of(job.recipe.parts, unit[0].name) for unit in job.units]
        answer["parts"] = {}
        for name in job.recipe.part_names:
            numbers = [number for number, part in enumerate(of_units) if part == name]
            answer["parts"][name] = {**_totals(job, parts[name]), "units": numbers}
    if "decontaminate" in job.recipe.stages:
        sets = evaluations(job.recipe)
        answer["evaluations"] = {"records": sets.records, "too_short": sets.short}
    if "near" in job.recipe.dedup:
        recalls = {f"{s:g}": round(recall(s, job.recipe.near), 4) for s in SIMILARITIES}
        answer["near_recall_at_least"] = recalls
    return answer


def _totals(job: Job, counts: Counts) -> dict[str, Any]:
    return {
        **{name: counts.documents[name] for name in ("read", "kept")},
        "removed": dict(counts.under("removed")),
        "broken": dict(counts.under("broken")),
        "characters": {name: counts.characters[name] for name in ("read", "kept")},
        "funnel": funnel(job, counts),
        "notes": dict(sorted(counts.notes.items())),
        "histograms": histograms(counts),
    }


def nothing_kept(report: Mapping[str, Any], folder: Path, text_key: str) -> str:
    """Return the line of a recipe that kept no document, with flags that may keep some.

    Args:
      report: its report.
      folder: its output folder.
      text_key: the field that it read.
    """
    files = sorted((folder / "broken").glob("*.jsonl"))
    first = next((each for each in _records(files) if each["kind"] == NO_TEXT), None)
    if first is None:
        return "next: fewer or weaker --config.stages and another --out, as no document was kept"
    out = shlex.quote(f"--out={folder}-2")
    return (
        f"next: --config.text_key=FIELD {out}    # no document was kept; "
        f"record {first['record']} of {first['file']} has no {text_key!r}: {first['detail']}"
    )


def _records(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in files:
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def histograms(counts: Counts) -> dict[str, dict[str, dict[str, int]]]:
    """Return documents by measure and bin, kept and removed; bins are in order.

    Languages are in the order of their frequency, and numbers in theirs.
    """
    answer: dict[str, dict[str, dict[str, int]]] = {}
    for key, count in counts.histograms.items():
        measure, outcome, name = key.split(".", 2)
        if count:
            row = answer.setdefault(measure, {}).setdefault(name, {"kept": 0, "removed": 0})
            row[outcome] = count

    def order(item: tuple[str, dict[str, int]]) -> tuple[float, str]:
        name, row = item
        return (-sum(row.values()), name) if name.isalpha() else (float(name), "")

    return {
        measure: dict(sorted(rows.items(), key=order)) for measure, rows in sorted(answer.items())
    }


def funnel(job: Job, counts: Counts) -> list[dict[str, Any]]:
    """Return for each stage: documents in, documents out, and reasons of removal.

    In a sample, `interval` is the 95% interval of the share among all records. The share of
    duplicates has none; it is `at_least` as large among all.
    """
    lost: dict[str, Counter[str]] = {name: Counter() for name in job.recipe.order}
    for reason, count in counts.under("removed"):
        stage, _, rule = reason.partition(".")
        lost[stage][rule or "duplicate"] += count
    for kind, count in counts.under("broken"):
        lost["read"][kind] += count
    rows = []
    left = counts.documents["read"]
    for name, reasons in lost.items():
        gone = sum(reasons.values())
        share = gone / left if left else 0.0
        row: dict[str, Any] = {"stage": name, "in": left, "out": left - gone, "share": share}
        if job.sample < 1 and name in get_args(DedupName):
            row["at_least"] = True  # a duplicate is seen only if both documents are sampled
        elif job.sample < 1:
            row["interval"] = wilson.interval(gone / left if left else 0.0, left)
        rows.append({**row, "reasons": dict(reasons.most_common())})
        left -= gone
    return rows


def _summary(answer: dict[str, Any]) -> str:
    documents, characters = (
        f"{each['kept']:,} of {each['read']:,}" for each in (answer, answer["characters"])
    )
    return f"kept {documents} documents, {characters} characters"


def _shown_share(row: dict[str, Any]) -> str:
    """Format the removed share of a funnel row, with its uncertainty in a sample."""
    share = f"{row['share']:.2%}"
    if "interval" in row:
        low, high = row["interval"]
        share += f" ({low:.1%} to {high:.1%})"
    return f"at least {share}" if "at_least" in row else share


def shown_reasons(row: dict[str, Any], most: int = SHOWN) -> str:
    """Format the most frequent reasons of a funnel row."""
    reasons = [f"{name} {count:,}" for name, count in row["reasons"].items()]
    more = f", {len(reasons) - most} more" if len(reasons) > most else ""
    return ", ".join(reasons[:most]) + more


def _too_short(answer: dict[str, Any]) -> str:
    """Return a sentence on evaluation records that are too short to search for, or ""."""
    sets = answer.get("evaluations")
    if not (sets and sets["too_short"]):
        return ""
    share = f"{sets['too_short']:,} of {sets['records']:,} records of the evaluation sets"
    return f"decontaminate: {share} are shorter than a run of words and were not searched for"


def table(answer: dict[str, Any]) -> str:
    """Format the funnel for the terminal."""
    width = 26 if answer["sample"] < 1 else 10
    lines = [f"{'stage':<14}{'in':>12}{'out':>12}{'removed':>{width}}  why"]
    for row in answer["funnel"]:
        numbers = f"{row['in']:>12,}{row['out']:>12,}{_shown_share(row):>{width}}"
        lines.append(f"{row['stage']:<14}{numbers}  {shown_reasons(row)}".rstrip())
    lines.append(_summary(answer))
    lines += [f"{name}: {_summary(part)}" for name, part in answer.get("parts", {}).items()]
    lines += [f"{count:,} {what}" for what, count in answer["notes"].items()]
    lines += filter(None, [_too_short(answer)])
    if answer["sample"] < 1:
        share = f"a sample of {answer['sample']:.2%} of the records"
        lines.append(f"{share}: duplicates of records outside the sample are not found")
    return "\n".join(lines)


def page(out: Path, answer: dict[str, Any]) -> str:
    """Render the page of a finished folder; equal folders give equal pages."""
    import markupsafe

    samples_of = functools.partial(_samples, out, answer)
    texts = {"note": _too_short(answer), "summary": _summary(answer), "max_reasons": MAX_REASONS}
    texts |= {"style": markupsafe.Markup(STYLE), "contents": markupsafe.Markup(CONTENTS)}
    rendered = template("report.html.jinja", autoescape=True).render(
        answer=answer, samples_of=samples_of, **texts
    )
    return with_contents(rendered)


def template(name: str, *, autoescape: bool, finalize: Any = None) -> "jinja2.Template":
    """Load a template of this package; `finalize` converts every value in its output."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=autoescape,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["n"] = lambda number: f"{number:,}"
    environment.filters["share"] = _shown_share
    environment.filters["shown"] = lambda text: printable(cut(text, MAX_BYTES))
    environment.filters["reasons"] = shown_reasons
    return environment.get_template(name)


def _samples(out: Path, answer: dict[str, Any], folder: str) -> Iterator[dict[str, str | None]]:
    """Yield some documents of a folder, from files far apart."""
    files = [name for name in answer["files"] if name.startswith(f"{folder}/")]
    chosen = files[:: max(1, -(-len(files) // SAMPLES))]
    each = -(-SAMPLES // max(1, len(chosen)))
    for name in chosen:
        with open(out / name, "rb") as file:
            for line in itertools.islice(file, each):
                record = json.loads(line)
                place = f"{record['file']}, record {record['record']}"
                why = [str(record[k]) for k in ("reason", "kind", "detail") if record.get(k)]
                yield {"origin": " · ".join([place, *why]), "text": record.get("text")}
