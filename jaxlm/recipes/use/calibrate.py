"""Codes of weights by what their inputs are: layer after layer, each behind the rounded ones."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, DataError, cannot_write
from jaxlm.core.nearest import divisors
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint, Params
from jaxlm.models.decoder import Decoder
from jaxlm.monitor import sinks
from jaxlm.nn.block import Block
from jaxlm.nn.linear import GroupedLinear, Linear
from jaxlm.ops import int4
from jaxlm.ops.weight_codes import WeightFormat
from jaxlm.recipes.use.layer_runner import ExpertRange, LayerPath, LayerRunner, Stream, Sums
from jaxlm.training.lock import Lock
from jaxlm.tune import folding
from jaxlm.tune.quantized import PREFIX, StoredWeight

Method = Literal["gptq", "awq"]
Leaves = dict[str, np.ndarray]
STREAM = "stream.bin"  # inputs of the layer that is next, on the disk
FACTS = "calibration.json"
UNREAD = "unread"  # in the place of a leaf: the number of experts that no token chose


class Calibrated(NamedTuple):
    """The new leaves by path, and how many experts, over all layers, no token chose."""

    leaves: Leaves
    unread: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The model, the rows that its layers read, and the folder of finished layers.

    Attributes:
      blueprint: the model without codes.
      params: its parameters, on any mesh.
      layers: the quantized layers by the paths of their weights.
      method: the search for codes.
      batches: the rows.
      facts: all that the codes depend on; a folder of other facts is emptied.
      folder: where each finished layer is kept.
      nearest: the command that rounds to nearest instead, for errors.
      `say`: receives log lines.
    """

    blueprint: Blueprint
    params: Params
    layers: Mapping[str, StoredWeight]
    method: Method
    batches: Sequence[Tokens]
    facts: dict[str, Any]
    folder: Path
    nearest: str
    say: Log

    def run(self) -> Calibrated:
        """Return the codes and, of AWQ, the other leaves that changed; stacks are whole.

        A layer is on one device at a time, with the sums of its inputs; the inputs themselves are
        a file. A finished layer is kept, so that the same call after a kill reads it.

        Raises:
          ConfigError: if the model is no decoder.
          DataError: if an input of a layer is not finite.
          InUse: if another process does the same.
          NotWritable: if the folder cannot be written.
        """
        if not isinstance(self.blueprint.merge(self.blueprint.shapes), Decoder):
            raise ConfigError(
                "only decoders are calibrated",
                where=f"--method={self.method}",
                why="the layers of this model are no single chain of blocks",
                fix=self.nearest,
            )
        lock = Lock(self.folder / "lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            self._clear_other()
            return self._run()
        except OSError as error:
            fix = "--out=another/place"
            raise cannot_write("a quantized layer", self.folder, error, fix=fix) from error
        finally:
            lock.release()

    def _clear_other(self) -> None:
        facts = json.dumps(self.facts, sort_keys=True).encode()
        file = self.folder / FACTS
        if not file.exists() or file.read_bytes() != facts:
            for old in self.folder.glob("*.npz"):
                old.unlink()
            sinks.replace(file, facts)

    def _run(self) -> Calibrated:
        runner = LayerRunner(self.blueprint, self.params)
        with open(self.folder / STREAM, "w+b") as file:
            stream = Stream(file)
            for number, batch in enumerate(self.batches):
                stream.write(number, runner.embed(batch))
            made: dict[str, list[np.ndarray]] = {}
            places, unread = list(runner.places), 0
            for number, place in enumerate(places):
                block = runner.block(place)
                result = self._layer(number, place, block, runner, stream)
                unread += int(result.pop(UNREAD, 0))
                for name, leaf in result.items():
                    made.setdefault(f"{place.path}/{name}", []).append(leaf)
                if number + 1 < len(places):
                    self._advance(place, block, result, runner, stream)
                self.say(f"{self.method}: layer {number + 1} of {len(places)}")
        (self.folder / STREAM).unlink()
        return Calibrated({path: np.stack(leaves) for path, leaves in made.items()}, unread)

    def _layer(
        self, number: int, place: LayerPath, block: Block, runner: LayerRunner, stream: Stream
    ) -> Leaves:
        """Return the new leaves of a layer: from the folder, or from its inputs."""
        file = self.folder / f"{number:04d}.npz"
        if file.exists():
            with np.load(file) as stored:
                return dict(stored)
        formats = {
            path.removeprefix(f"{place.path}/").removesuffix("/weight"): layer.format
            for path, layer in self.layers.items()
            if path.startswith(f"{place.path}/")
        }
        sums = functools.partial(self._sums, place, block, runner, stream)
        experts = folding.expert_layers(block)
        of_experts = {name: each for name, each in formats.items() if name in experts}
        others = {name: each for name, each in formats.items() if name not in experts}
        result = solved(block, others, sums(tuple(others)), self.method) if others else {}
        result |= solved_experts(experts, of_experts, sums, self.method) if of_experts else {}
        partial = file.with_suffix(".partial")
        with open(partial, "wb") as opened:
            np.savez(opened, **result)  # type: ignore[arg-type]
        partial.replace(file)
        return result

    def _sums(
        self,
        place: LayerPath,
        block: Block,
        runner: LayerRunner,
        stream: Stream,
        reads: tuple[str, ...] | ExpertRange,
    ) -> Sums:
        """Return the sums of `LayerRunner.inputs` over all batches."""
        sums: Sums = {}
        for number, batch in enumerate(self.batches):
            added = runner.inputs(place, block, reads, stream.read(number), batch)
            sums = jax.tree.map(jnp.add, sums, added) if sums else added
        if not is_finite([np.asarray(each) for each in jax.tree.leaves(sums)]):
            raise DataError(
                "the inputs of a layer are not finite",
                where=f"{place.path}, layer {place.number}",
                why="the calibration text overflows there",
                fix=self.nearest,
            )
        return sums

    def _advance(
        self, place: LayerPath, block: Block, result: Leaves, runner: LayerRunner, stream: Stream
    ) -> None:
        """Replace the inputs of a layer by its outputs with rounded weights."""
        nodes = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(block)}
        for changed, leaf in result.items():  # of a layer that the folder has, too
            node, _, name = changed.rpartition("/")
            if not name.startswith(PREFIX):
                getattr(nodes[node], name)[...] = jnp.asarray(leaf)
        path = f"{place.path}/{{}}/weight"
        layers: dict[str, Any] = {**folding.linear_layers(block), **folding.expert_layers(block)}
        for name, layer in layers.items():
            stored = {each: result.get(f"{name}/{PREFIX}{each}") for each in LEAVES}
            leaves = {each: jnp.asarray(leaf) for each, leaf in stored.items() if leaf is not None}
            if leaves:
                values = self.layers[path.format(name)].read_layer(leaves)
                layer.weight[...] = values.astype(layer.weight[...].dtype)
        for number, batch in enumerate(self.batches):
            stream.write(number, runner.outputs(place, block, stream.read(number), batch))


