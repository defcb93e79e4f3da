"""Places that are written, and where they are."""

import os
import re

from jaxlm.core.errors import NotWritable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")  # also of a path, which keeps one of two slashes


def check_local(place: str | os.PathLike[str], flag: str) -> None:
    """Raises NotWritable where a place is named by a URL: as a path, that would be a new folder of this machine."""
    text = os.fspath(place)
    found = _URL.match(text)
    if not found:
        return
    scheme, _, rest = text.partition(":")
    local = rest.strip("/").rpartition("@")[2] or "runs/a"  # without a name and a password
    raise NotWritable(
        f"{scheme}:// is no file system",
        where=f"{flag}={text}",
        why="what is written there is renamed, appended to and locked, which an object store cannot do",
        fix=f"{flag}={local}",
    )
