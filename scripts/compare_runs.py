"""The common part of the scripts that compare optimizers, objectives and schedules: runs.

Each is a run in a directory of its own, WORKDIR/ARM/lrRATE-sSTEPS-seedSEED, which the code of
`jaxlm sweep` trains. A killed comparison resumes: a finished run is read, and an unfinished one is
resumed.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.core.sections import show
from jaxlm.monitor import sinks
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.compare import comparison, page, summary
from jaxlm.recipes.compare import sweep as sweeps
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import lr_find
from jaxlm.recipes.train.programs import TrainPrograms

FILE = "configs/quickstart.py"
# The quickstart made smaller; saved and evaluated once, at its end. Every update is applied without
# the guard: else it would help those that need it.
SMALL: Mapping[str, Any] = {
    "model.width": 64,
    "model.depth": 2,
    "model.max_positions": 128,
    "data.sequence": 128,
    "train.batch": 16,
    "eval.every": "100%",
    "checkpoint.every": "100%",
    "checkpoint.keep_last": 1,
    "log.every": "10%",
    "log.sinks": (),
    "sample.prompts": (),
    "guard.sigmas": None,
    "guard.rewinds": 0,
}
TUNING = 0  # the seed that rates are chosen by; what is reported has others
COARSE, FINE = 4, 2  # from one rate to the next
WINDOW = 20  # steps that are timed at once: a whole number of every optimizer's rare work
ROUNDS = 7  # windows of each
PARTS = 20  # of all steps: what those that a time allows are rounded to


@dataclasses.dataclass(frozen=True)
class Arm:
    """A compared arm: its name, and its changes of the config."""

    name: str
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A finished run: its folder, bits per byte, and share of predicted slots.

    The bits are of its validation set, and infinite if it diverged.
    """

    place: Path
    bits: float
    predicted: float


class Sweep:
    """The runs of a comparison, in a folder.

    `settings` are values by path over those of the config, `parallel` is the number of runs at a
    time.
    """

    def __init__(
        self,
        file: str,
        settings: Mapping[str, Any],
        workdir: Path,
        *,
        steps: int,
        say: Callable[[str], None],
        parallel: int = 1,
    ):
        self.steps, self.workdir = steps, workdir
        self._file, self._settings, self._say, self._parallel = file, settings, say, parallel

    def run(self, arm: Arm, settings: Mapping[str, Any] | None = None) -> Run:
        """A run of an arm. Raises ConfigError where it cannot be."""
        return config.load(Run, self._file, self._pairs(arm, settings or {})).value

    def ended(self, arm: Arm, *, rate: float, steps: int, seeds: Sequence[int]) -> list[Ended]:
        """Train an arm to its end with each seed, or read the results.

        Raises:
          ConfigError: a directory holds another run.
          DataError: a file of a run is damaged.
          Preempted: on SIGINT or SIGTERM.
          SystemExit: with the exit code of a run that failed; one that diverged has ended.
        """
        rates = rated(self.run(arm), rate)
        members = []
        for seed in seeds:
            settings = {"train.steps": steps, "seed": seed} | rates
            members.append(
                sweeps.SweepRun(
                    path=self.workdir / arm.name / f"lr{rate:g}-s{steps}-seed{seed}",
                    settings=self._pairs(arm, settings),
                    run=self.run(arm, settings),
                )
            )
        for member in members:
            sweeps.check_same(member, self.workdir)
        if any(sweeps.ended(member.path) is None for member in members):
            parallel = self._parallel
            codes = sweeps.train_all(members, self._file, [], parallel=parallel, say=self._say)
            if failed := [code for code in codes.values() if code not in sweeps.ENDED]:
                raise SystemExit(failed[0])
        return list(map(result, members))

    def seconds(self, arms: Sequence[Arm]) -> dict[str, float]:
        """Seconds of an arm's step, its batch read: measured once, and kept in the folder."""
        file = self.workdir / "seconds.json"
        known = sinks.read_json(file) if file.is_file() else {}
        if not {arm.name for arm in arms} <= known.keys():
            self._say(f"timing steps of {len(arms)} arms in turns")
            # As the first run of each: its step is then compiled already.
            settings = {"train.steps": self.steps, "seed": TUNING}
            known = step_seconds({arm.name: self.run(arm, settings) for arm in arms})
            write(file, known)
        return {arm.name: known[arm.name] for arm in arms}

    def _pairs(self, arm: Arm, settings: Mapping[str, Any]) -> sweeps.Settings:
        values = {**self._settings, **arm.settings, **settings}
        return [(path, show(value)) for path, value in values.items()]