LEAVES = ("codes", "scales", "zeros")


def solved(
    block: Block,
    formats: Mapping[str, WeightFormat],
    sums: Sums,
    method: Method,
) -> Leaves:
    """Return the codes of a block's weights and, of AWQ, the leaves that its factors changed.

    Args:
      block: the block; AWQ changes its leaves.
      formats: of the quantized linear layers by path.
      sums: of their inputs, see `LayerRunner.inputs`.
      method: the search.
    """
    grams, magnitudes = _by_name(sums)
    layers, result = folding.linear_layers(block), {}
    if method == "awq":
        folds = list(folding.folds(block))
        for fold in folds:
            _fold(fold, layers, formats, grams, magnitudes)
        paths = {id(node): "/".join(map(str, path)) for path, node in nnx.iter_graph(block)}
        changed = {paths[id(fold.source)] for fold in folds}
        changed = changed.union(*(fold.readers for fold in folds))
        quantized = {f"{name}/weight" for name in formats}
        result = {
            path: np.asarray(leaf)
            for path, leaf in _leaves(block).items()
            if path.rpartition("/")[0] in changed and path not in quantized
        }
    for name, format in formats.items():
        layer = layers[name]
        leaves = _searched(_matrix(layer), grams[name], format, method)
        result |= {
            f"{name}/{PREFIX}{leaf}": values.reshape(len(values), *layer.outs)
            for leaf, values in leaves.items()
        }
    return result


