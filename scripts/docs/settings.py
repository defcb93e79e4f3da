"""Write the tables of settings into the pages of the manual, from the classes of the settings.

    python scripts/docs/settings.py

A page has a table between the lines `<!-- settings PATH -->` and `<!-- end of settings -->`. PATH
is a section of a run, `mesh`; an arm of a union, `objective:masked`; or `optim`, the settings that
all arms of that union have.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxlm.core import sections
from jaxlm.core.sections import Setting
from jaxlm.recipes.config import Run

PAGES = Path(__file__).parents[2] / "jaxlm/docs"
PLACE = re.compile(r"(<!-- settings (\S+) -->\n)(.*?)(<!-- end of settings -->)", re.DOTALL)
MAX_SHOWN = 60  # characters of a default


def main() -> int:
    """Write all tables."""
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
    return 0


def filled(text: str) -> str:
    """Return a page with its tables of settings as they are now."""
    return PLACE.sub(lambda place: f"{place[1]}\n{table(place[2])}\n\n{place[4]}", text)


def table(path: str) -> str:
    """Return the table of a section: each setting with its type, default and meaning."""
    name, _, arm = path.partition(":")
    known = sections.fields(Run)[name]
    arms = sections.by_name(known.arms)
    rows: Sequence[Setting]
    if arm:
        shared = _shared(list(arms.values()))
        rows = [each for each in sections.fields(arms[arm]).values() if each.name not in shared]
    elif len(arms) == 1:
        rows = list(sections.fields(known.arms[0]).values())
    else:
        rows = list(_shared(list(arms.values())).values())
    tag = sections.tag(known.arms[0]) if len(arms) > 1 else None
    lines = ["| setting | value | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [_row(name, each) for each in rows if each.name != tag]
    return "\n".join(lines)


def _shared(arms: list[type]) -> dict[str, Setting]:
    """Return the settings that every arm has, with the same default."""
    first, *others = (sections.fields(arm) for arm in arms)
    return {name: each for name, each in first.items() if all(each == o.get(name) for o in others)}


def _row(section: str, known: Setting) -> str:
    value = "a section" if known.arms else sections.requirement(known)
    default = "" if known.arms else sections.show(known.default)
    unit = f" ({known.unit})" if known.unit else ""
    cells = (
        f"`{section}.{known.name}`",
        f"{value}{unit}",
        f"`{default}`" if default and len(default) <= MAX_SHOWN else "",
        known.doc,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
