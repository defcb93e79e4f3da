"""From a recipe to a folder with a clean corpus: each unit cleaned, all compared, each written. Stopped anywhere, it goes on.

OUT/recipe.json                      the recipe, its files, the share that is read
OUT/kept/NNNNN.jsonl                 documents that stay: text, file, record, meta
OUT/removed/STAGE.RULE/NNNNN.jsonl   each other document as it was there, with reason and detail
OUT/cut/NNNNN.jsonl                  what was cut out of documents that stay, and where
OUT/broken/NNNNN.jsonl               where a record could not be read, and why
OUT/clusters.jsonl                   duplicates, and which of each was kept
OUT/signatures/NNNNN.bin             what later runs compare with those that stay
OUT/units/NNNNN.json                 counts of a unit, digests of its files
OUT/report.json                      sums of all; it is there when all is done
OUT/report.html                      the same for people, with samples
OUT/shards/                          token shards of it, where the recipe asks for them: mix/run.py
OUT/unfinished/                      what is between the steps; gone at the end
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxlm.core import disk
from jaxlm.core.errors import InUse, cannot_write
from jaxlm.corpus import earlier, engines, page, stages
from jaxlm.corpus.comparison import compare
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.counts import Counts
from jaxlm.corpus.engines import Each, EngineName
from jaxlm.corpus.files import Written, changed, is_whole
from jaxlm.corpus.filters.perplexity import MakeScorer
from jaxlm.corpus.job import CLUSTERS, PAGE, REPORT, WORK, Job, part_of
from jaxlm.corpus.report import report
from jaxlm.corpus.unit import (
    Half,
    Seconds,
    changed_since,
    cleaned,
    finished,
    output,
    verdict,
)

LOCK = ".lock"
Progress = Callable[
    [str, int, int], None
]  # what, bytes of the files that are done, and of how many


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What `report.json` holds, and what this start of the command took."""

    report: dict[str, Any]
    seconds: float
    stage_seconds: dict[str, float]  # of a core, whatever else it did meanwhile
    bytes: int  # of the files that this start read


def run(
    recipe: Recipe,
    out: Path,
    *,
    workers: int = 1,
    engine: EngineName = "processes",
    sample: float = 1.0,
    scorer: MakeScorer | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda what, done, total: None,
) -> Outcome:
    """Does what a recipe says, or what is left of it to do. `scorer`, a function of a module, opens what the stage perplexity asks.

    Raises:
      JaxlmError: where input or a package is missing, the folder belongs to another recipe or process, or cannot be written.
    """
    begun = time.perf_counter()
    job = dataclasses.replace(Job.find(recipe, out, sample), scorer=scorer)
    stages.build(recipe, scorer)  # what is missing is said before anything is written
    earlier.find(recipe)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with owned(out / LOCK):
            job = job.claim(say)
            left = [n for n in range(len(job.units)) if not finished(job, n).exists()]
            seconds, size = Seconds(float), 0
            if left:
                with engines.opened(engine, workers, say) as each:
                    seconds, size = _do(job, left, each, say, progress)
            answer = _concluded(job)
            shutil.rmtree(out / WORK)
    except OSError as error:
        raise cannot_write(
            "the output folder", error.filename or out, error, fix=f"--out={out}-2"
        ) from error
    return Outcome(answer, time.perf_counter() - begun, dict(seconds), size)


def _do(
    job: Job, left: list[int], each: Each, say: Callable[[str], None], progress: Progress
) -> tuple[Seconds, int]:
    """All steps of the units that are left. Gives the seconds of the stages, and the bytes of the files that were read."""
    sizes = [sum(piece.size for piece in unit) for unit in job.units]
    numbers = range(len(sizes))
    seconds = Seconds(float)
    read = 0
    is_compared = verdict(job, 0).parent.exists()
    _check_times(job, is_compared, say)
    if not is_compared:
        dirty = [number for number in numbers if not cleaned(job, number).exists()]
        if len(dirty) < len(numbers):
            say(f"going on: {len(numbers) - len(dirty)} of {len(numbers)} units are cleaned")
        done = sum(sizes) - sum(sizes[number] for number in dirty)
        for number, spent in each(Half(job.out, "clean", job.scorer), dirty):
            _add(seconds, spent)
            read, done = read + sizes[number], done + sizes[number]
            progress("cleaning", done, sum(sizes))
        begun = time.process_time()
        compare(job)
        seconds["compare"] = time.process_time() - begun
    done = sum(sizes) - sum(sizes[number] for number in left)
    for number, spent in each(Half(job.out, "finish"), left):
        _add(seconds, spent)
        done += sizes[number]
        progress("writing", done, sum(sizes))
    return seconds, read


def _check_times(job: Job, is_compared: bool, say: Callable[[str], None]) -> None:
    """Lets units be cleaned again whose files were written since they were, and says so; once all are compared, that it is too late."""
    for number, pieces in enumerate(job.units):
        if not cleaned(job, number).exists():
            continue
        if not (names := changed_since(job, number, pieces)):
            continue
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        if is_compared:
            say(
                f"{names[0]}{others} was written since it was read, and stays as it was then: all are compared; --out={job.out}-2 reads it again"
            )
        else:
            say(f"{names[0]}{others} was written since it was read: unit {number} is done again")
            shutil.rmtree(cleaned(job, number))


def _add(seconds: Seconds, spent: dict[str, float]) -> None:
    for stage, more in spent.items():
        seconds[stage] += more


def _concluded(job: Job) -> dict[str, Any]:
    """The report: written, or as it was, once every file is found as it was written.

    Raises:
      DataError: where one is not.
    """
    parts: defaultdict[str, Counts] = defaultdict(Counts)
    files: dict[str, dict[str, Any]] = {}
    is_done = (job.out / REPORT).exists()
    for number, pieces in enumerate(job.units):
        unit = json.loads(finished(job, number).read_text(encoding="utf-8"))
        parts[part_of(job.recipe.parts, pieces[0].name)] += Counts.from_json(unit["counts"])
        for name, fields in unit["files"].items():
            path = output(job.out, name, number)
            if is_done and not is_whole(path, Written(**fields)):
                raise changed(path)
            files[path.relative_to(job.out).as_posix()] = fields
    if not is_done:
        found = verdict(job, 0).with_name(CLUSTERS)
        disk.replace(job.out / CLUSTERS, found.read_bytes() if found.exists() else b"")
    answer = report(job, parts, dict(sorted(files.items())))
    disk.replace(job.out / PAGE, page.render(job.out, answer).encode())
    disk.replace(job.out / REPORT, json.dumps(answer, indent=1).encode())
    return answer


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Holds the lock of an output folder; the system lets go of it when the process ends, however that happens.

    Raises:
      InUse: where another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                "another process writes to the output folder",
                where=str(path.parent),
                why="it holds the lock",
                fix=f"--out={path.parent}-2",
            ) from None
        yield
    finally:
        os.close(handle)
