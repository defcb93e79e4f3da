"""List the pages of the manual, or print one.

jaxlm docs               the pages, with a line about each
jaxlm docs objectives    one page, as Markdown
"""

import re
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser
from jaxlm.cli.output import Output, columns
from jaxlm.core.errors import CommandError
from jaxlm.core.nearest import nearest_word

FOLDER = Path(__file__).parents[1] / "docs"
INDEX = "index"  # the page with a table of all others, in reading order
ROW = re.compile(r"^\| \[.*?\]\((\w+)\.md\) \| (.*?) \|$", re.MULTILINE)


def add_arguments(parser: Parser) -> None:
    parser.withhold("the manual is the same for every config")
    parser.add_argument("topic", nargs="?", help="page to print (the list of pages)")


def run(args: Any, out: Output) -> int:
    if args.topic is None:
        lines = [*columns(list(contents().items()), "<<"), "", "jaxlm docs TOPIC prints a page"]
        records = [{"topic": topic, "contents": text} for topic, text in contents().items()]
        return out.result({"pages": records}, lines)
    if args.topic not in topics():
        what, where = f"the manual has no page {args.topic!r}", f"jaxlm docs {args.topic}"
        why = f"its pages are {', '.join(topics())}"
        fix = f"jaxlm docs {nearest_word(args.topic, topics()) or ''}".rstrip()
        raise CommandError(what, where=where, why=why, fix=fix)
    text = page(args.topic).read_text(encoding="utf-8").rstrip()
    return out.result({"topic": args.topic, "text": text}, text)


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
