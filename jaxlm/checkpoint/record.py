"""The commit record of a checkpoint: its metadata, and a digest of every file.

Orbax detects a damaged index, but restores an array with a flipped bit without an error. Each step
therefore carries `digests.json` with the size and sha256 of its files, and nothing is restored
before they are compared. The record is written into the step's directory before Orbax renames the
directory to its final name: a step is committed together with its record or not at all.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from etils import epath

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.objects import ObjectPath
from jaxlm.core import disk, faults
from jaxlm.core.errors import DataError

NAME = "digests.json"
FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 20
SELF = '\n "self": "'  # precedes the record's own digest
THREADS = 4  # hashing releases the GIL
# Names that Orbax gives to one process's arrays (a folder) and to their layout (a file elsewhere).
_OF_PROCESS = re.compile(r"(?:ocdbt\.)?process_(\d+)")

FileDigests = dict[str, tuple[int, str]]  # path below the step's directory -> (bytes, sha256)
Place: TypeAlias = epath.Path | ObjectPath  # of a step
OnBytes = Callable[[int], object]  # called from any thread with the size of each chunk read


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Description of a committed step that can be read without its arrays."""

    step: int  # completed updates
    owner: str  # fencing id of the process that wrote the step
    loss_nats: float | None  # evaluation loss that ranks steps; None without an evaluation
    healthy: bool  # whether no update was skipped shortly before
    meta: dict[str, Any]  # the caller's JSON: cursor, config, fingerprints
    files: FileDigests
    format_version: int = FORMAT_VERSION

    def text(self) -> str:
        """Return the file's JSON; its last field is the hash of everything before."""
        return add_digest(json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False))


class UnsupportedFormat(DataError):
    """Error for an undamaged record whose format this jaxlm does not read."""


def add_digest(text: str) -> str:
    """Append the field `self` to an indented JSON object: the hash of everything before it.

    Every format version of the record has this field.
    """
    body = text.removesuffix("\n}")
    return f'{body},{SELF}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def place(name: str) -> Place:
    """Return the place of a step by its path or URL."""
    return ObjectPath(name) if "://" in name else epath.Path(name)


def write(directory: epath.Path, record: StepRecord) -> None:
    """Write the record into a step's directory and sync it to the disk."""
    (directory / NAME).write_text(record.text())
    disk.sync(directory / NAME)
    disk.sync(directory)


