"""Compare an export, read back, with the run."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoint import hub_architecture
from jaxlm.checkpoint.hub_folder import ModelSource
from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.core import tree
from jaxlm.core.errors import JaxlmError
from jaxlm.models.build import Blueprint
from jaxlm.parallel import rules
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.exchange.export_formats import ExportedParams
from jaxlm.recipes.use.load import LoadedRun

TOLERANCE = 1e-5  # of the largest logit: the same arithmetic computes both
MAX_LENGTH = 256  # of the rows of text to compare on


class ParityError(JaxlmError, code=1, kind="not the same"):
    """The export does not compute the same as the run."""


def compare_logits(
    source: ModelSource, opened: LoadedRun, dtype: np.dtype, held: ExportedParams
) -> dict[str, Any]:
    """Return the largest difference between the logits of the export and of the run, on real text.

    The export's model is built from its own config.json. The run's parameters are first rounded as
    the format rounds them; the effect of the rounding is reported separately. They are freed leaf
    by leaf as the export is read, so that memory holds one model and one leaf; the run is unusable
    afterwards. `held` is the rounding of each leaf.
    """
    model = opened.model
    family, _ = hub_architecture.read_family(source, lambda _: None)
    described = dataclasses.replace(opened.run, model=family)
    written = setup.build_sharded_model(described, model.blueprint.config.vocab, model.mesh)
    tokens, positions = _text(opened)
    is_paired = opened.run.architecture == "encoder-decoder"

    def logits(
        blueprint: Blueprint, params: Any, tokens: jax.Array, positions: jax.Array
    ) -> jax.Array:
        merged = blueprint.merge(params)
        inputs = {"source": tokens} if is_paired else {}
        return merged.logits(merged(tokens, positions=positions, **inputs).values)

    of_run = jax.jit(functools.partial(logits, model.blueprint))
    of_export = jax.jit(functools.partial(logits, written.blueprint))
    is_identical = []

    def rounded(path: str, leaf: jax.Array) -> jax.Array:
        result = held[path](leaf)
        if result is not leaf:
            leaf.delete()
        return result

    with source.opened() as fetch, jax.set_mesh(model.mesh):
        exact = np.asarray(of_run(opened.params, tokens, positions))
        rounded_params = tree.map_with_path(rounded, opened.params)
        rounded_logits = np.asarray(of_run(rounded_params, tokens, positions))
        remaining = tree.leaves(rounded_params)
        tensors = layout(family.build(), family.HUB)
        tensors = hub_architecture.in_folder_names(tensors, source, family.HUB)
        read = import_model.leaf_reader(tensors, fetch)

        def taken(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            leaf = read(path, like)
            is_identical.append(np.array_equal(leaf, remaining[path]))
            remaining[path].delete()
            return leaf

        read_params = tree.map_with_path(taken, setup.abstract_params(written))
        read_back = np.asarray(of_export(read_params, tokens, positions))
    return {
        "tokens": int(tokens.size),
        "largest_difference": float(np.abs(rounded_logits - read_back).max()),
        "tolerance": TOLERANCE * float(np.abs(rounded_logits).max()),
        "is_bit_identical": all(is_identical),
        "largest_difference_by_rounding": float(np.abs(rounded_logits - exact).max()),
        "dtype": dtype.name,
    }


def check(parity: dict[str, Any], partial: Path) -> None:
    """Raise ParityError if the export differs from the run."""
    fix = "the export is kept for inspection; this is a bug of jaxlm: please report it"
    difference, tolerance = parity["largest_difference"], parity["tolerance"]
    if not math.isfinite(difference):
        what = "the export gives logits that are not finite"
        why = f"weights of the run are not finite, or exceed the range of {parity['dtype']}"
        is_narrow = parity["dtype"] == "float16"
        earlier = "export an earlier --step, whose weights are finite"
        fix = "--dtype=bfloat16" if is_narrow else earlier
    elif difference > tolerance:
        what = "the export gives other logits than the run"
        why = f"they differ by {difference:.3g}, the tolerance is {tolerance:.3g}"
    elif not parity["is_bit_identical"]:
        what = "the export holds other weights than the run"
        why = "the logits of the tested text agree, but that text does not use every weight"
    else:
        return
    raise ParityError(what, where=str(partial), why=why, fix=fix)


def _text(opened: LoadedRun) -> tuple[jax.Array, jax.Array]:
    """Return rows of ids of a text that is always available: Python's json package."""
    max_length = min(MAX_LENGTH, opened.run.model.context)
    text = Path(json.__file__).read_text()
    ids = opened.tokenizer.encode(text)
    rows = max(2, rules.split(opened.model.mesh, "batch"))
    length = min(max_length, len(ids) // rows)
    tokens = np.array(ids[: rows * length], np.int32).reshape(rows, length)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return jnp.asarray(tokens), jnp.asarray(positions)
