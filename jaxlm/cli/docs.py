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
INDEX = "index"  # the page with a table of all others, in reading order
ROW = re.compile(r"^\| \[.*?\]\((\w+)\.md\) \| (.*?) \|$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(parser, "the manual is the same for every config")
    parser.add_argument("topic", nargs="?", help="page to print (the list of pages)")


def run(args: argparse.Namespace, out: Output) -> int:
    if args.topic is None:
        lines = [*columns(list(contents().items()), "<<"), "", "jaxlm docs TOPIC prints a page"]
        records = [{"topic": topic, "contents": text} for topic, text in contents().items()]
        out.result({"pages": records}, "\n".join(lines))
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
    out.result({"topic": args.topic, "text": text}, text)
    return 0


def topics() -> list[str]:
    """Return the names of the pages, in the order of the index."""
    return list(contents())


def contents() -> dict[str, str]:
    """Return the pages with a line about each, as the table of the index has them."""
    text = page(INDEX).read_text(encoding="utf-8")
    return {INDEX: "the list of the pages"} | dict(ROW.findall(text))


def page(topic: str) -> Path:
    """Return the file of a page."""
    return FOLDER / f"{topic}.md"
