"""The model of a run and where its arrays lie: what training, evaluation and generation build alike."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxlm.core.precision import Precision
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.models.build import Blueprint
from jaxlm.parallel import rules
from jaxlm.recipes.config import Run

VOCAB_MULTIPLE = 64  # what `model.vocab=auto` is rounded up to, so that it splits over devices


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A model's blueprint, and the sharding of each of its parameters."""

    mesh: Mesh
    precision: Precision
    blueprint: Blueprint
    shardings: Any


def assemble(run: Run, vocab: int, mesh: Mesh) -> Assembly:
    """The model of `run` with a vocabulary of `vocab` ids, laid out on `mesh`.

    Raises:
      ConfigError: where a dimension does not divide by its mesh axes.
    """
    precision = Precision.of(run.precision)
    decoder = dataclasses.replace(run.model, vocab=vocab).build()
    blueprint = Blueprint(decoder, precision, layers=run.train.stack, remat=run.train.remat)
    return Assembly(
        mesh, precision, blueprint, rules.shardings(mesh, blueprint.axes, blueprint.shapes)
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


def check_fit(run: Run, mesh: Mesh) -> None:
    """Raises ConfigError where the model cannot be split over the mesh, before there is a tokenizer.

    Where the vocabulary is the tokenizer's, one that does divide stands in for it.
    """
    ways = rules.split(mesh, "vocab")
    assemble(run, VOCAB_MULTIPLE * ways if run.model.vocab == "auto" else run.model.vocab, mesh)


def placed(assembly: Assembly) -> Any:
    """Shapes, dtypes and shardings of the parameters, for a restore."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        assembly.blueprint.shapes,
        assembly.shardings,
    )
