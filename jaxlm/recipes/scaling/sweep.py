"""A ladder of small runs of one config, for a law: several widths, each trained for several numbers of steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxlm.core import config
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.optim.schedule_config import spans
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.recipes.config import Run
from jaxlm.recipes.scaling import resize_model
from jaxlm.recipes.scaling.loss_fit import FEWEST_RUNS, FEWEST_SIZES
from jaxlm.recipes.train.context import ResumeOptions, StartOptions
from jaxlm.recipes.train.run import run_training

WIDTHS = (0.25, 0.5, 0.75, 1.0)  # of the config's own
STEPS = (0.25, 0.5, 1.0)
Settings = list[tuple[str, str]]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One run of a ladder: the name of its directory, and what it sets beside the config."""

    name: str
    settings: Settings


def sweep(
    file: str,
    overrides: Settings,
    workdir: Path,
    *,
    widths: str | None = None,
    steps: str | None = None,
    say: Say = lambda _: None,
) -> None:
    """Trains each rung, the cheapest first, as `jaxlm train` would, in `workdir`/NAME. Those that are complete stay; one that was interrupted goes on.

    Each has a schedule of its own, which ends with it. The losses on the way of one long run would not do: its learning rate
    is still high there, and they are higher than those of a run that ends.

    Raises:
      JaxlmError: as a training run does, and where the ladder is too short for a law.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.1 and appendix B.
    """
    ladder = rungs(config.load(Run, file, overrides).value, widths, steps)
    for number, rung in enumerate(ladder, 1):
        settings = [*overrides, *rung.settings]
        place = workdir / rung.name
        say(f"run {number} of {len(ladder)}: {place}")
        flags = [f"--config.{path}={value}" for path, value in settings]
        told = run_training(
            config.load(Run, file, settings),
            StartOptions(
                workdir=place,
                arguments=["train", f"--config={file}", *flags, f"--workdir={place}"],
                resume=ResumeOptions(),
                process=ProcessSpec(),
                quiet=True,
            ),
        )
        say(f"  {told['loss_nats']:.4f} nats after {told['step']} steps")


def rungs(run: Run, widths: str | None = None, steps: str | None = None) -> list[Rung]:
    """The runs of a ladder by what they cost: each width for each number of steps.

    By default a quarter, half, three quarters and all of the config's width, and a quarter, half and all of its steps:
    together they take less than three times what the config's own run takes.
    """
    if not run.data.validation:
        raise ConfigError(
            "a law needs a validation set",
            where="data.validation",
            why="it is fitted to the loss on text that was not trained on",
            fix="--config.data.validation=5%",
        )
    unit, own = resize_model.UNIT, run.model.width
    sizes = _numbers(widths, "--widths", [max(unit, round(s * own / unit) * unit) for s in WIDTHS])
    counts = _numbers(steps, "--steps", [max(1, round(s * run.train.steps)) for s in STEPS])
    if wrong := [size for size in sizes if size % unit]:
        raise CommandError(
            f"a width of {wrong[0]}",
            where=f"--widths={widths}",
            why=f"widths are multiples of {unit}",
            fix="--widths=" + ",".join(str(math.ceil(size / unit) * unit) for size in sizes),
        )
    fewest = FEWEST_RUNS + 1  # one is left out to be predicted
    if len(sizes) < FEWEST_SIZES or len(sizes) * len(counts) < fewest:
        most = max(sizes)
        wide = sorted({max(unit, most * part // 4 // unit * unit) for part in (1, 2, 3, 4)})
        wide = wide if len(wide) >= FEWEST_SIZES else [unit, 2 * unit, 3 * unit]
        raise CommandError(
            f"{len(sizes)} widths for {len(counts)} numbers of steps are too few for a law",
            where=f"--widths={','.join(map(str, sizes))} --steps={','.join(map(str, counts))}",
            why=f"it takes {fewest} runs of {FEWEST_SIZES} widths: five constants, and a run to predict",
            fix=f"--widths={','.join(map(str, wide))} --steps={max(counts) * 2},{max(counts)}",
        )
    whole = _whole(run)
    pairs = sorted(((s, n) for s in sizes for n in counts), key=lambda pair: pair[0] ** 2 * pair[1])
    return [
        Rung(
            f"w{size}-s{count}",
            [
                (path, str(value))
                for path, value in resize_model.settings_at_width(run, size).items()
            ]
            + [("train.steps", str(count)), *whole],
        )
        for size, count in pairs
    ]


def _whole(run: Run) -> Settings:
    """What makes each run come to its own end: a schedule in shares of it, no early stop, and no samples that nobody reads."""
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
    """Whole numbers with commas between, smallest first, each once."""
    if text is None:
        return sorted(set(default))
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
        raise CommandError(
            f"{flag} takes whole numbers with commas between",
            where=f"{flag}={text}",
            why="each is above 0",
            fix=f"{flag}={','.join(map(str, sorted(set(default))))}",
        )
    return sorted(set(map(int, parts)))
