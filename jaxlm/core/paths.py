"""Check of output paths."""

import os
import re

from jaxlm.core.errors import NotWritable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")  # pathlib keeps one of two slashes


def check_local(place: str | os.PathLike[str], flag: str) -> None:
    """Raise NotWritable if an output path is a URL, which would become a local folder."""
    text = os.fspath(place)
    url = _URL.match(text)
    if not url:
        return
    scheme, _, rest = text.partition(":")
    local = rest.strip("/").rpartition("@")[2] or "runs/a"  # without user name and password
    raise NotWritable(
        f"{scheme}:// is not a local file system",
        where=f"{flag}={text}",
        why="output files are renamed, appended to and locked, which an object store cannot do",
        fix=f"{flag}={local}",
    )
