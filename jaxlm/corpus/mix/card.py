"""The data card of a mix: what it was made of, under which licences, and what was done to it, as Markdown.

Source: Gebru et al. 2021, "Datasheets for Datasets": composition, collection, preprocessing. It holds what was counted, and
says what nobody looked at; who made the texts and who may use them for what, only a person can say.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxlm.corpus.mix.sources import MixSource

SHOWN = 5  # reasons of a stage, files of a source
LANGUAGE, PERSONAL = "language: ", "pii: "


def card(answer: dict[str, Any], sources: Sequence[MixSource]) -> str:
    """The whole card. The same mix gives the same card: it holds no times and no place."""
    parts = ["# Data card", *_sets(answer, sources)]
    for source in sources:
        parts += [f"## {_plain(source.name)}", *_source(source)]
    return "\n\n".join(parts) + "\n"


def _sets(answer: dict[str, Any], sources: Sequence[MixSource]) -> Iterator[str]:
    licences = {source.name: source.licence for source in sources}
    rows = [
        (
            side,
            name,
            licences[name] or "not stated",
            f"{each['documents']:,}",
            f"{each['tokens']:,}",
            f"{each['share']:.1%}",
            f"{each['bytes'] / each['tokens']:.2f}",
        )
        for side, sets in answer["sets"].items()
        for name, each in sets.items()
    ]
    head = "set", "source", "licence", "documents", "tokens", "share", "bytes a token"
    yield _table(head, rows)
    made = answer["tokenizer"]
    yield f"Tokenizer: {made['size']:,} ids, sha256 `{made['sha256']}`. A document's begin and end count as tokens."
    if lost := sum(each["unknown"] for sets in answer["sets"].values() for each in sets.values()):
        yield f"{lost:,} characters have no id and became `<|unk|>`."


def _source(source: MixSource) -> Iterator[str]:
    report, recipe = source.report, source.recipe["recipe"]
    files = [name for name, _ in source.recipe["files"]]
    size = sum(size for _, size in source.recipe["files"])
    more = f" and {len(files) - SHOWN:,} more" if len(files) > SHOWN else ""
    yield f"Licence: {_plain(source.licence or 'not stated')}."
    yield f"Raw: {len(files):,} files, {size:,} bytes: {', '.join(map(_plain, files[:SHOWN]))}{more}."
    kept, read = report["characters"]["kept"], report["characters"]["read"]
    said = (
        f"Cleaned: {report['kept']:,} of {report['read']:,} documents, {kept:,} of {read:,} characters; "
        f"stages {', '.join(recipe['stages']) or 'none'}; duplicates {', '.join(recipe['dedup']) or 'not looked for'}."
    )
    if source.share < 1:
        said += f" A share of {source.share:.2%} of these documents was taken, for the weights."
    yield said
    if report["sample"] < 1:
        yield f"This is a sample of {report['sample']:.2%} of the records: duplicates of what is not in it were not seen."
    rows = []
    for row in report["funnel"]:
        reasons = [f"{name} {count:,}" for name, count in row["reasons"].items()]
        more = f", {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        why = ", ".join(reasons[:SHOWN]) + more
        rows.append((row["stage"], f"{row['in']:,}", f"{row['out']:,}", f"{row['share']:.2%}", why))
    yield _table(("stage", "in", "out", "removed", "why"), rows)
    yield from _counted(report, recipe)


def _counted(report: dict[str, Any], recipe: dict[str, Any]) -> Iterator[str]:
    notes = report["notes"]
    for what, stage, prefix in (
        ("Languages", "language", LANGUAGE),
        ("Personal data", "pii", PERSONAL),
    ):
        found = {
            name.removeprefix(prefix): n for name, n in notes.items() if name.startswith(prefix)
        }
        ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
        listed = ", ".join(f"{_plain(name)} {count:,}" for name, count in ordered)
        removed = report["removed"].items()
        gone = sum(count for reason, count in removed if reason.startswith(f"{stage}."))
        if gone:
            listed = f"{listed or 'none left'}; {gone:,} documents removed"
        yield f"{what}: {listed or 'none found' if stage in recipe['stages'] else 'not looked at'}."
    rest = {n: c for n, c in notes.items() if not n.startswith((LANGUAGE, PERSONAL))}
    if rest:
        yield "\n".join(f"- {_plain(name)}: {count:,}" for name, count in rest.items())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: names of files come from others."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", shown)
