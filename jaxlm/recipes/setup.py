"""The model of a run and where its arrays lie: what training, evaluation and generation build alike."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import nearest_word
from jaxlm.core.precision import Precision
from jaxlm.data import dataset
from jaxlm.data.config import HELD_OUT, DataConfig
from jaxlm.data.dataset import Data
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals.loss import TokenizerPrefix
from jaxlm.models.build import Blueprint
from jaxlm.models.families.union import TabledFamily
from jaxlm.objectives.build import build as build_objective
from jaxlm.optim import groups
from jaxlm.parallel import rules
from jaxlm.recipes import jax_setup
from jaxlm.recipes.config import VOCAB_MULTIPLE, Run
from jaxlm.recipes.plan import attention_kernels, divisibility

_SCALED = re.compile(r"/attention/(query|key)/")  # what QK-clip may scale


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model's blueprint, and the sharding of each of its parameters and of their gradients.

    `trained` is the same model as a step of training computes it: there alone may products be rounded.
    """

    mesh: Mesh
    precision: Precision
    blueprint: Blueprint
    trained: Blueprint
    shardings: Any
    gradients: Any


def build_sharded_model(run: Run, vocab: int, mesh: Mesh) -> ShardedModel:
    """The model of `run` with a vocabulary of `vocab` ids, laid out on `mesh`.

    Raises:
      ConfigError: where a dimension does not divide by its mesh axes, or the kernel that is asked for cannot compute
        attention there.
    """
    precision = Precision.of(run.precision)
    decoder = run.decoder(vocab)
    target = jax_setup.target(mesh)
    attention_kernels.check(run, decoder, mesh.shape, target)
    decoder = attention_kernels.with_kernels(run, decoder, mesh.shape, target)
    made = functools.partial(
        Blueprint,
        decoder,
        layers=run.train.stack,
        remat=run.train.remat,
        schedule=divisibility.schedule(run, mesh.shape),
    )
    blueprint = made(precision=precision.exact)
    if run.regularisation.qk_clip is not None:
        _check_qk_clip(run, blueprint, mesh)
    trained = blueprint if precision == precision.exact else made(precision=precision)
    layout = functools.partial(rules.shardings, mesh, blueprint.axes, blueprint.shapes)
    zero = run.mesh.zero
    return ShardedModel(
        mesh, precision, blueprint, trained, layout(is_split=zero == 3), layout(is_split=zero >= 2)
    )


def _check_qk_clip(run: Run, blueprint: Blueprint, mesh: Mesh) -> None:
    """Raises ConfigError where heads cannot be scaled back."""
    scaled = [path for path in groups.unmoved(run.optim, blueprint.axes) if _SCALED.search(path)]
    if scaled:
        raise ConfigError(
            "QK-clip of queries and keys that stay as they are",
            where="regularisation.qk_clip",
            why=f"it scales {min(scaled)}, which optim.freeze or optim.lr_scale keeps",
            fix="--config.regularisation.qk_clip=None",
        )
    if any(layer.attention.qk_norm is not None for layer in blueprint.config.layers):
        raise ConfigError(
            "QK-clip with normed queries and keys",
            where="regularisation.qk_clip",
            why="the norm undoes whatever scales their weights, and bounds the logits already",
            fix="--config.regularisation.qk_clip=None",
        )
    if rules.split(mesh, "stages") > 1:
        raise ConfigError(
            "QK-clip in a pipeline",
            where="regularisation.qk_clip",
            why="its stages do not say how large their logits were",
            fix="--config.regularisation.qk_clip=None\n--config.mesh.pipe=1",
        )


def observer_model(run: Run, model: ShardedModel) -> Blueprint:
    """The model as training computes it, but for a pipeline, in which a layer's figures would be of several micro-batches."""
    if model.trained.schedule is None:
        return model.trained
    return Blueprint(
        model.trained.config, model.precision, layers=run.train.stack, remat=run.train.remat
    )


def taught_run(teacher: Run, run: Run) -> Run:
    """Return the run of a frozen teacher, laid out as `run` is and reading rows of its length.

    Raises:
      ConfigError: if the teacher has fewer positions than a row of `run`.
    """
    sequence = run.data.sequence
    if isinstance(teacher.model, TabledFamily) and teacher.model.context < sequence:
        raise ConfigError(
            f"rows of {sequence} tokens are too long for the teacher",
            where="objective.teacher",
            why=f"the teacher has {teacher.model.context} positions",
            fix=f"--config.data.sequence={teacher.model.context}",
        )
    data = dataclasses.replace(teacher.data, sequence=sequence, sequence_warmup=())
    return dataclasses.replace(teacher, data=data, train=run.train, mesh=run.mesh)


