"""Importance of the inputs of matrices: their mean squares over a text."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoint.gguf_writer import Scheme
from jaxlm.checkpoint.hub_tensors import HFTensor
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, DataError, cannot_write
from jaxlm.data.batch import Tokens
from jaxlm.recipes.use import calibration_text, evaluate
from jaxlm.recipes.use.layer_runner import LayerPath, LayerRunner, Stream, Sums, squares
from jaxlm.recipes.use.load import LoadedRun

LEAST = 1e-6  # of the mean: an input that was 0 in the text may not be elsewhere
Squares = dict[tuple[str, int], np.ndarray]  # by the path and the layer, [I] or [experts, I]


class CalibrationText(NamedTuple):
    """Globs of text, or `train`; how many tokens; and the command without it, for errors."""

    patterns: tuple[str, ...]
    tokens: int
    plain: str


class Importance(NamedTuple):
    """The importance of inputs by the names of tensors, and how many experts no token chose."""

    of: dict[str, np.ndarray]  # float32 [I], above 0
    unread: int


def check(scheme: Scheme | None, calibration: Sequence[str], plain: str) -> None:
    """Raise CommandError if no scale is searched by the text; `plain` is the command without it."""
    if not calibration:
        return
    where = f"--calibration={calibration[0]}"
    if scheme is None:
        what = "a calibration text needs a scheme"
        why = "floats, and codes that stay, have no scale to search"
        raise CommandError(what, where=where, why=why, fix="--scheme=q4_k_m")
    if scheme == "q8_0":
        why = "the scale of a block is that of its largest number"
        raise CommandError("q8_0 searches no scale", where=where, why=why, fix=plain)


def of_text(
    opened: LoadedRun, tensors: Sequence[HFTensor], text: CalibrationText, folder: Path, say: Log
) -> Importance:
    """Return the importance of the inputs of all matrices that are in layers.

    Args:
      opened: the run, a decoder.
      tensors: the tensors of its export.
      text: the text.
      folder: of a temporary file of inputs, 4 bytes for each number.
      `say`: receives log lines.

    Raises:
      DataError: if the text is in a validation set, or an input of a layer is not finite.
      NotWritable: if the temporary file cannot be written.
    """
    reported = {}
    if evaluate.names_no_data(opened):
        if text.patterns == (calibration_text.TRAIN,):
            say("the calibration text is Python's own library, as no data is named")
    elif opened.run.data.validation:
        reported = evaluate.open_loaders(opened, (), opened.run.data.sequence, say)
    batches = calibration_text.read(opened, text.patterns, text.tokens, reported, say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        squares_of = _measured(opened, batches, folder, text.plain)
    except OSError as error:
        fix = "--out=another/place"
        raise cannot_write("the inputs of a layer", folder, error, fix=fix) from error
    importance, unread = {}, 0
    for each in tensors:
        first = each.parts[0]  # of those that are joined, which read the same inputs
        of_layer = squares_of.get((first.path, first.lead[0])) if first.lead else None
        if of_layer is None:
            continue
        inputs = of_layer[first.lead[1:]]
        if inputs.any():
            importance[each.name] = np.maximum(inputs / inputs.mean(), np.float32(LEAST))
        elif first.lead[1:] and first.path.endswith("/down/weight"):
            unread += 1
    if unread:
        say(f"experts that no token of the text chose, without importance: {unread}")
    return Importance(importance, unread)


def _measured(opened: LoadedRun, batches: Sequence[Tokens], folder: Path, plain: str) -> Squares:
    """Return the sums of squares of all layers of the float model, one at a time on one device."""
    runner = LayerRunner(opened.model.blueprint, opened.params, squares)
    squares_of: Squares = {}
    with tempfile.TemporaryFile(dir=folder) as file:
        stream = Stream(file)
        for number, batch in enumerate(batches):
            stream.write(number, runner.embed(batch))
        for place in runner.places:
            sums = _of_layer(runner, place, stream, batches)
            if not all(np.isfinite(each).all() for each in sums.values()):
                raise DataError(
                    "the inputs of a layer are not finite",
                    where=f"{place.path}, layer {place.number}",
                    why="the calibration text overflows there",
                    fix=plain,
                )
            squares_of |= sums
    return squares_of


def _of_layer(
    runner: LayerRunner, place: LayerPath, stream: Stream, batches: Sequence[Tokens]
) -> Squares:
    """Return the sums of a layer, and replace its inputs in the stream by its outputs."""
    block = runner.block(place)
    sums: Sums = {}
    for number, batch in enumerate(batches):
        outputs, added = runner.observed(place, block, stream.read(number), batch)
        sums = jax.tree.map(jnp.add, sums, added) if sums else added
        stream.write(number, outputs)
    return {
        (f"{place.path}/{name}/weight", place.number): np.asarray(each)
        for names, (each,) in sums.items()
        for name in names.split(",")
    }
