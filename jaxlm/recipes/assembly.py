"""The model of a run and where its arrays lie: what training, evaluation and generation build alike."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals.loss import Prefix
from jaxlm.models.build import Blueprint
from jaxlm.optim import groups
from jaxlm.parallel import rules
from jaxlm.recipes import attention, devices, fit
from jaxlm.recipes.config import VOCAB_MULTIPLE, Run

_SCALED = re.compile(r"/attention/(query|key)/")  # what QK-clip may scale


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A model's blueprint, and the sharding of each of its parameters and of their gradients.

    `trained` is the same model as a step of training computes it: there alone may products be rounded.
    """

    mesh: Mesh
    precision: Precision
    blueprint: Blueprint
    trained: Blueprint
    shardings: Any
    gradients: Any


def assemble(run: Run, vocab: int, mesh: Mesh) -> Assembly:
    """The model of `run` with a vocabulary of `vocab` ids, laid out on `mesh`.

    Raises:
      ConfigError: where a dimension does not divide by its mesh axes, or the kernel that is asked for cannot compute
        attention there.
    """
    precision = Precision.of(run.precision)
    decoder = run.decoder(vocab)
    target = devices.target(mesh)
    attention.check(run, decoder, mesh.shape, target)
    decoder = attention.fitted(run, decoder, mesh.shape, target)
    made = functools.partial(
        Blueprint,
        decoder,
        layers=run.train.stack,
        remat=run.train.remat,
        schedule=fit.schedule(run, mesh.shape),
    )
    blueprint = made(precision=precision.exact)
    if run.regularisation.qk_clip is not None:
        _check_qk_clip(run, blueprint, mesh)
    trained = blueprint if precision == precision.exact else made(precision=precision)
    layout = functools.partial(rules.shardings, mesh, blueprint.axes, blueprint.shapes)
    zero = run.mesh.zero
    return Assembly(
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


def watched(run: Run, model: Assembly) -> Blueprint:
    """The model as training computes it, but for a pipeline, in which a layer's figures would be of several micro-batches."""
    if model.trained.schedule is None:
        return model.trained
    return Blueprint(
        model.trained.config, model.precision, layers=run.train.stack, remat=run.train.remat
    )


def vocabulary(run: Run, tokens: int) -> int:
    """`model.vocab`, or for `auto` the tokenizer's size, rounded up."""
    return (
        -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if run.model.vocab == "auto"
        else run.model.vocab
    )


def token_bytes(model: Assembly, tokenizer: Tokenizer) -> Int[np.ndarray, "V"]:
    """Bytes that each id of the model stands for; none for ids that only fill the vocabulary up."""
    known = tokenizer.token_bytes
    return np.pad(known, (0, model.blueprint.config.vocab - len(known)))


def prefix(tokenizer: Tokenizer) -> Prefix | None:
    """Return the bytes that a tokenizer puts into the first token of a text, None if it does not.

    A document that nothing stands in front of has them in a token that is never a target.
    """
    if not tokenizer.lead or not tokenizer.before:
        return None
    return Prefix(tokenizer.before[-1], len(tokenizer.lead))


def mesh_of(run: Run) -> Mesh:
    """The mesh of a run over all devices, before anything is read or compiled.

    Raises:
      ConfigError: where the devices are not enough, or something does not come out even on it.
    """
    fit.check(run, len(jax.devices()), devices.slices())
    mesh = devices.build_mesh(run.mesh)
    check_fit(run, mesh)
    return mesh


def check_fit(run: Run, mesh: Mesh) -> None:
    """Raises ConfigError where the model cannot be laid out on the mesh, before there is a tokenizer.

    Where the vocabulary is the tokenizer's, one that does divide stands in for it.
    """
    ways = rules.split(mesh, "vocab")
    vocab = VOCAB_MULTIPLE * ways if run.model.vocab == "auto" else run.model.vocab
    assemble(run, vocab, mesh)


def placed(assembly: Assembly) -> Any:
    """Shapes, dtypes and shardings of the parameters, for a restore."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        assembly.blueprint.shapes,
        assembly.shardings,
    )
