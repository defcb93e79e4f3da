"""The sha256 that each file of a model must have: as an export wrote them down, or as a cache of the Hub names its files. Free of JAX.

A file of safetensors holds no digest of its numbers: with a bit of them flipped it is a whole file of another model.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxlm.checkpoint import record
from jaxlm.core.errors import DataError
from jaxlm.monitor import sinks

NAME = "SHA256SUMS"  # in the form of coreutils: `sha256sum -c SHA256SUMS` compares them too
LARGEST = 2**20  # bytes of it that are read; a model of a thousand files has a tenth
SHOWN = 5
_LINE = re.compile(r"^([0-9a-f]{64}) [ *](.+)$", re.MULTILINE)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write(folder: Path) -> None:
    """Writes down the sha256 of every file of a folder, in it. Raises NotWritable."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    lines = (f"{digest}  {path.name}\n" for path, digest in zip(paths, _sha256(paths), strict=True))
    sinks.replace(folder / NAME, "".join(lines).encode())


def compare(files: Sequence[Path]) -> list[str]:
    """Reads every byte of files, and returns the names of those whose sha256 nobody says.

    Raises:
      DataError: where a file has another than was written down, or than a cache of the Hub has it under.
    """
    written = {folder: _written(folder) for folder in {path.parent for path in files}}
    wanted = {
        path: digest
        for path in files
        if (digest := written[path.parent].get(path.name) or _blob(path))
    }
    found = dict(zip(wanted, _sha256(wanted), strict=True))
    if other := [path for path in wanted if found[path] != wanted[path]]:
        first = other[0]
        is_written = first.name in written[first.parent]
        said = NAME if is_written else "its name in the cache of the Hub"
        raise DataError(
            f"{_named(other)} is not what it was",
            where=str(first),
            why=f"its sha256 begins with {found[first][:12]}, and with {wanted[first][:12]} by {said}",
            fix=f"fetch the folder again where it came from\nrm {_quoted(first.parent / NAME)}    # where you changed it yourself"
            if is_written
            else f"rm {_quoted(first.resolve())}    # and import it again by its name, which fetches it anew",
        )
    return [path.name for path in files if path not in wanted]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _named(paths: list[Path]) -> str:
    more = len(paths) - SHOWN
    return ", ".join(path.name for path in paths[:SHOWN]) + (
        f" and {more} more" if more > 0 else ""
    )


def _written(folder: Path) -> dict[str, str]:
    """What was written down beside files, by their names; a line of another form says nothing."""
    path = folder / NAME
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        text = file.read(LARGEST).decode(errors="replace")
    return {name: digest for digest, name in _LINE.findall(text)}


def _blob(path: Path) -> str | None:
    """What a cache of the Hub names a large file by: snapshots/COMMIT/NAME is a link to blobs/SHA256; small ones have a SHA-1."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None


def _sha256(paths: Iterable[Path]) -> list[str]:
    return [digest for _, digest in record.of_files(paths)]
