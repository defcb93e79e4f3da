"""C4's rules: what is no sentence is cut out of a page, then pages without prose go."""

import re
from collections import Counter

from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import C4

TERMINAL = ".", "!", "?", '"', "\u201d"
POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*(?=\s|$)")


def c4(config: C4) -> Stage:
    """Lines that end in terminal punctuation and are long enough stay; pages with few sentences, braces or filler go.

    Source: Raffel et al. 2020, JMLR 21(140), §2.2. Its list of words is not here. Sentences are counted by their ends, where
    it has NLTK; the lines about policies and the marks of citations are those of its program, which its text leaves out.
    """

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        lower = document.text.lower()
        if "lorem ipsum" in lower:
            return Removed("lorem_ipsum", "the phrase is there")
        if "{" in document.text:
            return Removed("brace", f"at character {document.text.index('{')}")
        kept, cut = [], Counter[str]()
        for line in document.text.split("\n"):
            line = _CITATION.sub("", line.strip())
            if why := _fault(line, config):
                cut[why] += 1
            else:
                kept.append(line)
        text = "\n".join(kept)
        sentences = len(_SENTENCE_END.findall(text))
        if sentences < config.sentences:
            return Removed("sentences", f"{sentences} in the lines that stay")
        for why, count in cut.items():
            counts[f"c4: lines {why}"] += count
        return document if text == document.text else document.with_text(text)

    return stage


def _fault(line: str, config: C4) -> str:
    """Why a line is cut out; nothing where it stays."""
    if not line.endswith(TERMINAL) or line.endswith("..."):
        return "without terminal punctuation"
    if len(line.split()) < config.line_words:
        return "too short"
    lower = line.lower()
    if "javascript" in lower:
        return "with javascript"
    return "about a policy" if any(policy in lower for policy in POLICIES) else ""
