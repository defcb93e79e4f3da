"""Trains the runs of a sweep: every combination of varied settings, with several seeds."""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from jaxlm.core import config, user_code
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError, Preempted
from jaxlm.core.sections import show
from jaxlm.recipes.compare import summary
from jaxlm.recipes.config import Run
from jaxlm.training import epochs

POLL_SECONDS = 0.1
LONGEST_NAME = 60  # characters of a run directory, without a seed
ENDED = (summary.FINISHED, summary.DIVERGED)  # exit codes of runs that are not started again
SHOWN_LINES = 8  # of the output of a run that failed
Settings = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRun:
    """A run of a sweep: its directory, its own settings, and its resolved config.

    `limited` are the paths of settings that the run may change when it begins.
    """

    path: Path
    settings: Settings
    run: Run
    limited: Sequence[str] = ()


def varied(text: str, file: str, overrides: Settings) -> tuple[str, list[str]]:
    """Return the setting and the values of `A.B=V,V`.

    Commas separate values, or semicolons if a value has commas itself, as that of a list has.

    Raises:
      CommandError: if it has no setting or no values, or if it is one valid value with a comma.
      ConfigError: if a value is wrong.
    """
    path, equals, values = text.partition("=")
    where = f"--vary={text}"
    if not equals or not path or not values:
        raise CommandError(
            "--vary needs a setting and its values",
            where=where,
            why="the values follow the setting, with commas between",
            fix="--vary=optim.lr=1e-3,3e-3",
        )
    if ";" in values:
        return path, [each.strip() for each in values.split(";")]
    if "," in values and _loads(file, [*overrides, (path, values)]):
        raise CommandError(
            f"the values of {path} are ambiguous",
            where=where,
            why=f"{values!r} is one value of the setting, which --config.{path} gives to all runs; "
            "semicolons separate several",
            fix=shlex.quote(f"--vary={path}=" + values.replace(",", ";")),
        )
    return path, [each.strip() for each in values.split(",")]


def _loads(file: str, settings: Settings) -> bool:
    try:
        config.load(Run, file, settings)
    except ConfigError:
        return False
    return True


def _check_axis(
    text: str, axis: tuple[str, list[str]], value: str, base: tuple[str, Settings], shown: str
) -> None:
    """Raise ConfigError, in terms of --vary, if a setting or its value is wrong by itself.

    Args:
      text: value of --vary.
      axis: setting and values of `text`.
      value: the value of a combination that is refused.
      base: the config, and settings of all runs.
      shown: the error of the combination; a problem that it does not have is not reported.
    """
    path, values = axis
    flag = f"--config.{path}={value}"
    error = _error(base, path, value)
    if error is None or error.where != flag or flag not in shown:
        return
    fix = error.fix
    meant = [_meant(base, path, each) for each in values]
    names = {name for name, _ in meant}
    if len(names) == 1 and "" not in names:
        texts = [each for _, each in meant]
        separator = ";" if any("," in each for each in texts) else ","
        fix = shlex.quote(f"--vary={names.pop()}={separator.join(texts)}")
    raise ConfigError(error.what, where=f"--vary={text}", why=error.why, fix=fix)


def _error(base: tuple[str, Settings], path: str, value: str) -> ConfigError | None:
    """Return the error of one more setting, or None; contradictions of settings are none."""
    file, overrides = base
    try:
        config.load(Run, file, [*overrides, (path, value)], is_part=True)
    except ConfigError as error:
        return error
    return None


def _meant(base: tuple[str, Settings], path: str, value: str) -> tuple[str, str]:
    """Return the setting and the value that were probably meant; two empty texts if unknown."""
    error = _error(base, path, value)
    if error is None:
        return path, value
    words = shlex.split(error.fix)
    if len(words) != 1 or not words[0].startswith("--config."):
        return "", ""
    name, _, text = words[0].removeprefix("--config.").partition("=")
    return name, text if _error(base, name, value) else value


def members(
    file: str,
    overrides: Settings,
    vary: Sequence[str],
    seeds: int,
    workdir: Path,
    *,
    has_base: bool = False,
) -> list[SweepRun]:
    """Return the runs of a sweep, with the first seed of all combinations first.

    The directory of a run is named after its own values, so that a sweep of more values keeps the
    runs of the fewer.

    Args:
      file: the config.
      overrides: settings of all runs.
      vary: `A.B=V,V` of each varied setting.
      seeds: number of seeds, from that of the config on.
      workdir: parent directory of the runs.
      has_base: model and data settings that the config leaves out come from --init_from.

    Raises:
      CommandError: if a setting is varied twice.
      ConfigError: if a config of a run is wrong, or a directory contains another run.
      DataError: if a run of the sweep is damaged.
    """
    axes = [varied(text, file, overrides) for text in vary]
    paths = [path for path, _ in axes]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        both = ",".join(value for path, values in axes if path == twice for value in values)
        raise CommandError(
            f"{twice} is varied twice",
            where=" ".join(f"--vary={text}" for text in vary),
            why="each combination has one value of a setting",
            fix=f"jaxlm sweep --help    # one flag has all values: --vary={twice}={both}",
        )
    ends = [path.rpartition(".")[2] for path in paths]
    labels = [path if ends.count(end) > 1 else end for path, end in zip(paths, ends, strict=True)]
    made: dict[Path, SweepRun] = {}
    first = config.load(Run, file, overrides).value.seed
    combinations = list(itertools.product(*(values for _, values in axes)))
    for seed in range(first, first + seeds):
        for combination in combinations:
            settings = list(zip(paths, combination, strict=True))
            if "seed" not in paths:
                settings.append(("seed", str(seed)))
            try:
                loaded = config.load(Run, file, [*overrides, *settings])
            except ConfigError as error:
                for text, axis, value in zip(vary, axes, combination, strict=True):
                    _check_axis(text, axis, value, (file, overrides), str(error))
                raise
            run, limited = loaded.value, epochs.limited_names(loaded)
            flat = config.flatten(run)
            values = [show(flat[path]) for path in paths]
            name = _name(labels, values)
            name = name if "seed" in paths else f"{name},seed={seed}".removeprefix(",")
            if prefix := run.checkpoint.of_run(name):
                settings += prefix
                run = run.changed(dict(prefix))
            made[workdir / name] = SweepRun(
                path=workdir / name, settings=settings, run=run, limited=limited
            )
    for member in made.values():
        check_same(member, workdir, ("model.", "data.") if has_base else ())
    return list(made.values())