def vocabulary(run: Run, tokens: int) -> int:
    """`model.vocab`, or for `auto` the tokenizer's size, rounded up."""
    return (
        -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if run.model.vocab == "auto"
        else run.model.vocab
    )


def token_bytes(model: ShardedModel, tokenizer: Tokenizer) -> Int[np.ndarray, "V"]:
    """Bytes that each id of the model stands for; none for ids that only fill the vocabulary up."""
    known = tokenizer.token_bytes
    return np.pad(known, (0, model.blueprint.config.vocab - len(known)))


def prefix(tokenizer: Tokenizer) -> TokenizerPrefix | None:
    """Return the bytes that a tokenizer puts into the first token of a text, None if it does not.

    A document that nothing stands in front of has them in a token that is never a target.
    """
    if not tokenizer.lead or not tokenizer.before:
        return None
    return TokenizerPrefix(tokenizer.before[-1], len(tokenizer.lead))


def build_mesh_for(run: Run) -> Mesh:
    """The mesh of a run over all devices, before anything is read or compiled.

    Raises:
      ConfigError: where the devices are not enough, or something does not come out even on it.
    """
    divisibility.check(run, len(jax.devices()), jax_setup.slices())
    mesh = jax_setup.build_mesh(run.mesh)
    check_fit(run, mesh)
    return mesh


def check_fit(run: Run, mesh: Mesh) -> None:
    """Raises ConfigError where the model cannot be laid out on the mesh, before there is a tokenizer.

    Where the vocabulary is the tokenizer's, one that does divide stands in for it.
    """
    ways = rules.split(mesh, "vocab")
    vocab = VOCAB_MULTIPLE * ways if run.model.vocab == "auto" else run.model.vocab
    build_sharded_model(run, vocab, mesh)


def abstract_params(assembly: ShardedModel) -> Any:
    """Shapes, dtypes and shardings of the parameters, for a restore."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        assembly.blueprint.shapes,
        assembly.shardings,
    )


# The data of a run, read as its objective reads it.


MAX_HELD_OUT = 50  # percent that an error proposes


def open_data(
    run: Run,
    *,
    say: Log = lambda _: None,
    warn: Log = lambda _: None,
    progress: OnProgress = lambda what, done, total: None,
) -> Data:
    """Opens what the run names, see `dataset.open_data`.

    Raises:
      JaxlmError: where the data is missing, broken, empty, or lacks what the objective needs.
    """
    return dataset.open_data(
        run.data,
        seed=run.seed,
        prepare=build_objective(run.objective, run.loss, run.architecture).prepare,
        row_at=run.row_at,
        rows=run.rows,
        log=say,
        warn=warn,
        progress=progress,
    )


def check_held_out(config: DataConfig, data: Data) -> None:
    """Raise ConfigError if a set held out because data.validation is not set has no row of tokens."""
    if config.validation != (HELD_OUT,):
        return
    for name, loader in data.validation.items():
        found, row = loader.shards.manifest.tokens, config.sequence
        if found >= row:
            continue
        share = float(HELD_OUT.removeprefix("tail:").removesuffix("%"))
        enough = math.ceil(1.1 * share * row / found)
        larger = f"--config.data.validation=tail:{enough}%\n" if enough <= MAX_HELD_OUT else ""
        raise ConfigError(
            "too little text is held out for validation",
            where=f"data.validation = {HELD_OUT}",
            why=f"{name} has {found} tokens, and a row {row}",
            fix=f"{larger}'--config.data.validation=()'    # trains without validation",
        )


def ranking_set(run: Run, names: Iterable[str]) -> str | None:
    """The validation set, of those there are, whose loss ranks checkpoints; None where there is none.

    Raises:
      ConfigError: where `eval.follow` names another.
    """
    known, wanted = list(names), run.eval.follow
    if wanted in known or (wanted == "auto" and not known):
        return wanted if known else None
    if wanted == "auto":
        return known[0]
    raise ConfigError(
        f"there is no validation set {wanted!r} to follow",
        where="eval.follow",
        why=f"there is {', '.join(known) or 'none'}",
        fix=f"--config.eval.follow={nearest_word(wanted, known) or nearest_word(wanted.partition('.')[0], known) or 'auto'}",
    )
