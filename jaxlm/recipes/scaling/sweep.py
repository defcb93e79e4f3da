"""Train a ladder of small runs of one config for a scaling law: several widths and step counts."""

import math
from collections.abc import Sequence
from pathlib import Path

from jaxlm.core import config
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.optim.schedule_config import spans
from jaxlm.recipes.compare.sweep import Settings, SweepRun, check_same, train_all
from jaxlm.recipes.config import Run
from jaxlm.recipes.scaling import resize_model
from jaxlm.recipes.scaling.loss_law import MIN_RUNS, MIN_SIZES
from jaxlm.training import epochs

WIDTHS = (0.25, 0.5, 0.75, 1.0)  # of the config's width
STEPS = (0.25, 0.5, 1.0)


def sweep(
    file: str,
    overrides: Settings,
    workdir: Path,
    *,
    widths: str | None = None,
    steps: str | None = None,
    parallel: int = 1,
    say: Log = lambda _: None,
) -> dict[str, int]:
    """Train each rung, the cheapest first, in `workdir`/NAME; return exit codes by directory.

    Complete rungs are skipped and interrupted ones resume, as `jaxlm sweep` does. Each run has its
    own schedule, which ends with it: losses in the middle of a longer run would be higher, as its
    learning rate has not decayed yet.

    Args:
      file: the config.
      overrides: settings for all rungs.
      workdir: parent directory of the runs.
      widths: widths with commas between; None for shares of the config's width.
      steps: step counts with commas between; None for shares of the config's steps.
      parallel: runs at a time.
      `say`: receives log lines.

    Raises:
      CommandError: if the ladder is too short for a law.
      ConfigError: if a config of a rung is wrong, or a directory contains another run.
      Preempted: on SIGINT or SIGTERM, after the runs have saved their state.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.1 and appendix B.
    """
    base: Run = config.load(Run, file, overrides).value
    members = []
    for name, changed in rungs(base, widths, steps).items():
        settings = [*changed, *base.checkpoint.of_run(name)]
        loaded = config.load(Run, file, [*overrides, *settings])
        limited = epochs.limited_names(loaded)
        members.append(
            SweepRun(path=workdir / name, settings=settings, run=loaded.value, limited=limited)
        )
    for member in members:
        check_same(member, workdir)
    return train_all(members, file, overrides, parallel=parallel, say=say)


def rungs(run: Run, widths: str | None = None, steps: str | None = None) -> dict[str, Settings]:
    """Return the settings of the runs of a ladder by name: each width with each number of steps.

    The default is a quarter, half, three quarters and all of the config's width, and a quarter,
    half and all of its steps: together less than three times the cost of the config's own run. The
    cheapest run is the first.
    """
    if not run.data.validation:
        what, why = "a law needs a validation set", "a law is fitted to the validation loss"
        fix = "--config.data.validation=5%"
        raise ConfigError(what, where="data.validation", why=why, fix=fix)
    unit, full = resize_model.UNIT, run.model.width
    sizes = _numbers(widths, "--widths", [max(unit, round(s * full / unit) * unit) for s in WIDTHS])
    counts = _numbers(steps, "--steps", [max(1, round(s * run.train.steps)) for s in STEPS])
    if wrong := [size for size in sizes if size % unit]:
        what = f"the width {wrong[0]} is not a multiple of {unit}"
        where, why = f"--widths={widths}", f"widths are multiples of {unit}"
        fix = "--widths=" + ",".join(str(math.ceil(size / unit) * unit) for size in sizes)
        raise CommandError(what, where=where, why=why, fix=fix)
    fewest = MIN_RUNS + 1  # one is predicted from the others
    if len(sizes) < MIN_SIZES or len(sizes) * len(counts) < fewest:
        widest = max(sizes)
        wide = sorted({max(unit, widest * part // 4 // unit * unit) for part in (1, 2, 3, 4)})
        wide = wide if len(wide) >= MIN_SIZES else [unit, 2 * unit, 3 * unit]
        what = f"{len(sizes)} widths times {len(counts)} step counts are too few runs for a law"
        where = f"--widths={','.join(map(str, sizes))} --steps={','.join(map(str, counts))}"
        why = f"a law needs {fewest} runs of {MIN_SIZES} widths: five constants, a run to predict"
        fix = f"--widths={','.join(map(str, wide))} --steps={max(counts) * 2},{max(counts)}"
        raise CommandError(what, where=where, why=why, fix=fix)
    whole, ladder = _complete_schedule(run), {}
    pairs = sorted(((s, n) for s in sizes for n in counts), key=lambda pair: pair[0] ** 2 * pair[1])
    for size, count in pairs:
        resized = resize_model.settings_at_width(run, size) | {"train.steps": count}
        settings = [(path, str(value)) for path, value in resized.items()]
        ladder[f"w{size}-s{count}"] = [*settings, *whole]
    return ladder


def _complete_schedule(run: Run) -> Settings:
    """Return settings with which each run completes its schedule, without early stop or samples."""
    schedule, settings = run.schedule, [("sample.prompts", "()")]
    for name, span in spans(schedule).items():
        if name == "end" and (span.unit, span.amount) != ("share", 1):
            settings.append(("schedule.end", "100%"))
        elif span.unit != "share":
            share = span.steps(run.train.steps, run.pace) / run.train.steps
            settings.append((f"schedule.{name}", f"{100 * share:.3g}%"))
    if run.train.patience is not None:
        settings.append(("train.patience", "None"))
    return settings


def _numbers(text: str | None, flag: str, default: Sequence[int]) -> list[int]:
    """Return the numbers of a comma-separated text, sorted and unique."""
    if text is None:
        return sorted(set(default))
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
        what, why = "needs integers with commas between", "each is a positive integer below 2^31"
        fix = f"{flag}={','.join(map(str, sorted(set(default))))}"
        raise CommandError(f"{flag} {what}", where=f"{flag}={text}", why=why, fix=fix)
    return sorted(set(map(int, parts)))