def read(directory: Place) -> StepRecord:
    """Read the record of a step.

    Its own digest is compared first: one flipped bit can turn version "1" into another version.
    Raises UnsupportedFormat if the record is undamaged but has another format; DataError if it is
    missing or damaged.
    """
    try:
        text = (directory / NAME).read_bytes().decode()
        if add_digest(text.rpartition(f",{SELF}")[0]) != text:
            raise damaged(directory, f"{NAME} does not match its own digest")
        values = json.loads(text)
        version = values["format_version"]
        if version != FORMAT_VERSION:
            raise UnsupportedFormat(
                f"checkpoint {directory.name} has format {version}",
                where=str(directory),
                why=f"this jaxlm reads format {FORMAT_VERSION}",
                fix="use the jaxlm version that the run's environment.json names",
            )
        del values["self"]
        files = {path: (size, digest) for path, (size, digest) in values.pop("files").items()}
        return StepRecord(**values, files=files)
    except FileNotFoundError:
        raise damaged(directory, f"{NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{NAME} cannot be read: {type(error).__name__}: {error}"
        raise damaged(directory, why) from error


def digests(
    directory: epath.Path,
    is_wanted: Callable[[str], bool] = lambda path: True,
    moved: OnBytes = lambda size: None,
) -> FileDigests:
    """Return size and sha256 of each wanted file below a step's directory, except the record."""
    paths = [path for path in _paths(directory) if is_wanted(path)]
    hashes = hash_files([directory / path for path in paths], moved)
    return dict(zip(paths, hashes, strict=True))


def merge_digests(
    directory: epath.Path, parts: Sequence[Mapping[str, Sequence[Any]]]
) -> FileDigests:
    """Merge the digests of the processes of a run; each hashed the files that it wrote.

    Nothing is written to the step's directory anymore. Files that belong to no process, such as the
    merged index, are hashed here. Raises RuntimeError if a file of a process was hashed by no
    process or by two, or changed since.
    """
    files: FileDigests = {}
    for part in parts:
        if twice := files.keys() & part.keys():
            raise RuntimeError(f"two processes hashed {min(twice)}")
        files |= {path: (int(size), str(digest)) for path, (size, digest) in part.items()}
    for path, (size, _) in files.items():
        try:  # by name: the listing of a folder on NFS may be half a minute old
            now = (directory / path).stat().length
        except FileNotFoundError:
            raise RuntimeError(f"{path} was hashed and is gone") from None
        if now != size:
            raise RuntimeError(f"{path} had {size} bytes when it was hashed and has {now} now")
    rest = set(_paths(directory)) - files.keys()
    if unhashed := [path for path in sorted(rest) if writer_process(path) is not None]:
        raise RuntimeError(f"no process hashed {unhashed[0]}")
    return files | digests(directory, rest.__contains__)


def writer_process(path: str) -> int | None:
    """Return the index of the process that wrote a file, by its path; None for a shared file."""
    matches = (_OF_PROCESS.fullmatch(part) for part in PurePosixPath(path).parts)
    return next((int(match[1]) for match in matches if match), None)


def divide_files(files: Mapping[str, tuple[int, str]], count: int) -> list[list[str]]:
    """Divide the files of a step between `count` processes, with about equal bytes for each.

    A process gets the files that it wrote if the division stays even: it restores from them on the
    same mesh.
    """
    loads, parts = [0] * count, [[] for _ in range(count)]  # type: list[int], list[list[str]]
    fair = 1.1 * sum(size for size, _ in files.values()) / count
    for path, (size, _) in sorted(files.items(), key=lambda item: (-item[1][0], item[0])):
        process = writer_process(path)
        if process is None or process >= count or loads[process] + size > fair:
            process = loads.index(min(loads))
        loads[process] += size
        parts[process].append(path)
    return parts


def hash_files(paths: Iterable[Any], moved: OnBytes = lambda size: None) -> list[tuple[int, str]]:
    """Return size and sha256 of each file; paths are those of `pathlib` or `etils.epath`."""
    over = threading.Event()  # a signal must not wait until large files are hashed

    def read(size: int) -> None:
        if over.is_set():
            raise InterruptedError
        moved(size)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        try:
            return list(pool.map(lambda path: _digest(path, read), paths))
        finally:
            over.set()


def problems(
    directory: Place, expected: FileDigests, moved: OnBytes = lambda size: None
) -> dict[str, str]:
    """Return the problem of each file of a step that differs from the expected, by path."""
    wrong, same_size = {}, []
    sizes = _sizes(directory, expected)
    for path, (size, _) in expected.items():
        if (now := sizes.get(path)) is None:
            wrong[path] = f"{path} is missing"
        elif now != size:
            wrong[path] = f"{path} has {now} bytes instead of {size}"
        else:
            same_size.append(path)
    hashes = hash_files([directory / path for path in same_size], moved)
    for path, (_, digest) in zip(same_size, hashes, strict=True):
        if digest != expected[path][1]:
            wrong[path] = f"{path} has other contents than were written"
    return wrong


def _sizes(directory: Place, paths: Iterable[str]) -> dict[str, int]:
    """Return the bytes of each file of a step that exists; an object store lists all of them."""
    if isinstance(directory, ObjectPath):
        return directory.sizes()
    return {path: (directory / path).stat().length for path in paths if _is_inside(directory, path)}


def _is_inside(directory: epath.Path, path: str) -> bool:
    """Return True if a record's path names a file below the step's directory, through no link."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or PurePosixPath(path).is_absolute():
        return False
    stems = (directory.joinpath(*parts[:end]) for end in range(1, len(parts) + 1))
    return not any(map(os.path.islink, stems)) and (directory / path).is_file()


def _paths(directory: epath.Path, above: str = "") -> Iterator[str]:
    """Yield the path of each file of a step, except the record and links: targets may change."""
    for path in sorted(directory.iterdir()):
        if os.path.islink(path):
            continue
        if path.is_dir():
            yield from _paths(path, f"{above}{path.name}/")
        elif path.name != NAME:
            yield above + path.name


def _digest(path: Any, moved: OnBytes) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            faults.point("store.read", size=len(chunk))
            size += len(chunk)
            digest.update(chunk)
            moved(len(chunk))
    return size, digest.hexdigest()


def damaged(directory: Place, why: str) -> DataError:
    """Return the error of a step that is not as it was written."""
    fix = f"jaxlm checkpoint list --workdir={shlex.quote(str(directory.parent.parent))}"
    if isinstance(directory, ObjectPath):
        fix = "verify the steps of the run: jaxlm checkpoint verify --workdir=RUN"
    where = str(directory)
    return DataError(f"checkpoint {directory.name} is damaged", where=where, why=why, fix=fix)


def retained_steps(
    records: Sequence[StepRecord], config: CheckpointConfig, *, rewind_steps: int = 0
) -> set[int]:
    """Return the steps to keep.

    These are the newest steps, the best, multiples of `keep_every`, step 0 (it exists if a run
    began with the weights of another, which cannot be recreated), and the targets of a rewind.

    A rewind needs a step from before training went wrong, maybe for longer than one interval
    between saves. Kept for it are the newest healthy step, the newest one at least `rewind_steps`
    steps before that, and the oldest between them, which will be that old when it is needed.
    """
    steps = sorted(record.step for record in records)
    keep = set(steps[-config.keep_last :]) | ({0} & set(steps))
    ranked = sorted((r.loss_nats, r.step) for r in records if r.loss_nats is not None)
    keep |= {step for _, step in ranked[: config.keep_best]}
    if config.keep_every is not None:
        keep |= {step for step in steps if step % config.keep_every == 0}
    healthy = sorted(record.step for record in records if record.healthy)
    far = [step for step in healthy if step <= healthy[-1] - rewind_steps]
    return keep | set(healthy[-1:]) | set(far[-1:]) | set(healthy[len(far) :][:1])
