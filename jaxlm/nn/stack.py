"""The only loop over layers."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.nn import intermediates
from jaxlm.nn.attention import CrossAttention, CrossInputs
from jaxlm.nn.block import Block
from jaxlm.nn.cache import EncoderKV, LayerCache
from jaxlm.nn.config import BlockConfig
from jaxlm.nn.dropout import layer_drop
from jaxlm.nn.init import Initializer
from jaxlm.nn.intermediates import Intermediates
from jaxlm.nn.linear import GroupedLinear, Linear
from jaxlm.nn.remat import rematerialised
from jaxlm.ops.masks import Mask
from jaxlm.parallel import pipeline, rules
from jaxlm.parallel.schedule import Schedule

# Layers one after the other, each with parameters and a cache of its own.


Caches = dict[str, tuple[LayerCache, ...]]  # by kind: one for each layer of it


class Unstacked(nnx.Module):
    """The blocks of a stack in a row; layer i is of kind i % kinds."""

    def __init__(self, blocks: list[Block], kinds: int):
        self.blocks, self.kinds = nnx.List(blocks), kinds

    @classmethod
    def of(cls, stacked: dict[str, tuple[Any, Any]], depth: int) -> "Unstacked":
        """Cut out of what is stacked: for each kind, the graph of one block and the state of all of them."""
        kinds = len(stacked)
        blocks = []
        for number in range(depth):
            graphdef, state = stacked[str(number % kinds)]
            own = jax.tree.map(lambda leaf, at=number // kinds: leaf[at], state)
            blocks.append(nnx.merge(graphdef, own))
        return cls(blocks, kinds)

    def settle(self) -> None:
        """Holds each weight as a few rows meet it fastest, so that no product casts it again."""
        for block in self.blocks:
            for _, module in nnx.iter_graph(block):
                if isinstance(module, (Linear, GroupedLinear)):
                    module.relayout_for_decode()

    def across(self, values: Float[Array, "B S D"]) -> dict[str, tuple[EncoderKV, ...]]:
        """Each layer's keys and values of what an encoder has read, by kind; for a `Memory`."""
        found: dict[str, tuple[EncoderKV, ...]] = {}
        for number, block in enumerate(self.blocks):
            assert isinstance(block.cross, CrossAttention)
            name = str(number % self.kinds)
            found[name] = (*found.get(name, ()), block.cross.cross_kv(values))
        return found

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        memory: CrossInputs | None = None,
        caches: Caches,
        start: Int[Array, "B"],
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Caches, dict[str, Mean]]:
        """As `Stack`, whose caches are never put together: a step then writes into each where it lies."""
        keys = [None] * len(self.blocks) if key is None else jax.random.split(key, len(self.blocks))
        written: dict[str, tuple[LayerCache, ...]] = dict.fromkeys(caches, ())
        losses = []
        known = None if memory is None else memory.layers
        for number, (block, own) in enumerate(zip(self.blocks, keys, strict=True)):
            name, place = str(number % self.kinds), number // self.kinds
            x, cache, added = block(
                x,
                positions=positions,
                mask=mask,
                memory=memory,
                known=None if known is None else known[name][place],
                cache=caches[name][place],
                start=start,
                key=own,
            )
            assert cache is not None
            written[name] += (cache,)
            losses.append(added)
        return x, written, Mean.merged(*losses)


Layers = Literal["scan", "unroll"]
# By kind: state, key, how often the layer is passed by.
Parts = dict[str, tuple[Any, Array | None, Array | None]]


