"""From a recipe to a folder with a clean corpus: clean each unit, compare all, write each.

A run that was stopped anywhere continues with the same command.

OUT/recipe.json                      the recipe, its files, the share of records that is read
OUT/kept/NNNNN.jsonl                 kept documents: text, file, record, meta
OUT/removed/STAGE.RULE/NNNNN.jsonl   removed documents, unchanged, with reason and detail
OUT/cut/NNNNN.jsonl                  passages cut out of kept documents, with their positions
OUT/broken/NNNNN.jsonl               records that could not be read, and why
OUT/clusters.jsonl                   duplicates, and which of each cluster was kept
OUT/signatures/NNNNN.bin             signatures of kept documents, for later runs
OUT/units/NNNNN.json                 counts of a unit, digests of its files
OUT/report.json                      totals; written last, so its presence means finished
OUT/report.html                      the same for people, with samples
OUT/shards/                          token shards, if the recipe requests them: mix/run.py
OUT/.times.json                      modification times of the files that were read
OUT/unfinished/                      intermediate files; deleted at the end

Example:
  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     _ = Path(folder, "a.txt").write_text("A sentence. " * 20)
  ...     run(Recipe(source=(f"{folder}/a.txt",)), Path(folder, "out")).report["kept"]
  1
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core import disk
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import FREE_SPACE, FULL, InUse, cannot_write
from jaxlm.corpus import engines, stages
from jaxlm.corpus.comparison import compare, find_earlier
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import Counts
from jaxlm.corpus.engines import EngineName, RunUnits
from jaxlm.corpus.files import FileDigest, changed, is_whole
from jaxlm.corpus.filters.models import MakeScorer
from jaxlm.corpus.job import CLUSTERS, PAGE, REPORT, WORK, Job, part_of
from jaxlm.corpus.report import page, report
from jaxlm.corpus.unit import (
    CleaningTask,
    changed_since,
    changed_since_the_end,
    cleaned,
    finished,
    keep_times,
    output,
    verdict,
)

LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Contents of `report.json`, and the cost of this start of the command."""

    report: dict[str, Any]
    seconds: float
    stage_seconds: dict[str, float]  # CPU seconds
    bytes: int  # of the files that this start read


def run(
    recipe: Recipe,
    out: Path,
    *,
    workers: int = 1,
    engine: EngineName = "processes",
    sample: float = 1.0,
    scorer: MakeScorer | None = None,
    log: Log = lambda _: None,
    progress: OnProgress = lambda what, done, total: None,
) -> Outcome:
    """Run a recipe, or the unfinished part of it.

    Args:
      recipe: the settings.
      out: the output folder.
      workers: the number of units that run at a time.
      engine: the engine that runs them.
      sample: the share of the records to read.
      scorer: opens the model of the stage perplexity; a function of a module, as it is pickled.
      log: prints a line.
      progress: shows the progress of a step.

    Raises JaxlmError if input or a package is missing, or if the folder belongs to another recipe
    or process or cannot be written.
    """
    begun = time.perf_counter()
    job = dataclasses.replace(Job.find(recipe, out, sample), scorer=scorer)
    stages.build(recipe, scorer)  # reports missing packages and files before anything is written
    find_earlier(recipe)
    with output_folder(out):
        job = job.claim(log)
        left = [n for n in range(len(job.units)) if not finished(job, n).exists()]
        seconds, size = dict[str, float](), 0
        if left:
            with engines.opened(engine, workers, log, progress) as run_units:
                seconds, size = _do(job, left, run_units, log)
        answer = _concluded(job, log)
        disk.remove_partial(out)
        shutil.rmtree(out / WORK)
    return Outcome(answer, time.perf_counter() - begun, seconds, size)


def _do(job: Job, left: list[int], run_units: RunUnits, log: Log) -> tuple[dict[str, float], int]:
    """Run all steps of the unfinished units; return seconds by stage and the bytes read."""
    sizes = [sum(piece.size for piece in unit) for unit in job.units]
    seconds, dirty = dict[str, float](), list[int]()
    is_compared = verdict(job, 0).parent.exists()
    _drop_stale_units(job, is_compared, log)
    if not is_compared:
        dirty = [number for number in range(len(sizes)) if not cleaned(job, number).exists()]
        if len(dirty) < len(sizes):
            log(f"resuming: {len(sizes) - len(dirty)} of {len(sizes)} units are cleaned")
        seconds |= run_units(CleaningTask(job.out, "clean", job.scorer), dirty, sizes, "cleaning")
        begun = time.process_time()
        compare(job)
        seconds["compare"] = time.process_time() - begun
    seconds |= run_units(CleaningTask(job.out, "finish"), left, sizes, "writing")
    return seconds, sum(sizes[number] for number in dirty)


def _drop_stale_units(job: Job, is_compared: bool, log: Log) -> None:
    """Discard cleaned units whose files changed since; warn if it is too late, after comparing."""
    for number, pieces in enumerate(job.units):
        if not (cleaned(job, number).exists() and (names := changed_since(job, number, pieces))):
            continue
        if is_compared:
            log(_kept_contents(job, names))
        else:
            log(f"{_changed(names)}: unit {number} is cleaned again")
            shutil.rmtree(cleaned(job, number))


def _kept_contents(job: Job, names: Sequence[str]) -> str:
    """Return the line about files that are not read again."""
    why = "its old contents are kept, because all units are compared"
    return f"{_changed(names)}; {why}. --out={job.out}-2 reads it again"


def _changed(names: Sequence[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{others} changed after it was read"


def _concluded(job: Job, log: Log) -> dict[str, Any]:
    """Write the report, or verify every file of a finished run; return the report."""
    parts: defaultdict[str, Counts] = defaultdict(Counts)
    files: dict[str, dict[str, Any]] = {}
    is_done = (job.out / REPORT).exists()
    for number, pieces in enumerate(job.units):
        unit = json.loads(finished(job, number).read_text(encoding="utf-8"))
        parts[part_of(job.recipe.parts, pieces[0].name)] += Counts.from_json(unit["counts"])
        for name, fields in unit["files"].items():
            path = output(job.out, name, number)
            if is_done and not is_whole(path, FileDigest(**fields)):
                raise changed(path)
            files[path.relative_to(job.out).as_posix()] = fields
    if is_done:
        if names := changed_since_the_end(job):
            log(_kept_contents(job, names))
    else:
        keep_times(job)
        clusters = verdict(job, 0).with_name(CLUSTERS)
        disk.replace(job.out / CLUSTERS, clusters.read_bytes() if clusters.exists() else b"")
    answer = report(job, parts, dict(sorted(files.items())))
    disk.replace(job.out / PAGE, page(job.out, answer).encode())
    disk.replace(job.out / REPORT, json.dumps(answer, indent=1).encode())
    return answer


@contextlib.contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Create and lock an output folder; the system releases the lock when the process ends.

    Raises InUse if another process holds the lock, NotWritable if the folder cannot be written.
    """
    another = f"{out}-2" if os.access(out.parent, os.W_OK) else f"{out.name}-2"
    fix = shlex.quote(f"--out={another}")
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(out / LOCK, "ab"))
        except OSError as error:
            place = error.filename or out
            raise cannot_write("the output folder", place, error, fix=fix) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what, why = "another process is writing to the output folder", "it holds the lock"
            raise InUse(what, where=str(out), why=why, fix=fix) from None
        try:
            yield
        except OSError as error:
            place = error.filename or out
            if not Path(place).is_relative_to(out):  # such as a source
                raise
            if error.errno in FULL:
                fix = FREE_SPACE
            raise cannot_write("the output folder", place, error, fix=fix) from error
