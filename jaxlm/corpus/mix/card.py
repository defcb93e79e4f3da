"""The data card of a mix, as Markdown: its sources, their licenses, and how they were cleaned.

It contains counts only, and names what was not examined; authorship and permitted use cannot be
computed. Source: Gebru et al. 2021, "Datasheets for Datasets": composition, collection,
preprocessing.
"""

import re
from collections.abc import Sequence
from typing import Any

from jaxlm.corpus.mix.sources import MixSource
from jaxlm.corpus.report import template


def card(answer: dict[str, Any], sources: Sequence[MixSource]) -> str:
    """Render the card; it contains no times and no paths, so equal mixes give equal cards."""
    return template("mix/card.md.jinja", autoescape=False, finalize=_escaped).render(
        answer=answer,
        counted=_counted,
        licences={source.name: source.licence for source in sources},
        sources=sources,
        unknown=sum(each["unknown"] for sets in answer["sets"].values() for each in sets.values()),
    )


def _counted(source: MixSource, stage: str, prefix: str) -> str:
    """List the counts of a stage, the most frequent first, or report that it was not run."""
    if stage not in source.recipe["recipe"]["stages"]:
        return "not looked at"
    notes = source.report["notes"].items()
    counts = [(name.removeprefix(prefix), n) for name, n in notes if name.startswith(prefix)]
    counts.sort(key=lambda pair: (-pair[1], pair[0]))
    listed = ", ".join(f"{name} {count:,}" for name, count in counts)
    removed = source.report["removed"].items()
    if gone := sum(count for reason, count in removed if reason.startswith(f"{stage}.")):
        return f"{listed or 'none left'}; {gone:,} documents removed"
    return listed or "none found"


def _escaped(value: Any) -> str:
    """Escape a value for Markdown: names of files are arbitrary."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in str(value))
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", shown)
