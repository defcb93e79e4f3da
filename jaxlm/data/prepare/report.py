"""What a recipe did: the funnel of its stages, as data and as a table."""

import math
from collections import Counter
from typing import Any

from jaxlm.data.prepare.counts import Counts
from jaxlm.data.prepare.dedup.minhash import recall
from jaxlm.data.prepare.job import FORMAT_VERSION, Job

SHOWN = 3  # reasons of a stage in the table
SIMILARITIES = 0.7, 0.75, 0.8, 0.85, 0.9


def report(job: Job, counts: Counts, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Everything that was counted. The same input gives the same report: it holds no times and no places of this machine."""
    counts.check("all units")
    answer: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "sample": job.sample,
        **{name: counts.documents[name] for name in ("read", "kept")},
        "removed": dict(counts.under("removed")),
        "broken": dict(counts.under("broken")),
        "characters": {name: counts.characters[name] for name in ("read", "kept")},
        "funnel": funnel(job, counts),
        "notes": dict(sorted(counts.notes.items())),
        "files": files,
    }
    if "near" in job.recipe.dedup:
        answer["near_recall_at_least"] = {
            f"{s:g}": round(recall(s, job.recipe.near), 4) for s in SIMILARITIES
        }
    return answer


def funnel(job: Job, counts: Counts) -> list[dict[str, Any]]:
    """For each stage: documents that came, that went on, and why the others did not.

    Of a sample, `error` is half the width of the 95% interval of the share: 1.96 sqrt(p (1 - p) / n), Wald's.
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
        if job.sample < 1:
            row["error"] = 1.96 * math.sqrt(share * (1 - share) / left) if left else 0.0
        rows.append({**row, "reasons": dict(reasons.most_common())})
        left -= gone
    return rows


def table(answer: dict[str, Any]) -> str:
    """The funnel for people."""
    is_sample = answer["sample"] < 1
    lines = [f"{'stage':<14}{'in':>12}{'out':>12}{'removed':>{18 if is_sample else 10}}  why"]
    for row in answer["funnel"]:
        reasons = [f"{name} {count:,}" for name, count in row["reasons"].items()]
        more = f", {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        share = f"{row['share']:.2%}" + (f" ± {row['error']:.2%}" if is_sample else "")
        lines.append(
            f"{row['stage']:<14}{row['in']:>12,}{row['out']:>12,}{share:>{18 if is_sample else 10}}  "
            f"{', '.join(reasons[:SHOWN])}{more}".rstrip()
        )
    kept, read = answer["characters"]["kept"], answer["characters"]["read"]
    lines.append(
        f"kept {answer['kept']:,} of {answer['read']:,} documents, {kept:,} of {read:,} characters"
    )
    lines += [f"{count:,} {what}" for what, count in answer["notes"].items()]
    if is_sample:
        lines.append(
            f"a sample of {answer['sample']:.2%} of the records: duplicates of what is not in it are not seen"
        )
    return "\n".join(lines)
