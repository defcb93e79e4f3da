"""SHA-256 digests of a model's files, as an export or the Hugging Face cache recorded them.

A safetensors file holds no digest of its numbers: with one bit flipped it is a valid file of
another model. Free of JAX.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxlm.checkpoint import record
from jaxlm.core.errors import DataError
from jaxlm.monitor import sinks

NAME = "SHA256SUMS"  # in the format of coreutils: `sha256sum -c SHA256SUMS` compares them too
MAX_BYTES = 2**20  # bytes read of it; a model of a thousand files has a tenth
SHOWN = 5
_LINE = re.compile(r"^([0-9a-f]{64}) [ *](.+)$", re.MULTILINE)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write(folder: Path) -> None:
    """Write the sha256 of every file of a folder into its SHA256SUMS. Raises NotWritable."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    lines = (f"{digest}  {path.name}\n" for path, digest in zip(paths, _sha256(paths), strict=True))
    sinks.replace(folder / NAME, "".join(lines).encode())


def compare(files: Sequence[Path]) -> list[str]:
    """Read every byte of files, and return the names of those without a recorded sha256.

    Raises DataError if the sha256 of a file differs from SHA256SUMS or from its name in the cache.
    """
    written = {folder: _written(folder) for folder in {path.parent for path in files}}
    expected = {
        path: digest
        for path in files
        if (digest := written[path.parent].get(path.name) or _blob(path))
    }
    actual = dict(zip(expected, _sha256(expected), strict=True))
    if other := [path for path in expected if actual[path] != expected[path]]:
        first = other[0]
        is_written = first.name in written[first.parent]
        source = NAME if is_written else "the file's name in the Hugging Face cache"
        names = ", ".join(path.name for path in other[:SHOWN])
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        listing, cached = (
            shlex.quote(str(path)) for path in (first.parent / NAME, first.resolve())
        )
        raise DataError(
            f"{names}{more} changed since the digest was recorded",
            where=str(first),
            why=f"its sha256 begins with {actual[first][:12]}; {source} has {expected[first][:12]}",
            fix="fetch the folder again from its origin\n"
            f"rm {listing}    # if you changed the file yourself"
            if is_written
            else f"rm {cached}    # then import again by name to download it",
        )
    return [path.name for path in files if path not in expected]


def _written(folder: Path) -> dict[str, str]:
    """Return the digests of a folder's SHA256SUMS by file name; malformed lines are ignored."""
    path = folder / NAME
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        text = file.read(MAX_BYTES).decode(errors="replace")
    return {name: digest for digest, name in _LINE.findall(text)}


def _blob(path: Path) -> str | None:
    """Return the sha256 by which the Hugging Face cache names a large file; else None.

    snapshots/COMMIT/NAME is a link to blobs/SHA256; small files have a SHA-1.
    """
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None


def _sha256(paths: Iterable[Path]) -> list[str]:
    return [digest for _, digest in record.hash_files(paths)]
