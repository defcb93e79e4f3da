"""URL blocklists."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from jaxlm.corpus.config import Urls
from jaxlm.corpus.document import CorpusDocument, Removed, Stage
from jaxlm.data.documents import Corpus


def urls(config: Urls) -> Stage:
    """Remove documents whose URL is blocked.

    An entry with a slash is a URL prefix; others are domains, including their subdomains. Raises
    InputMissing if a pattern matches no list.
    """
    domains, starts = set[str](), set[str]()
    for path in Corpus.find(config.blocked, "", "urls.blocked").files:
        for entry in _entries(path):
            if "/" in entry:
                starts.add(entry)
            else:
                domains.add(entry)
    lengths = sorted({len(start) for start in starts})

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        url = document.meta.get(config.key)
        if not isinstance(url, str) or not url:
            return document
        try:
            host = (urlsplit(url).hostname or "").removesuffix(".")
        except ValueError:
            return Removed("malformed", url[:200])
        labels = host.split(".")
        for start in range(len(labels)):
            if (domain := ".".join(labels[start:])) in domains:
                return Removed("domain", domain)
        bare = _bare(url)
        for size in lengths:
            if bare[:size] in starts:
                return Removed("start", bare[:size])
        return document

    return stage


def _entries(path: Path) -> Iterator[str]:
    """Yield the entries of a list: one on a line, without comments after `#`."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if entry := line.partition("#")[0].strip():
            yield _bare(entry)


def _bare(url: str) -> str:
    """Return a URL without scheme and with its host in lower case."""
    rest = url.partition("://")[2] or url
    host, slash, path = rest.partition("/")
    return host.lower() + slash + path
