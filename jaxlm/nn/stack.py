"""The only loop over layers."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.nn import intermediates
from jaxlm.nn.attention import CrossAttention, LayerInputs
from jaxlm.nn.block import Block
from jaxlm.nn.cache import AnyCache, EncoderKV
from jaxlm.nn.config import BlockConfig
from jaxlm.nn.dropout import layer_drop, with_layer_key
from jaxlm.nn.init import Initializer
from jaxlm.nn.intermediates import Intermediates
from jaxlm.nn.linear import GroupedLinear, Linear
from jaxlm.nn.remat import rematerialize
from jaxlm.ops.masks import Mask
from jaxlm.parallel import pipeline, rules
from jaxlm.parallel.schedule import Schedule

Caches = dict[str, tuple[AnyCache, ...]]  # by kind: one for each layer of it
Layers = Literal["scan", "unroll"]
# By kind: parameters, keys and rates of stochastic depth, each with a first axis of layers.
LayerStates = dict[str, tuple[Any, Array | None, Array | None]]
LayerOutputs = tuple[Array, Intermediates, dict[str, Mean]]


class Unstacked(nnx.Module):
    """Blocks as modules with caches that a step writes in place; layer i is of kind i % kinds."""

    def __init__(self, blocks: list[Block], kinds: int):
        self.blocks, self.kinds = nnx.List(blocks), kinds

    @classmethod
    def of(cls, stacked: dict[str, tuple[Any, Any]], depth: int) -> "Unstacked":
        """Unstack each kind, given as the graph of one block and the state of all of them."""
        kinds = len(stacked)
        blocks = []
        for number in range(depth):
            graphdef, state = stacked[str(number % kinds)]
            layer = jax.tree.map(lambda leaf, i=number // kinds: leaf[i], state)
            blocks.append(nnx.merge(graphdef, layer))
        return cls(blocks, kinds)

    def relayout_for_decode(self) -> None:
        """Store each weight in the layout and dtype fastest for a few rows."""
        for block in self.blocks:
            for _, module in nnx.iter_graph(block):
                if isinstance(module, (Linear, GroupedLinear)):
                    module.relayout_for_decode()

    def cross_kv(self, values: Float[Array, "B S D"]) -> dict[str, tuple[EncoderKV, ...]]:
        """Return each layer's keys and values of an encoder's outputs, by kind."""
        layers: dict[str, tuple[EncoderKV, ...]] = {}
        for number, block in enumerate(self.blocks):
            assert isinstance(block.cross, CrossAttention)
            name = str(number % self.kinds)
            layers[name] = (*layers.get(name, ()), block.cross.cross_kv(values))
        return layers

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: LayerInputs,
        *,
        caches: Caches,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Caches, dict[str, Mean]]:
        """Run all layers with their caches, as `Stack` does; layers of a kind are traced once."""
        run_layer = functools.cache(
            lambda graphdef: jax.jit(functools.partial(_run_cached, graphdef, inputs))
        )
        keys = [None] * len(self.blocks) if key is None else jax.random.split(key, len(self.blocks))
        written: dict[str, tuple[AnyCache, ...]] = dict.fromkeys(caches, ())
        losses = []
        cross_kv = None if inputs.memory is None else inputs.memory.layers
        for number, (block, block_key) in enumerate(zip(self.blocks, keys, strict=True)):
            name, i = str(number % self.kinds), number // self.kinds
            graphdef, state = nnx.split(block)
            cross = None if cross_kv is None else cross_kv[name][i]
            x, cache, added = run_layer(graphdef)(state, x, cross, caches[name][i], block_key)
            written[name] += (cache,)
            losses.append(added)
        return x, written, Mean.merged(*losses)


class StackSpec(NamedTuple):
    """The layers of a stack: layer i is of kind `pattern[i % len(pattern)]`.

    Attributes:
      width: size of the stream.
      depth: number of layers.
      pattern: the kinds of layers.
      axis: logical name of the first axis of stacked parameters.
      name: prefix of the names of intermediates.
      drops: rate at which a row skips each layer, see `dropout.layer_drop`; empty for no skips.
    """

    width: int
    depth: int
    pattern: tuple[BlockConfig, ...]
    axis: str = "layers"
    name: str = "stack"
    drops: tuple[float, ...] = ()


class Stack(nnx.Module):
    """The blocks of a `StackSpec`.

    The parameters of a kind are stacked along a first axis in a scan, an unrolled loop and a
    pipeline: the tree is the same, and so are checkpoints. A pattern repeats under one scan;
    remaining layers are unrolled. With caches all layers are, see `Unstacked`.

    With a `schedule` the layers run as a pipeline, each stage looping over its own layers. With
    caches, or for a batch too small for the schedule, the plain loop runs and reads each layer's
    parameters from its stage. Dropout draws by micro-batch in a pipeline, and so other numbers.

    With `drops` and a key rows skip layers; the layers' terms of the objective remain.

    `remat` is a policy of `nn.remat`, or several joined by a slash: with `full/none` layer i of
    the loop has policy i % 2. Each stage of a pipeline counts its own layers.
    """

    def __init__(
        self,
        spec: StackSpec,
        *,
        key: Array,
        init: Initializer,
        layers: Layers,
        remat: str,
        schedule: Schedule | None = None,
    ):
        width, depth, pattern, self.axis, self.name, self.drops = spec
        pattern = pattern[:depth]  # a kind that a shallow stack never reaches has no parameters
        self.depth, self.kinds, self.layers, self.remat = depth, len(pattern), layers, remat
        self.schedule = schedule
        keys = jax.random.split(key, depth)
        for kind, config in enumerate(pattern):

            def make(key: Array, config: BlockConfig = config) -> Block:
                return Block(width, config, key=key, init=init)

            one = nnx.eval_shape(functools.partial(make, keys[0]))
            states = jax.vmap(lambda key, make=make: nnx.state(make(key)))(
                keys[kind :: len(pattern)]
            )
            setattr(self, str(kind), nnx.merge(nnx.graphdef(one), states))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: LayerInputs,
        *,
        caches: Caches | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Caches | None, dict[str, Mean]]:
        """Return the stream, every layer's cache, and the sums of the layers' loss terms."""
        if caches is not None:
            return self.unstacked()(x, inputs, caches=caches, key=key)
        split = self._split()
        blocks = {name: graphdef for name, (graphdef, _) in split.items()}
        layers: LayerStates = {
            name: (
                state,
                None if key is None else jax.random.split(key, self.depth)[int(name) :: self.kinds],
                jnp.array(self.drops[int(name) :: self.kinds], jnp.float32)
                if self.drops and key is not None
                else None,
            )
            for name, (_, state) in split.items()
        }
        ways = rules.split(jax.sharding.get_abstract_mesh(), "batch")
        schedule = self.schedule and self.schedule.fitted(x.shape[0], ways)
        if not schedule:
            run = functools.partial(_run_layer, blocks, inputs)
            x, captured, losses = self._loop(run, x, layers, self.depth)
            intermediates.record_stack(self.name, captured)
            return x, None, losses
        microbatches = jax.tree.map(
            lambda rows: pipeline.split_microbatches(rows, schedule.microbatches),
            {"positions": inputs.positions} | _per_row(inputs.mask, x.shape[0]),
        )

        def stage(
            layers: LayerStates, x: Array, microbatch: Array
        ) -> tuple[Array, dict[str, Mean]]:
            rows = jax.tree.map(
                lambda parts: lax.dynamic_index_in_dim(parts, microbatch, keepdims=False),
                microbatches,
            )
            positions = rows.pop("positions")
            fold_in = jax.vmap(jax.random.fold_in, (0, None))
            layers = {
                name: (state, keys if keys is None else fold_in(keys, microbatch), drops)
                for name, (state, keys, drops) in layers.items()
            }
            own_inputs = LayerInputs(positions, dataclasses.replace(inputs.mask, **rows))
            run = functools.partial(_run_layer, blocks, own_inputs)
            depth = self.depth // (schedule.stages * schedule.repeats)
            x, _, losses = self._loop(run, x, layers, depth, mapped=True)
            return x, losses

        x, losses = pipeline.run_pipeline(
            stage, layers, pipeline.split_microbatches(x, schedule.microbatches), schedule
        )
        return pipeline.merge_microbatches(x), None, losses

    def cross_kv(self, values: Float[Array, "B S D"]) -> dict[str, tuple[EncoderKV, ...]]:
        """Return each layer's keys and values of an encoder's outputs, by kind."""
        return self.unstacked().cross_kv(values)

    def unstacked(self) -> Unstacked:
        """Return the blocks as separate modules."""
        return Unstacked.of(self._split(), self.depth)

    def _split(self) -> dict[str, tuple[Any, Any]]:
        """By kind: the graph of a block, and the state of all of them."""
        return {str(kind): nnx.split(getattr(self, str(kind))) for kind in range(self.kinds)}

    def _loop(
        self,
        run: Callable[..., LayerOutputs],
        x: Array,
        layers: LayerStates,
        depth: int,
        *,
        mapped: bool = False,
    ) -> tuple[Array, dict[str, Intermediates], dict[str, Mean]]:
        """Run `depth` layers, with `mapped` those of several stages at once."""
        policies = self.remat.split("/")
        # The body of the scan is the shortest run of layers with a period of kinds and policies.
        period = math.lcm(self.kinds, len(policies))
        repeats = 0 if self.layers == "unroll" else depth // period
        scanned = repeats * period // self.kinds  # layers of each kind in the scan

        def unrolled(
            x: Array, layers: dict[str, list[Any]], numbers: range, *, looped: bool
        ) -> tuple[Array, dict[str, list[Intermediates]], dict[str, Mean]]:
            """Run the layers of these numbers; the first begins a pattern."""

            @functools.cache
            def layer(name: str, policy: str) -> Callable[..., LayerOutputs]:
                one = rematerialize(
                    functools.partial(run, name), policy, looped=looped, mapped=mapped
                )
                return one if looped else jax.jit(one)  # traced once for all layers

            captured: dict[str, list[Intermediates]] = {name: [] for name in layers}
            losses = []
            for i, number in enumerate(numbers):
                name, policy = str(number % self.kinds), policies[number % len(policies)]
                x, of_layer, added = layer(name, policy)(x, *layers[name][i // self.kinds])
                captured[name].append(of_layer)
                losses.append(added)
            return x, captured, Mean.merged(*losses)

        def body(x: Array, layers: dict[str, list[Any]]) -> tuple[Array, Any]:
            x, captured, added = unrolled(x, layers, range(period), looped=True)
            return x, ({name: _stack(each) for name, each in captured.items()}, added)

        captured: dict[str, list[Intermediates]] = {name: [] for name in layers}
        losses: list[dict[str, Mean]] = []
        if repeats:
            # Each layer of a period is an argument of its own: the scan would store a copy per
            # iteration of slices cut inside the loop, as the backward pass reads weights again.
            count = scanned // repeats
            slices = {
                name: [
                    jax.tree.map(lambda leaf, i=i: leaf[i:scanned:count], states)
                    for i in range(count)
                ]
                for name, states in layers.items()
            }
            x, (in_scan, added) = lax.scan(body, x, slices)
            for name, each in in_scan.items():
                captured[name].append(
                    jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), each)
                )
            losses.append(jax.tree.map(lambda layers: layers.sum(0), added))
        if repeats * period < depth:
            rest = jax.tree.map(lambda leaf: leaf[scanned:], layers)
            unstacked = {name: _unstack(states) for name, states in rest.items()}
            numbers = range(repeats * period, depth)
            x, in_rest, added = unrolled(x, unstacked, numbers, looped=False)
            for name, each in in_rest.items():
                if each:
                    captured[name].append(_stack(each))
            losses.append(added)
        joined = {
            name: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
            for name, parts in captured.items()
        }
        return x, joined, Mean.merged(*losses)


def _run_cached(
    graphdef: Any,
    inputs: LayerInputs,
    state: Any,
    x: Array,
    cross_kv: EncoderKV | None,
    cache: AnyCache,
    key: Array | None,
) -> tuple[Array, AnyCache, dict[str, Mean]]:
    """Run a layer with its cache."""
    block = nnx.merge(graphdef, state)
    x, written, losses = block(x, inputs, cross_kv=cross_kv, cache=cache, key=key)
    assert written is not None
    return x, written, losses


def _run_layer(
    blocks: dict[str, Any],
    inputs: LayerInputs,
    name: str,
    x: Array,
    state: Any,
    key: Array | None,
    drop: Array | None,
) -> LayerOutputs:
    block = nnx.merge(blocks[name], state)
    with intermediates.capture_layer() as captured, with_layer_key(key):
        after, _, losses = block(x, inputs, key=key)
    if drop is not None:
        assert key is not None
        after = layer_drop(x, after, drop, random.stream(key, "layer drop"))
    return after, captured, losses


def _per_row(mask: Mask, rows: int) -> dict[str, Array]:
    """Return the arrays of a mask that differ from row to row."""
    return {
        name: part
        for name, part in vars(mask).items()
        if isinstance(part, Array) and part.shape[0] == rows > 1
    }


def _unstack(tree: Any) -> list[Any]:
    """Return each layer's tree; split, so that gradients are concatenated, not added to zeros."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [
        list(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else [part[0] for part in lax.split(leaf, (1,) * leaf.shape[0])]
        for leaf in leaves
    ]
    return [jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True)]


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
