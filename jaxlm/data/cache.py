"""Where tokenizers, shards and plans that a run makes are kept, named by what they are made from."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jaxlm.core.errors import NotWritable


def default() -> Path:
    """JAXLM_CACHE, or jaxlm in the user's cache folder."""
    if named := os.environ.get("JAXLM_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlm"


def folder(root: Path, kind: str, /, **inputs: Any) -> Path:
    """The folder for something made from `inputs`; its parent exists and is private.

    Raises:
      NotWritable: where it cannot be made.
    """
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
    parent = root / kind
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        parent.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise NotWritable("the cache folder cannot be written", where=str(parent), why=str(error), fix="JAXLM_CACHE=/a/writable/folder jaxlm ...") from error
    return parent / key


def write_file(path: Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
