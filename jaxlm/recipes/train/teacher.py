"""The frozen model that an objective reads: find its run, load it, record its digest."""

import dataclasses
import hashlib
import json
from typing import Any

from jax.sharding import Mesh

from jaxlm.checkpoint.verify import Verifier
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError
from jaxlm.data import tokenizer_file
from jaxlm.data.dataset import Data
from jaxlm.models.build import Blueprint
from jaxlm.objectives.config import Distill
from jaxlm.objectives.policy_config import START
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.setup import ShardedModel
from jaxlm.recipes.train.init_from import check_tokenizer
from jaxlm.recipes.use.load import InitSource, check_teaches, open_run_ref


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that the objective reads, with parameters on the run's mesh."""

    blueprint: Blueprint
    params: Any


def find_teacher(
    run: Run,
    data: Data,
    warn: Log,
    verifier: Verifier | None = None,
    start: InitSource | None = None,
) -> InitSource | None:
    """Return the run and step of the frozen model that the objective reads; None without one.

    Raises as `open_run_ref` and `check_teaches`, and ConfigError if its tokenizer differs from that
    of the data.

    Args:
      run: the config.
      data: with the tokenizer.
      warn, verifier: as of `open_run_ref`.
      start: the run that this one begins with.
    """
    if not run.objective.teacher:
        return None
    if run.objective.teacher == START:
        return start
    name = "teacher" if isinstance(run.objective, Distill) else "reference"
    flag = f"--config.objective.{name}"
    source = open_run_ref(run.objective.teacher, flag, warn, verifier)
    check_teaches(source, flag)
    check_tokenizer(source, data.tokenizer.digest)
    return source


def with_teacher(data: Data, source: InitSource) -> Data:
    """Return the data with digests of the teacher's weights and precision in its fingerprint."""
    precision = json.dumps(dataclasses.asdict(source.run.precision), sort_keys=True)
    digests: dict[str, str | int] = {
        "teacher": source.digest,
        "teacher.precision": hashlib.sha256(precision.encode()).hexdigest(),
    }
    return dataclasses.replace(data, fingerprint=data.fingerprint | digests)


def load_teacher(run: Run, source: InitSource, model: ShardedModel) -> Teacher:
    """Return the frozen model on the mesh of `model`.

    Raises ConfigError if its vocabulary differs, or it has too few positions.
    """
    vocab = model.blueprint.config.vocab
    size = vocabulary_of(source)
    if size != vocab:
        raise ConfigError(
            "the vocabulary of the model differs from that of its teacher",
            where="model.vocab",
            why=f"the model has {vocab} ids and the teacher {size}",
            fix=f"--config.model.vocab={size}",
        )
    return frozen_model(run, source, vocab, model.mesh)


def vocabulary_of(source: InitSource) -> int:
    """Return the number of ids of the model of another run."""
    return setup.vocabulary(source.run, tokenizer_file.read(source.workdir / "tokenizer").size)


def frozen_model(run: Run, source: InitSource, vocab: int, mesh: Mesh) -> Teacher:
    """Return the model of another run on a mesh, laid out as `run` is, see `setup.taught_run`."""
    taught = setup.build_sharded_model(setup.taught_run(source.run, run), vocab, mesh)
    params = source.store.restore_part(source.step, "params", setup.abstract_params(taught))
    return Teacher(taught.blueprint, params)
