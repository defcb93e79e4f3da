"""List the pages of the manual, or print one.

jaxlm docs               the pages, with a line about each
jaxlm docs objectives    one page, as Markdown
"""

import argparse
import re
from pathlib import Path

from jaxlm.cli.arguments import withhold
from jaxlm.cli.output import Output, columns
from jaxlm.core.errors import CommandError
from jaxlm.core.nearest import nearest_word

FOLDER = Path(__file__).parents[1] / "docs"
INDEX = "index"  # the page that links all others, in reading order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(parser, "the manual is the same for every config")
    parser.add_argument("topic", nargs="?", help="page to print (the list of pages)")


def run(args: argparse.Namespace, out: Output) -> int:
    if args.topic is None:
        rows = [(topic, _title(topic)) for topic in topics()]
        records = [{"topic": topic, "title": title} for topic, title in rows]
        text = [*columns(rows, "<<"), "", "jaxlm docs TOPIC prints a page"]
        out.result({"pages": records}, "\n".join(text))
        return 0
    if args.topic not in topics():
        meant = nearest_word(args.topic, topics())
        raise CommandError(
            f"the manual has no page {args.topic!r}",
            where=f"jaxlm docs {args.topic}",
            why=f"its pages are {', '.join(topics())}",
            fix=f"jaxlm docs {meant}" if meant else "jaxlm docs",
        )
    text = page(args.topic).read_text(encoding="utf-8").rstrip()
    out.result({"topic": args.topic, "title": _title(args.topic), "text": text}, text)
    return 0


def topics() -> list[str]:
    """Return the names of the pages, in the order of the index."""
    links = re.findall(r"\]\((\w+)\.md\)", page(INDEX).read_text(encoding="utf-8"))
    return [INDEX, *dict.fromkeys(links)]


def page(topic: str) -> Path:
    """Return the file of a page."""
    return FOLDER / f"{topic}.md"


def _title(topic: str) -> str:
    with page(topic).open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()