def _name(labels: Sequence[str], values: Sequence[str]) -> str:
    """Return a directory name; values with other characters, or long ones, have a digest in it."""
    text = ",".join(f"{label}={value}" for label, value in zip(labels, values, strict=True))
    name = re.sub(r"[^\w.,=+-]+", "_", text)
    if name == text and len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def check_same(member: SweepRun, workdir: Path, ignored: tuple[str, ...] = ()) -> None:
    """Raise ConfigError if the directory of a run contains one with other settings.

    Args:
      member: the run.
      workdir: directory of all runs, which the fix replaces.
      ignored: beginnings of the paths of settings that may differ.

    Raises DataError if the stored config is damaged.
    """
    file = member.path / "config.json"
    if not file.is_file():
        return
    stored = config.load(Run, str(file)).value
    run = member.run.with_compute(stored.precision.compute)  # a run that resumes keeps its dtype
    changes = [
        each
        for each in config.diff(stored, run)
        if each.path not in member.limited
        # Data of a function is compared when the run starts: its result is recorded.
        and (
            each.path not in ("data.train", "data.validation")
            or not any(map(user_code.names_function, each.new))
        )
    ]
    if changes := [each for each in changes if not each.path.startswith(ignored)]:
        raise ConfigError(
            "the folder contains a run with other settings",
            where=str(member.path),
            why="\n".join(map(str, changes[:4])),
            fix=f"--workdir={shlex.quote(f'{workdir}-2')}",
        )


@dataclasses.dataclass
class _Job:
    """A training process, and the file of its output."""

    member: SweepRun
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def last_lines(self) -> list[str]:
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        return text.splitlines()[-SHOWN_LINES:]


def ended(path: Path) -> summary.RunSummary | None:
    """Return the state of a run that finished or diverged; None if it has to be trained."""
    state = summary.summarize(path) if path.exists() else None
    is_ended = state and (state.status == "finished" or state.code == summary.DIVERGED)
    return state if is_ended else None


def train_all(
    runs: Sequence[SweepRun],
    file: str,
    overrides: Settings,
    *,
    flags: Sequence[str] = (),
    parallel: int = 1,
    say: Log = lambda _: None,
) -> dict[str, int]:
    """Train the runs that have not ended, each in a process; return exit codes by directory.

    A run that finished or diverged is not started again; one that was interrupted resumes. A run
    that fails does not end the others.

    Args:
      runs: result of `members`.
      file, overrides: the config, and settings of all runs.
      flags: further flags of `jaxlm train`.
      parallel: processes at a time.
      `say`: receives log lines.

    Raises Preempted on SIGINT or SIGTERM, after the runs have saved their state.
    """
    codes: dict[str, int] = {}
    waiting: list[SweepRun] = []
    for member in runs:
        if state := ended(member.path):
            codes[str(member.path)] = state.code or 0
            say(f"{member.path}: {state.status} at step {state.step}, not started again")
        else:
            waiting.append(member)
    total, jobs = len(waiting), list[_Job]()
    with _stop_requests(jobs) as stops:
        while (waiting and not stops) or jobs:
            while waiting and len(jobs) < parallel and not stops:
                member = waiting.pop(0)
                say(f"run {total - len(waiting)} of {total}: {member.path}")
                jobs.append(_start(member, file, overrides, flags, parallel))
            time.sleep(POLL_SECONDS)
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                codes[str(job.member.path)] = job.process.returncode
                for line in job.last_lines():
                    say(f"  {line}")
                job.output.close()
    if stops:
        raise Preempted(
            "the sweep was interrupted",
            where=str(runs[0].path.parent),
            why=f"{len(waiting) + sum(code != 0 for code in codes.values())} runs did not end; "
            "the state of those that trained is saved",
            fix="run the same command again    # it resumes",
        )
    return codes


def _start(
    member: SweepRun, file: str, overrides: Settings, flags: Sequence[str], parallel: int
) -> _Job:
    settings = [f"--config.{path}={value}" for path, value in (*overrides, *member.settings)]
    words = [f"--config={file}", *settings, f"--workdir={member.path}", "--quiet", *flags]
    environment: dict[str, str] = dict(os.environ)
    if parallel > 1:  # else the first process would reserve the memory of a GPU
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    output = tempfile.TemporaryFile()  # noqa: SIM115  closed when the process has ended
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlm", "train", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process, which forwards it
    )
    return _Job(member, process, output)


@contextlib.contextmanager
def _stop_requests(jobs: list[_Job]) -> Iterator[list[int]]:
    """Forward SIGINT and SIGTERM to the running jobs; yield the signals that arrived.

    If an error ends the sweep, its processes are killed.
    """
    stops: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stops.append(number)
        for job in jobs:
            if job.process.poll() is None:
                job.process.send_signal(number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for job in jobs:
            job.process.kill()
            job.process.wait()