def solved_experts(
    experts: Mapping[str, GroupedLinear],
    formats: Mapping[str, WeightFormat],
    sums: Callable[[ExpertRange], Sums],
    method: Method,
) -> Leaves:
    """Return the codes of the experts of a block, and at UNREAD how many no token chose.

    Those are rounded to nearest. The inputs are summed for `experts_at_once` experts at a time.

    Args:
      experts: all weights of the experts by path.
      formats: of those that are quantized.
      sums: returns the sums of the inputs of some experts.
      method: the search.
    """
    count, at_once = len(experts["mlp/gate"].weight[...]), experts_at_once(experts)
    made: dict[str, list[np.ndarray]] = {}
    unread = 0

    def solve(some: ExpertRange) -> int:  # its sums are freed before those of the next ones
        grams, magnitudes = _by_name(sums(some))
        for name, format in formats.items():
            weights = experts[name].weight[some.first : some.first + some.size]
            for each, gram in zip(np.asarray(weights), grams[name], strict=True):
                leaves = _searched(each.astype(np.float32), gram, format, method)
                for leaf, values in leaves.items():
                    made.setdefault(f"{name}/{PREFIX}{leaf}", []).append(values)
        is_read = np.stack([magnitudes[name].any(-1) for name in formats]).any(0)
        return some.size - int(is_read.sum())

    for first in range(0, count, at_once):
        unread += solve(ExpertRange(first, at_once))
    return {path: np.stack(leaves) for path, leaves in made.items()} | {UNREAD: np.asarray(unread)}


def experts_at_once(experts: Mapping[str, GroupedLinear]) -> int:
    """Return the experts for which two sets of Gram matrices are no larger than all weights.

    One set is that of a batch, which is added to the other. At least one expert has its own.
    """
    shapes = {name: layer.weight[...].shape for name, layer in experts.items()}
    weights = sum(map(math.prod, shapes.values()))
    count, width, hidden = shapes["mlp/gate"]
    sizes = (each for each in divisors(count) if 2 * each * (width**2 + hidden**2) <= weights)
    return max(sizes, default=1)


def _by_name(sums: Sums) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the Gram matrices and the sums of |x| by the path of each weight."""
    grams, magnitudes = {}, {}
    for names, (gram, magnitude) in sums.items():
        both = np.asarray(gram), np.asarray(magnitude)
        for name in names.split(","):
            grams[name], magnitudes[name] = both
    return grams, magnitudes


def _searched(weight: np.ndarray, gram: np.ndarray, format: WeightFormat, method: Method) -> Leaves:
    """Return the leaves of a weight [I, O], which are rounded to nearest if all inputs were 0."""
    if method == "gptq":
        return int4.gptq(weight, gram, format).leaves(format)
    return int4.nearest(weight, int4.searched(weight, gram, format), format).leaves(format)


def _fold(
    fold: folding.Fold,
    layers: Mapping[str, Linear],
    formats: Mapping[str, WeightFormat],
    grams: dict[str, np.ndarray],
    magnitudes: Mapping[str, np.ndarray],
) -> None:
    """Apply the factors of a fold to the layers and to the Gram matrices of their inputs."""
    rounded = [name for name in fold.readers if name in formats]
    if not rounded:
        return
    first = rounded[0]
    weights = [_matrix(layers[name]) for name in rounded]
    sizes = magnitudes[first]
    if fold.repeats > 1:  # equal factors for all query heads of a head of values
        heads = sizes.reshape(-1, fold.repeats, layers[first].ins[-1])
        sizes = np.broadcast_to(heads.mean(1, keepdims=True), heads.shape).reshape(-1)
    factors = int4.awq_scales(weights, grams[first], sizes, formats[first])
    if layers[first].weight[...].dtype != jnp.float32:
        factors = 2 ** np.round(np.log2(factors))  # exact in fewer bits
    folding.apply(fold, jnp.asarray(factors), dict(layers))
    for name in rounded:
        grams[name] = grams[name] / np.outer(factors, factors)


def is_finite(arrays: Sequence[np.ndarray]) -> bool:
    """Return True if all numbers are finite."""
    return all(bool(np.isfinite(each).all()) for each in arrays)


def _matrix(layer: Linear) -> np.ndarray:
    weight = np.asarray(layer.weight[...]).astype(np.float32)
    return weight.reshape(int(np.prod(layer.ins)), -1)


def _leaves(block: nnx.Module) -> dict[str, Array]:
    return tree.leaves(nnx.to_pure_dict(nnx.state(block)))