class Stack(nnx.Module):
    """`depth` blocks; layer i is of kind `pattern[i % len(pattern)]`.

    The blocks of one kind keep their parameters stacked along a first axis, whether they are run as a scan,
    unrolled, or as a pipeline: the tree is the same, and so are checkpoints. A pattern repeats under one scan; layers left
    over at the end are unrolled. With caches they are always, see `nn.unstacked`.

    With a `schedule`, the layers are run as a pipeline, each stage looping over its own; but not with caches, nor for a
    batch too small for it: there the loop is the plain one, and reads each layer's parameters from the stage that has
    them. A layer's dropout then draws by micro-batch, and so other numbers than without the pipeline.

    With `drops`, a row passes by layer i at the rate drops[i] wherever there is a key: see `dropout.layer_drop`. What the
    layer adds to the objective stays.

    `remat` says what the backward pass computes again, layer by layer: see `nn.remat` for the policies. Of several with a
    slash between them, as in `full/none`, layer i of the loop has the (i % their number)-th; a pipeline's stage counts its own.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        pattern: tuple[BlockConfig, ...],
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
        layers: Layers,
        remat: str,
        schedule: Schedule | None = None,
        axis: str = "layers",
        name: str = "stack",
        drops: tuple[float, ...] = (),
    ):
        # Kinds that a shallow stack never reaches would be parameters without a layer.
        pattern = pattern[:depth]
        self.depth, self.kinds, self.layers, self.remat = depth, len(pattern), layers, remat
        self.schedule, self.axis, self.name, self.drops = schedule, axis, name, drops
        keys = jax.random.split(key, depth)
        for kind, config in enumerate(pattern):

            def make(layer_key: Array, config: BlockConfig = config) -> nnx.State:
                return nnx.state(
                    Block(width, config, key=layer_key, init=init, precision=precision)
                )

            one = nnx.eval_shape(
                lambda config=config: Block(
                    width, config, key=keys[0], init=init, precision=precision
                )
            )
            setattr(
                self,
                str(kind),
                nnx.merge(nnx.graphdef(one), jax.vmap(make)(keys[kind :: len(pattern)])),
            )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        memory: CrossInputs | None = None,
        caches: Caches | None = None,
        start: Int[Array, "B"] | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Caches | None, dict[str, Mean]]:
        """The stream after all layers, every layer's cache, and what layers add to the objective, summed over them."""
        if caches is not None:
            assert start is not None
            return self.unstacked()(
                x,
                positions=positions,
                mask=mask,
                memory=memory,
                caches=caches,
                start=start,
                key=key,
            )
        split = self._split()
        blocks = {name: graphdef for name, (graphdef, _) in split.items()}
        layers: Parts = {
            name: (
                state,
                None if key is None else _kind_keys(key, self.depth, self.kinds, int(name)),
                jnp.array(self.drops[int(name) :: self.kinds], jnp.float32)
                if self.drops and key is not None
                else None,
            )
            for name, (_, state) in split.items()
        }
        ways = rules.split(jax.sharding.get_abstract_mesh(), "batch")
        schedule = self.schedule and self.schedule.fitted(x.shape[0], ways)
        if not schedule:
            run = functools.partial(_layer, blocks, positions, mask, memory)
            x, notes, losses = self._loop(run, x, layers, self.depth)
            intermediates.put(self.name, notes)
            return x, None, losses
        dealt = jax.tree.map(
            lambda rows: pipeline.split_microbatches(rows, schedule.microbatches),
            {"positions": positions} | _rows(mask, x.shape[0]),
        )

        def stage(layers: Parts, x: Array, microbatch: Array) -> tuple[Array, dict[str, Mean]]:
            rows = jax.tree.map(
                lambda parts: lax.dynamic_index_in_dim(parts, microbatch, keepdims=False), dealt
            )
            positions = rows.pop("positions")
            own: Parts = {
                name: (state, keys if keys is None else _folded(keys, microbatch), drops)
                for name, (state, keys, drops) in layers.items()
            }
            run = functools.partial(
                _layer, blocks, positions, dataclasses.replace(mask, **rows), None
            )
            depth = self.depth // (schedule.stages * schedule.repeats)
            x, _, losses = self._loop(run, x, own, depth, mapped=True)
            return x, losses

        x, losses = pipeline.run_pipeline(
            stage, layers, pipeline.split_microbatches(x, schedule.microbatches), schedule
        )
        return pipeline.merge_microbatches(x), None, losses

    def across(self, values: Float[Array, "B S D"]) -> dict[str, tuple[EncoderKV, ...]]:
        """As `Unstacked.across`."""
        return self.unstacked().across(values)

    def unstacked(self) -> Unstacked:
        """The blocks, cut out one by one."""
        return Unstacked.of(self._split(), self.depth)

    def _split(self) -> dict[str, tuple[Any, Any]]:
        """By kind: the graph of a block, and the state of all of them."""
        return {str(kind): nnx.split(getattr(self, str(kind))) for kind in range(self.kinds)}

    def _loop(
        self,
        run: Callable[..., tuple[Array, Intermediates, dict[str, Mean]]],
        x: Array,
        layers: Parts,
        depth: int,
        *,
        mapped: bool = False,
    ) -> tuple[Array, dict[str, Intermediates], dict[str, Mean]]:
        """Runs `depth` layers. `mapped` says that this is done for several stages at once."""
        policies = self.remat.split("/")
        # One turn of the scan is the shortest run of layers after which kinds and policies begin again.
        turn = math.lcm(self.kinds, len(policies))
        turns = 0 if self.layers == "unroll" else depth // turn
        inside = turns * turn // self.kinds  # layers of each kind that are in the scan

        def together(
            x: Array, layers: dict[str, list[Any]], numbers: range, *, looped: bool
        ) -> tuple[Array, dict[str, list[Intermediates]], dict[str, Mean]]:
            """Runs the layers of these numbers, the first of which begins a pattern; `layers` has them by kind."""
            notes: dict[str, list[Intermediates]] = {name: [] for name in layers}
            losses = []
            for place, number in enumerate(numbers):
                name, policy = str(number % self.kinds), policies[number % len(policies)]
                layer = rematerialised(
                    functools.partial(run, name), policy, looped=looped, mapped=mapped
                )
                x, own, added = layer(x, *layers[name][place // self.kinds])
                notes[name].append(own)
                losses.append(added)
            return x, notes, Mean.merged(*losses)

        def body(x: Array, own: dict[str, list[Any]]) -> tuple[Array, Any]:
            x, notes, added = together(x, own, range(turn), looped=True)
            return x, ({name: _stack(each) for name, each in notes.items()}, added)

        notes: dict[str, list[Intermediates]] = {name: [] for name in layers}
        losses: list[dict[str, Mean]] = []
        if turns:
            # Each layer of a turn is an argument of its own: of what is cut out of one inside the loop, as weights are
            # read again going back, the scan would keep a copy for every turn.
            count = inside // turns
            dealt = {
                name: [
                    jax.tree.map(lambda leaf, j=j: leaf[j:inside:count], own) for j in range(count)
                ]
                for name, own in layers.items()
            }
            x, (of_turns, added) = lax.scan(body, x, dealt)
            for name, each in of_turns.items():
                notes[name].append(jax.tree.map(_joined, each))
            losses.append(jax.tree.map(lambda layers: layers.sum(0), added))
        if turns * turn < depth:
            left = jax.tree.map(lambda leaf: leaf[inside:], layers)
            own = {name: _unstack(each) for name, each in left.items()}
            x, of_rest, added = together(x, own, range(turns * turn, depth), looped=False)
            for name, each in of_rest.items():
                if each:
                    notes[name].append(_stack(each))
            losses.append(added)
        stacked = {name: _concatenated(each) for name, each in notes.items()}
        return x, stacked, Mean.merged(*losses)


def _layer(
    blocks: dict[str, Any],
    positions: Array,
    mask: Mask,
    memory: CrossInputs | None,
    name: str,
    x: Array,
    state: Any,
    key: Array | None,
    drop: Array | None,
) -> tuple[Array, Intermediates, dict[str, Mean]]:
    block = nnx.merge(blocks[name], state)
    with intermediates.capture_layer() as notes:
        after, _, losses = block(x, positions=positions, mask=mask, memory=memory, key=key)
    if drop is not None:
        assert key is not None
        after = layer_drop(x, after, drop, random.stream(key, "layer drop"))
    return after, notes, losses


def _rows(mask: Mask, rows: int) -> dict[str, Array]:
    """The parts of a mask that differ from row to row."""
    parts = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
    return {
        name: part
        for name, part in parts.items()
        if isinstance(part, Array) and part.shape[0] == rows > 1
    }


def _folded(keys: Array, microbatch: Array) -> Array:
    """The keys of some layers for one micro-batch."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, microbatch)


def _kind_keys(key: Array, depth: int, kinds: int, kind: int) -> Array:
    """One key for each layer of a kind; layer i's depends on i alone."""
    return jax.random.split(key, depth)[kind::kinds]


def _unstack(tree: Any) -> list[Any]:
    """The tree of each layer. Split, not indexed, so that the gradients are concatenated instead of added up in zeros."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [
        [part[0] for part in lax.split(leaf, (1,) * leaf.shape[0])]
        if not _is_key(leaf)
        else list(leaf)
        for leaf in leaves
    ]
    return [jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True)]


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _joined(leaf: Array) -> Array:
    """Turns and the layers of a turn as one axis."""
    return leaf.reshape(-1, *leaf.shape[2:])


def _concatenated(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
