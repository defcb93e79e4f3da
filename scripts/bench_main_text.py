r"""Text that our reader keeps of HTML pages with known main text, against trafilatura.

    pip install trafilatura lxml
    python scripts/bench_main_text.py 'python3.11-doc/**/*.html' \
        --main='//div[@role="main"]' --without='//a[@class="headerlink"]'

Precision and recall of words. Pages of a documentation tool mark their text and its surroundings:
`--main` finds the text in a page with XPath, `--without` the parts of it that are no text. The
extractors ignore such marks; pages of fewer than 100 words are left out.
"""

import argparse
import glob
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import trafilatura
from lxml import html

from jaxlm.corpus.readers.main_text import main_text

LEAST_WORDS, LARGEST = 100, 400_000
ARMS: dict[str, Callable[[str], str]] = {
    "jaxlm": lambda page: main_text(page, Counter())[1],
    "trafilatura": lambda page: trafilatura.extract(page, include_comments=False) or "",
    "trafilatura, favor_recall": lambda page: (
        trafilatura.extract(page, include_comments=False, favor_recall=True) or ""
    ),
    "all text": lambda page: " ".join(html.document_fromstring(page.encode()).itertext()),
}


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


def known(page: str, main: str, without: str) -> str:
    """The text that the markup calls the page's own; nothing where it does not."""
    tree = html.document_fromstring(page.encode())
    for element in tree.xpath("//script | //style" + (f" | {without}" if without else "")):
        element.drop_tree()
    return " ".join(" ".join(element.itertext()) for element in tree.xpath(main)[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages")
    parser.add_argument("--main", required=True)
    parser.add_argument("--without", default="")
    parser.add_argument("--count", type=int, default=150)
    args = parser.parse_args()
    paths = sorted(glob.glob(args.pages, recursive=True))
    random.Random(0).shuffle(paths)
    sums = {name: Counter[str]() for name in ARMS}
    seconds = dict.fromkeys(ARMS, 0.0)
    count = size = 0
    for path in paths:
        page = Path(path).read_text(errors="replace")
        gold = words(known(page, args.main, args.without)) if len(page) < LARGEST else Counter()
        if gold.total() < LEAST_WORDS:
            continue
        count, size = count + 1, size + len(page)
        for name, extract in ARMS.items():
            begun = time.process_time()
            extracted = words(extract(page))
            seconds[name] += time.process_time() - begun
            sums[name] += Counter(
                both=(extracted & gold).total(), found=extracted.total(), gold=gold.total()
            )
        if count == args.count:
            break
    print(f"{count} pages; precision, recall, F1, MB/s of one core")
    for name, each in sums.items():
        precision, recall = each["both"] / each["found"], each["both"] / each["gold"]
        f1 = 2 * precision * recall / (precision + recall)
        print(f"{name:<28}{precision:6.3f}{recall:7.3f}{f1:7.3f}{size / 1e6 / seconds[name]:7.1f}")


if __name__ == "__main__":
    main()