def compare(
    sweep: Sweep,
    arms: Sequence[Arm],
    *,
    seeds: int,
    most: int,
    is_timed: bool,
    figures: Callable[[Ended], Mapping[str, float | None]],
    say: Callable[[str], None],
    publish: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """A row for each arm: rates, the best rate, and figures of its seeds.

    The figures are at equal tokens, and with `is_timed` at equal time. The time is that of all
    steps of the fastest arm; a slower one takes fewer steps, with a schedule that ends with them.

    Args:
      sweep: the runs.
      arms: the compared arms.
      seeds: number of seeds in addition to the one for rates.
      most: largest number of rates that are tried.
      is_timed: also compare at equal time.
      figures: returns the figures of a run.
      `say`: writes a line of progress.
      publish: receives the rows after each arm.

    Raises:
      ConfigError: an arm is wrong; before any is trained.
      JaxlmError: as training does.
    """
    for arm in arms:  # a wrong setting must not cost an hour
        if not sweep.run(arm).data.validation:
            raise ConfigError(
                "a comparison needs a validation set",
                where="data.validation",
                why="it is empty",
                fix="--config.data.validation=5%",
            )
    seconds = sweep.seconds(arms) if is_timed else {}
    rows: list[dict[str, Any]] = []
    compared: list[Path] = []
    for number, arm in enumerate(arms, 1):
        say(f"arm {number} of {len(arms)}: {arm.name}")

        def score(rate: float, arm: Arm = arm) -> float:
            return sweep.ended(arm, rate=rate, steps=sweep.steps, seeds=[TUNING])[0].bits

        rates = tune(score, sweep.run(arm).optim.lr, most)
        rate = best(rates)
        row: dict[str, Any] = {
            "name": arm.name,
            "settings": dict(arm.settings),
            "rates": [[each, finite(rates[each])] for each in sorted(rates)],
            "rate": rate,
            "is_edge": rate in (min(rates), max(rates)),
        }
        spans = {"equal_tokens": sweep.steps}
        if is_timed:
            row["step_seconds"] = arm_seconds = seconds[arm.name]
            spans["equal_time"] = affordable(sweep.steps, min(seconds.values()) / arm_seconds)
        for name, steps in spans.items():
            others = range(TUNING + 1, TUNING + seeds + 1)
            ended = sweep.ended(arm, rate=rate, steps=steps, seeds=others)
            compared += [each.place for each in ended if steps == sweep.steps]
            values = [figures(each) for each in ended]
            row[name] = {"steps": steps} | {
                key: [each[key] for each in values] for key in values[0]
            }
        rows.append(row)
        publish(rows)
    if len(compared := list(dict.fromkeys(compared))) > 1:
        written = page.write(comparison.compare(compared), sweep.workdir / "compare.html")
        say(f"curves and settings of the runs at equal tokens: {written}")
    return rows


def tune(score: Callable[[float], float], first: float, most: int) -> dict[float, float]:
    """Scores of at most `most` rates: far apart until the lowest score has worse neighbors.

    Then twice and half the best rate are tried.
    """
    known: dict[float, float] = {}

    def attempt(rate: float) -> bool:
        """Try a rate; return False if the number of rates is spent."""
        short = float(f"{rate:.2g}")
        if short not in known and len(known) < most:
            known[short] = score(short)
            return True
        return False

    for rate in (first, first * COARSE):
        attempt(rate)
    while (rate := best(known)) in (low := min(known), max(known)):
        if not attempt(rate / COARSE if rate == low else rate * COARSE):
            return known
    for near in (rate / FINE, rate * FINE):
        attempt(near)
    return known


def best(rates: Mapping[float, float]) -> float:
    """The rate of the lowest score; of equal ones, as where all diverged, the smallest."""
    return min(rates, key=lambda rate: (rates[rate], rate))


def affordable(steps: int, share: float) -> int:
    """Number of steps in a share of the time of all, rounded to a twentieth of them.

    Steps cannot be timed much better on a shared machine.
    """
    unit = max(1, steps // PARTS)
    return min(steps, max(unit, round(share * steps / unit) * unit))


def rated(run: Run, rate: float) -> dict[str, float]:
    """The settings of a rate."""
    flags = [flag.removeprefix("--config.").partition("=") for flag in lr_find.scaled(run, rate)]
    return {path: float(value) for path, _, value in flags}


def result(member: sweeps.SweepRun) -> Ended:
    """Return the result of a run that ended.

    Raises DataError if a file of the run is damaged.
    """
    state = summary.read(member.path)
    if state.code == summary.DIVERGED:
        return Ended(member.path, math.inf, 0.0)
    last = {record["split"]: record for record in state.records}
    bits = last[summary.ranking_split(state.config, state.records)]["bits_per_byte"]
    slots = member.run.train.steps * member.run.tokens_per_step
    return Ended(member.path, math.inf if bits is None else bits, last["train"]["tokens"] / slots)


def step_seconds(runs: Mapping[str, Run]) -> dict[str, float]:
    """Seconds of a step of each, its batch read: the least of windows that they take in turns.

    What else runs on the machine only adds to a window: the least is nearest to what the step takes
    by itself.
    """
    setup.start()
    windows: dict[str, list[float]] = {name: [] for name in runs}
    first = next(iter(runs.values()))
    mesh = meshes.build(first.mesh)
    with jax.set_mesh(mesh):
        going: dict[str, tuple[TrainPrograms, Generator[Any, None, None]]] = {}
        states: dict[str, Any] = {}
        for name, run in runs.items():
            data = setup.open_data(run)
            model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
            engine = TrainPrograms(run, data, model)
            going[name], states[name] = (engine, engine.batches(0)), engine.init_state()
        for turn in range(ROUNDS + 1):
            for name in [*going][:: 1 if turn % 2 else -1]:
                engine, batches = going[name]
                begun = time.perf_counter()
                for _ in range(WINDOW):
                    states[name], _ = engine.step(states[name], next(batches))
                jax.block_until_ready(states[name])
                if turn:  # the first compiles
                    windows[name].append((time.perf_counter() - begun) / WINDOW)
        for _, batches in going.values():
            batches.close()
    return {name: min(times) for name, times in windows.items()}


def write(file: Path, value: Any) -> None:
    """Writes JSON, as a whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    sinks.replace(file, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def finite(value: float) -> float | None:
    """A number as JSON has it: None for one that is not finite."""
    return value if math.isfinite(value) else None
