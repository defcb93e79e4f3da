"""Where a run begins: at fresh weights, or at those of another run."""

import dataclasses
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.data import tokenizer_file
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange.import_model import FOLDER
from jaxlm.recipes.train import resume
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.resume import ResumeOptions
from jaxlm.recipes.use import load
from jaxlm.training.rundir import read_json
from jaxlm.training.state import TrainState

# Settings of a model that change nothing of what its weights mean.
FREE = ("model.dropout", "model.init", "model.init_std")


@dataclasses.dataclass(frozen=True)
class InitSource:
    """Another run, and a committed step of it."""

    run: Run
    store: Store
    step: int

    @property
    def workdir(self) -> Path:
        """The directory of the run."""
        return Path(str(self.store.directory.parent))

    def __str__(self) -> str:
        return f"step {self.step} of {self.workdir}"


def find(place: str, wanted: Run, say: Callable[[str], None], verifier: Verifier) -> InitSource:
    """The run and the step of RUN[@STEP], the newest where none is named.

    All processes of `verifier` must call it; the first one chooses the step.

    Raises:
      CommandError: where STEP is no number.
      InputMissing: where there is no such run or step.
      DataError: where it is damaged.
      ConfigError: where its model is another one.
    """
    origin = open_run_ref(place, "--init_from", say, verifier)
    if others := differences(origin.run, wanted):
        more = f"\nand {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            "the model is not that of the run to begin from",
            where=f"--init_from={place}",
            why="\n".join(map(str, others[:3])) + more,
            fix=shlex.join(f"--config.{each.path}={each.old}" for each in others),
        )
    return origin


def open_run_ref(
    place: str, flag: str, say: Callable[[str], None], verifier: Verifier | None = None
) -> InitSource:
    """The run and the step of RUN[@STEP], the newest where none is named; what `flag` asked for.

    Raises:
      CommandError: where STEP is no number.
      InputMissing: where there is no such run or step.
      DataError: where it is damaged.
    """
    path, at, text = place.rpartition("@")
    named = Path(path if at else place)
    if at and not text.isdigit():
        raise CommandError(
            "the step to begin from is no number",
            where=f"{flag}={place}",
            why=f"{text!r} follows the @, where a step is counted",
            fix=f"{flag}={named}",
        )
    run = config.from_json(Run, read_json(named, "config.json"), where=str(named / "config.json"))
    verifier = verifier or Verifier(say=say)
    store = Store(named / "checkpoints", CheckpointConfig(), read_only=True, verifier=verifier)
    step = int(text) if at else None
    return InitSource(
        run, store, verifier.decide(lambda: load.select_step(store, step, False, say))
    )


def differences(run: Run, wanted: Run) -> list[config.Change]:
    """The settings of two models in which they differ, but for those that change nothing of what weights mean."""
    changes = config.diff(run, wanted)
    return [each for each in changes if each.path.startswith("model.") and each.path not in FREE]


def check_tokenizer(origin: InitSource, digest: str) -> None:
    """Raises ConfigError where text becomes other ids than those that the weights were trained on."""
    place = origin.workdir / "tokenizer"
    if tokenizer_file.read(place).digest != digest:
        raise ConfigError(
            "the tokenizer is not that of the run to begin from",
            where="data.tokenizer",
            why="its ids would mean other text than those that the weights know",
            fix=f"--config.data.tokenizer={place}",
        )


def copy_hub_files(origin: InitSource, workdir: Path) -> None:
    """Copies what came with an imported model, its chat template among it, which an export of this run has too."""
    beside = origin.workdir / FOLDER
    if beside.is_dir():
        shutil.copytree(beside, workdir / FOLDER, dirs_exist_ok=True)


def state(engine: TrainPrograms, origin: InitSource) -> TrainState:
    """The state before the first step: the other run's parameters, in this one's dtypes and on its mesh, all else fresh."""
    return resume.parameters(engine, origin.store, origin.step, engine.init_state())


def initial_state(engine: TrainPrograms, store: Store) -> TrainState:
    """The state before the first step of a run that has begun: what it kept of another's weights, or fresh ones."""
    return (
        resume.state(engine, store, 0, ResumeOptions())
        if 0 in store.steps()
        else engine.init_state()
    )
