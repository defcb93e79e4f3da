"""What an export wrote, read back and compared with the run."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlm.checkpoint import hub_architecture
from jaxlm.checkpoint.hub_folder import Source
from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice, layout
from jaxlm.core import tree
from jaxlm.core.errors import JaxlmError
from jaxlm.models.build import Blueprint
from jaxlm.parallel import rules
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.use.load import LoadedRun

TOLERANCE = 1e-5  # of the largest logit: what was written is read back by the same arithmetic
LENGTH = 256  # of the rows of text that both are compared on, at most
# What a form holds of each leaf, by its path: a function of the leaf.
ExportedParams = Mapping[str, Callable[[jax.Array], jax.Array]]


class ParityError(JaxlmError):
    """What was written does not compute what the run computes."""

    code = 1
    kind = "not the same"


def compare_logits(
    source: Source, opened: LoadedRun, dtype: np.dtype, held: ExportedParams
) -> dict[str, Any]:
    """The largest difference between the logits of what was written and of the run, on Python's own source.

    Theirs are of the model that its own config.json describes. The run's parameters are rounded first as the form rounds them;
    what that itself does to the logits is told beside it. They are given up leaf by leaf as theirs are read, so that beside
    one model no more than a leaf is held; the run cannot be used afterwards.
    """
    model = opened.model
    family, _ = hub_architecture.described(source, lambda _: None)
    described = dataclasses.replace(opened.run, model=family)
    written = setup.build_sharded_model(described, model.blueprint.config.vocab, model.mesh)
    tokens, places = _text(opened)
    logits, their_logits = (
        jax.jit(
            functools.partial(_logits, each, is_paired=opened.run.architecture == "encoder-decoder")
        )
        for each in (model.blueprint, written.blueprint)
    )
    same = []

    def rounded(path: str, leaf: jax.Array) -> jax.Array:
        found = held[path](leaf)
        if found is not leaf:
            leaf.delete()
        return found

    with source.opened() as fetch, jax.set_mesh(model.mesh):
        exact = np.asarray(logits(opened.params, tokens, places))
        mine = tree.map_with_path(rounded, opened.params)
        ours = np.asarray(logits(mine, tokens, places))
        own = tree.leaves(mine)
        tensors = hub_architecture.named(layout(family.build(), family.HUB), source, family.HUB)
        read = import_model.leaf_reader(tensors, fetch)

        def taken(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            found = read(path, like)
            same.append(np.array_equal(found, own[path]))
            own[path].delete()
            return found

        theirs = tree.map_with_path(taken, setup.abstract_params(written))
        read_back = np.asarray(their_logits(theirs, tokens, places))
    return {
        "tokens": int(tokens.size),
        "largest_difference": float(np.abs(ours - read_back).max()),
        "tolerance": TOLERANCE * float(np.abs(ours).max()),
        "is_bit_identical": all(same),
        "largest_difference_by_rounding": float(np.abs(ours - exact).max()),
        "dtype": dtype.name,
    }


def check(parity: dict[str, Any], partial: Path) -> None:
    """Raises Different where what was written is not the run."""
    report = "it was left for you to look at; this is a fault of jaxlm: please report it"
    difference, tolerance = parity["largest_difference"], parity["tolerance"]
    if not math.isfinite(difference):
        raise ParityError(
            "what was written gives logits that are no numbers",
            where=str(partial),
            why=f"weights of the run are none, or lie beyond what {parity['dtype']} holds",
            fix="--dtype=bfloat16"
            if parity["dtype"] == "float16"
            else "export an earlier --step, whose weights are finite",
        )
    if difference > tolerance:
        raise ParityError(
            "what was written gives other logits than the run",
            where=str(partial),
            why=f"they differ by {difference:.3g}, and {tolerance:.3g} is allowed",
            fix=report,
        )
    if not parity["is_bit_identical"]:
        raise ParityError(
            "what was written holds other weights than the run",
            where=str(partial),
            why="the logits of the text that was tried agree, which does not meet every weight",
            fix=report,
        )


def _text(opened: LoadedRun) -> tuple[jax.Array, jax.Array]:
    """Real text that is always there: the source of Python's own json package, as rows of ids."""
    limit = min(LENGTH, opened.run.model.context)
    text = Path(json.__file__).read_text()
    ids = opened.tokenizer.encode(text)
    rows = max(2, rules.split(opened.model.mesh, "batch"))
    length = min(limit, len(ids) // rows)
    tokens = np.array(ids[: rows * length], np.int32).reshape(rows, length)
    places = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return jnp.asarray(tokens), jnp.asarray(places)


def _logits(
    blueprint: Blueprint, params: Any, tokens: jax.Array, places: jax.Array, *, is_paired: bool
) -> jax.Array:
    model = blueprint.merge(params)
    more = {"source": tokens} if is_paired else {}
    return model.logits(model(tokens, positions=places, **more).values)


# What is exported: a run's model, its tensors by the names of transformers, and what it is rounded to.


Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[Dtype, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportJob:
    """A run's model, opened, to be written."""

    opened: LoadedRun
    family: Any  # of the model, with the rows of its embedding
    tensors: list[HFTensor]
    dtype: np.dtype
    workdir: Path
    shard_bytes: int
    say: Callable[[str], None]

    @functools.cached_property
    def _leaves(self) -> dict[str, jax.Array]:
        return tree.leaves(self.opened.params)

    def array(self, theirs: HFTensor) -> np.ndarray:
        """The numbers of a tensor as transformers has it, in the run's dtype."""

        def leaf(part: MappedSlice) -> np.ndarray:
            found = self._leaves[part.path]
            return np.asarray(found[part.lead] if part.lead else found)

        return theirs.joined(leaf)
