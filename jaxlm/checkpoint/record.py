"""The record that makes a step a checkpoint: what it holds, and a digest of every file.

Orbax finds a damaged index, and restores a flipped bit in an array without a word. So each step carries `digests.json`
with the size and sha256 of its files, and nothing is restored before they are compared. The record is written into the
step's directory before Orbax gives that its final name: a step is committed with its record, or not at all.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from jaxlm.core import disk
from jaxlm.core.errors import DataError

NAME = "digests.json"
FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 20
SELF = '\n "self": "'  # what comes before the record's own digest
THREADS = 4  # hashing lets go of the interpreter's lock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a committed step without reading its arrays.

    Args:
      step: completed updates.
      owner: the process that wrote it, by its fencing id.
      loss_nats: the evaluation loss that ranks steps; None where this step was not evaluated.
      healthy: whether no update was skipped shortly before.
      meta: the caller's JSON: cursor, config, fingerprints.
      files: path below the step's directory -> (bytes, sha256).
    """

    step: int
    owner: str
    loss_nats: float | None
    healthy: bool
    meta: dict[str, Any]
    files: dict[str, tuple[int, str]]
    format_version: int = FORMAT_VERSION

    def text(self) -> str:
        """The file: JSON whose last field hashes all before it, so that the record vouches for itself too."""
        return signed(json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False))


class OtherFormat(DataError):
    """A record that is whole, and of a format that this jaxlm does not read."""


def signed(text: str) -> str:
    """An indented JSON object with one more field, `self`, that hashes all before it. Every format of the record has it."""
    body = text.removesuffix("\n}")
    return f'{body},{SELF}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def write(directory: epath.Path, record: Record) -> None:
    """Writes the record into a step's directory, through to the disk."""
    (directory / NAME).write_text(record.text())
    for path in (directory / NAME, directory):
        disk.sync(path)


def read(directory: epath.Path) -> Record:
    """The record of a step.

    Its own digest is compared before anything in it is believed: one changed bit makes another version of "1".

    Raises:
      OtherFormat: where it is whole, and of another format.
      DataError: where it is missing or damaged.
    """
    try:
        text = (directory / NAME).read_bytes().decode()
        if signed(text.rpartition(f",{SELF}")[0]) != text:
            raise _damaged(directory, f"{NAME} does not match its own digest")
        values = json.loads(text)
        found = values["format_version"]
        if found != FORMAT_VERSION:
            raise OtherFormat(
                f"checkpoint {directory.name} has format {found}",
                where=str(directory),
                why=f"this jaxlm reads format {FORMAT_VERSION}",
                fix="use the jaxlm version in environment.json beside the checkpoints",
            )
        del values["self"]
        files = {path: (size, digest) for path, (size, digest) in values.pop("files").items()}
        return Record(**values, files=files)
    except FileNotFoundError:
        raise _damaged(directory, f"{NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(
            directory, f"{NAME} cannot be read: {type(error).__name__}: {error}"
        ) from error


def digests(directory: epath.Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of each file below a step's directory, the record left out."""
    paths = [path for path in _files(directory) if path.name != NAME]
    return {
        path.relative_to(directory).as_posix(): digest
        for path, digest in zip(paths, of_files(paths), strict=True)
    }


def of_files(paths: Iterable[Any]) -> list[tuple[int, str]]:
    """Size and sha256 of each file, by paths of `pathlib` or `etils.epath`."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_digest, paths))


def problems(directory: epath.Path) -> list[str]:
    """What is wrong with a step, a line each; empty where every byte is as it was written.

    Raises:
      DataError: where the record itself cannot be trusted.
    """
    wanted, found = read(directory).files, digests(directory)
    lines = []
    for path, (size, digest) in wanted.items():
        if path not in found:
            lines.append(f"{path} is missing")
        elif found[path][0] != size:
            lines.append(f"{path} has {found[path][0]} bytes instead of {size}")
        elif found[path][1] != digest:
            lines.append(f"{path} has other contents than were written")
    return lines


def _files(directory: epath.Path) -> Iterator[epath.Path]:
    """The files below a directory. A link is none: what it points to lies elsewhere and may change."""
    for path in sorted(directory.iterdir()):
        if os.path.islink(path):
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _digest(path: epath.Path) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            digest.update(chunk)
    return size, digest.hexdigest()


def _damaged(directory: epath.Path, why: str) -> DataError:
    return DataError(
        f"checkpoint {directory.name} is damaged",
        where=str(directory),
        why=why,
        fix=f"jaxlm checkpoint verify --workdir={directory.parent.parent}",
    )
