"""C4's rules: cut lines that are no sentences out of a page, then remove pages without prose."""

import re
from collections import Counter

from jaxlm.corpus.document import CorpusDocument, Removed, Stage
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
    """Keep long lines with terminal punctuation; remove pages with few sentences, braces or filler.

    Source: Raffel et al. 2020, JMLR 21(140), §2.2, without its word list. Sentences are counted by
    their ends, in place of NLTK. Rules on policies and citation marks are those of its program,
    which the paper omits.
    """

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        lower = document.text.lower()
        if "lorem ipsum" in lower:
            return Removed("lorem_ipsum", "it contains the phrase")
        if "{" in document.text:
            return Removed("brace", f"at character {document.text.index('{')}")
        lines, cut = [], Counter[str]()
        for line in document.text.split("\n"):
            line = _CITATION.sub("", line.strip())
            if why := _fault(line, config):
                cut[why] += 1
            else:
                lines.append(line)
        text = "\n".join(lines)
        sentences = len(_SENTENCE_END.findall(text))
        if sentences < config.sentences:
            return Removed("sentences", f"{sentences} in the kept lines")
        for why, count in cut.items():
            counts[f"c4: lines {why}"] += count
        return document if text == document.text else document.with_text(text)

    return stage


def _fault(line: str, config: C4) -> str:
    """Return why a line is cut out, or an empty string."""
    if not line.endswith(TERMINAL) or line.endswith("..."):
        return "without terminal punctuation"
    if len(line.split()) < config.line_words:
        return "too short"
    lower = line.lower()
    if "javascript" in lower:
        return "with javascript"
    return "about a policy" if any(policy in lower for policy in POLICIES) else ""
