"""Sharded model and data of a run, for training, evaluation and generation."""

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

_SCALED = re.compile(r"/attention/(query|key)/")  # weights that QK-clip scales


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model's blueprint, and the shardings of its parameters and gradients.

    `trained` is the same model for training steps, which may round products (quantized training).
    """

    mesh: Mesh
    precision: Precision
    blueprint: Blueprint
    trained: Blueprint
    shardings: Any
    gradients: Any


def build_sharded_model(run: Run, vocab: int, mesh: Mesh) -> ShardedModel:
    """Build the model of `run` with a vocabulary of `vocab` ids, sharded on `mesh`.

    Raises:
      ConfigError: if a dimension does not divide by its mesh axes, or the configured kernel does
        not support the attention of this model on this mesh.
    """
    precision = Precision.of(run.precision)
    decoder = run.decoder(vocab)
    target = jax_setup.target(mesh)
    attention_kernels.check(run, decoder, mesh.shape, target)
    decoder = attention_kernels.with_kernels(run, decoder, mesh.shape, target)
    build = functools.partial(
        Blueprint,
        decoder,
        layers=run.train.stack,
        remat=run.train.remat,
        schedule=divisibility.schedule(run, mesh.shape),
    )
    blueprint = build(precision=precision.exact)
    if run.regularisation.qk_clip is not None:
        _check_qk_clip(run, blueprint, mesh)
    trained = blueprint if precision == precision.exact else build(precision=precision)
    layout = functools.partial(rules.shardings, mesh, blueprint.axes, blueprint.shapes)
    zero = run.mesh.zero
    return ShardedModel(
        mesh, precision, blueprint, trained, layout(is_split=zero == 3), layout(is_split=zero >= 2)
    )


def _check_qk_clip(run: Run, blueprint: Blueprint, mesh: Mesh) -> None:
    """Raise ConfigError if QK-clip cannot scale the heads."""
    scaled = [path for path in groups.unmoved(run.optim, blueprint.axes) if _SCALED.search(path)]
    if scaled:
        raise ConfigError(
            "QK-clip cannot scale frozen queries and keys",
            where="regularisation.qk_clip",
            why=f"it scales {min(scaled)}, which optim.freeze or optim.lr_scale keeps constant",
            fix="--config.regularisation.qk_clip=None",
        )
    if any(layer.attention.qk_norm is not None for layer in blueprint.config.layers):
        raise ConfigError(
            "QK-clip does not support normalized queries and keys",
            where="regularisation.qk_clip",
            why="the norm cancels a scale of their weights, and already bounds the logits",
            fix="--config.regularisation.qk_clip=None",
        )
    if rules.split(mesh, "stages") > 1:
        raise ConfigError(
            "QK-clip does not support a pipeline",
            where="regularisation.qk_clip",
            why="pipeline stages do not return their largest logits",
            fix="--config.regularisation.qk_clip=None\n--config.mesh.pipe=1",
        )


def observer_model(run: Run, model: ShardedModel) -> Blueprint:
    """Return the training model without a pipeline, in which statistics would mix micro-batches."""
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
    """Return `model.vocab`; for `auto` the tokenizer's size, rounded up."""
    return (
        -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if run.model.vocab == "auto"
        else run.model.vocab
    )


def token_bytes(model: ShardedModel, tokenizer: Tokenizer) -> Int[np.ndarray, "V"]:
    """Return the number of bytes of each id of the model; 0 for padding ids of the vocabulary."""
    known = tokenizer.token_bytes
    return np.pad(known, (0, model.blueprint.config.vocab - len(known)))


def prefix(tokenizer: Tokenizer) -> TokenizerPrefix | None:
    """Return the bytes that a tokenizer adds to the first token of a text; None if it adds none.

    In a document without a preceding token these bytes are in a token that is never a target.
    """
    if not tokenizer.lead or not tokenizer.before:
        return None
    return TokenizerPrefix(tokenizer.before[-1], len(tokenizer.lead))


def build_mesh_for(run: Run) -> Mesh:
    """Build the mesh of a run over all devices, before any data is read or compiled.

    Raises:
      ConfigError: if devices are missing, or a dimension does not divide by its mesh axes.
    """
    divisibility.check(run, len(jax.devices()), jax_setup.slices())
    mesh = jax_setup.build_mesh(run.mesh)
    check_fit(run, mesh)
    return mesh


def check_fit(run: Run, mesh: Mesh) -> None:
    """Raise ConfigError if the model cannot be sharded on the mesh, before a tokenizer exists.

    A vocabulary of the tokenizer's size is replaced by one that divides.
    """
    ways = rules.split(mesh, "vocab")
    vocab = VOCAB_MULTIPLE * ways if run.model.vocab == "auto" else run.model.vocab
    build_sharded_model(run, vocab, mesh)


def abstract_params(model: ShardedModel) -> Any:
    """Return shapes, dtypes and shardings of the parameters, the target of a restore."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        model.blueprint.shapes,
        model.shardings,
    )


MAX_HELD_OUT = 50  # percent, in the fix line of an error


def open_data(
    run: Run,
    *,
    say: Log = lambda _: None,
    warn: Log = lambda _: None,
    progress: OnProgress = lambda what, done, total: None,
) -> Data:
    """Open the data of the run for its objective, see `dataset.open_data`.

    Raises:
      JaxlmError: if the data is missing, damaged or empty, or does not fit the objective.
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
    """Raise ConfigError if a set that is held out by default has less than a row of tokens."""
    if config.validation != (HELD_OUT,):
        return
    for name, loader in data.validation.items():
        tokens, row = loader.shards.manifest.tokens, config.sequence
        if tokens >= row:
            continue
        share = float(HELD_OUT.removeprefix("tail:").removesuffix("%"))
        enough = math.ceil(1.1 * share * row / tokens)
        larger = f"--config.data.validation=tail:{enough}%\n" if enough <= MAX_HELD_OUT else ""
        raise ConfigError(
            "too little text is held out for validation",
            where=f"data.validation = {HELD_OUT}",
            why=f"{name} has {tokens} tokens, and a row {row}",
            fix=f"{larger}'--config.data.validation=()'    # trains without validation",
        )


def ranking_set(run: Run, names: Iterable[str]) -> str | None:
    """Return the validation set whose loss ranks checkpoints; None without validation sets.

    Raises:
      ConfigError: if the set that `eval.follow` names does not exist.
    """
    known, followed = list(names), run.eval.follow
    if followed in known or (followed == "auto" and not known):
        return followed if known else None
    if followed == "auto":
        return known[0]
    nearest = nearest_word(followed, known) or nearest_word(followed.partition(".")[0], known)
    raise ConfigError(
        f"eval.follow names the validation set {followed!r}, which does not exist",
        where="eval.follow",
        why=f"the validation sets are {', '.join(known) or 'none'}",
        fix=f"--config.eval.follow={nearest or 'auto'}",
    )
