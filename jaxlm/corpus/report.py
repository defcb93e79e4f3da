"""What a recipe did: the funnel of its stages, as data and as a table."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from jaxlm.corpus.config import DedupName
from jaxlm.corpus.counts import Counts
from jaxlm.corpus.dedup.minhash import recall
from jaxlm.corpus.filters.decontaminate import evaluations
from jaxlm.corpus.job import FORMAT_VERSION, Job, part_of

SHOWN = 3  # reasons of a stage in the table
SIMILARITIES = 0.7, 0.75, 0.8, 0.85, 0.9


def report(
    job: Job, parts: Mapping[str, Counts], files: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Everything that was counted. The same input gives the same report: it holds no times and no places of this machine."""
    counts = Counts()
    for each in parts.values():
        counts += each
    counts.check("all units")
    answer: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "sample": job.sample,
        **_sums(job, counts),
        "files": files,
    }
    if job.recipe.parts:
        of_units = [part_of(job.recipe.parts, unit[0].name) for unit in job.units]
        answer["parts"] = {
            name: _sums(job, parts[name])
            | {"units": [number for number, part in enumerate(of_units) if part == name]}
            for name in job.recipe.part_names
        }
    if "decontaminate" in job.recipe.stages:
        sets = evaluations(job.recipe)
        answer["evaluations"] = {"records": sets.records, "too_short": sets.short}
    if "near" in job.recipe.dedup:
        answer["near_recall_at_least"] = {
            f"{s:g}": round(recall(s, job.recipe.near), 4) for s in SIMILARITIES
        }
    return answer


def _sums(job: Job, counts: Counts) -> dict[str, Any]:
    return {
        **{name: counts.documents[name] for name in ("read", "kept")},
        "removed": dict(counts.under("removed")),
        "broken": dict(counts.under("broken")),
        "characters": {name: counts.characters[name] for name in ("read", "kept")},
        "funnel": funnel(job, counts),
        "notes": dict(sorted(counts.notes.items())),
    }


def funnel(job: Job, counts: Counts) -> list[dict[str, Any]]:
    """For each stage: documents that came, that went on, and why the others did not.

    Of a sample, `interval` is where the share of all lies with 95%; the share of duplicates is `at_least` as large in all.
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
            row["at_least"] = True  # a duplicate is seen where both are in the sample
        elif job.sample < 1:
            row["interval"] = interval(gone, left)
        rows.append({**row, "reasons": dict(reasons.most_common())})
        left -= gone
    return rows


def not_looked_for(answer: dict[str, Any]) -> str:
    """What of the evaluation sets is too short to be found in documents; nothing where all of it is long enough."""
    sets = answer.get("evaluations")
    if not (sets and sets["too_short"]):
        return ""
    return (
        f"decontaminate: {sets['too_short']:,} of {sets['records']:,} records of the evaluation sets are shorter than a run of "
        "words, and were not looked for"
    )


def interval(found: int, of: int) -> tuple[float, float]:
    """The 95% interval of a share: (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n) with z = 1.96.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference". It holds where nothing was found.
    """
    if not of:
        return 0.0, 1.0
    share, z = found / of, 1.96
    middle = share + z**2 / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z**2 / (4 * of**2))
    scale = 1 + z**2 / of
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def shown_share(row: dict[str, Any]) -> str:
    """What a row of the funnel removes, and how sure that is of a sample."""
    share = f"{row['share']:.2%}"
    if "interval" in row:
        low, high = row["interval"]
        share += f" ({low:.1%} to {high:.1%})"
    return f"at least {share}" if "at_least" in row else share


def table(answer: dict[str, Any]) -> str:
    """The funnel for people."""
    is_sample = answer["sample"] < 1
    lines = [f"{'stage':<14}{'in':>12}{'out':>12}{'removed':>{26 if is_sample else 10}}  why"]
    for row in answer["funnel"]:
        reasons = [f"{name} {count:,}" for name, count in row["reasons"].items()]
        more = f", {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        lines.append(
            f"{row['stage']:<14}{row['in']:>12,}{row['out']:>12,}{shown_share(row):>{26 if is_sample else 10}}  "
            f"{', '.join(reasons[:SHOWN])}{more}".rstrip()
        )
    kept, read = answer["characters"]["kept"], answer["characters"]["read"]
    lines.append(
        f"kept {answer['kept']:,} of {answer['read']:,} documents, {kept:,} of {read:,} characters"
    )
    for name, part in answer.get("parts", {}).items():
        kept, read = part["characters"]["kept"], part["characters"]["read"]
        lines.append(
            f"{name}: kept {part['kept']:,} of {part['read']:,} documents, {kept:,} of {read:,} characters"
        )
    lines += [f"{count:,} {what}" for what, count in answer["notes"].items()]
    if said := not_looked_for(answer):
        lines.append(said)
    if is_sample:
        lines.append(
            f"a sample of {answer['sample']:.2%} of the records: duplicates of what is not in it are not seen"
        )
    return "\n".join(lines)
