"""One layer of a decoder at a time on one device, and the sums of what its weights read."""

import functools
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint, Params
from jaxlm.models.decoder import Decoder
from jaxlm.nn.attention import LayerInputs
from jaxlm.nn.block import Block
from jaxlm.nn.linear import Linear
from jaxlm.nn.mlp import ACTIVATIONS, gated
from jaxlm.nn.moe import Moe
from jaxlm.nn.stack import Stack
from jaxlm.ops.matmul import matmul
from jaxlm.tune import folding, surgery

STACKS = ("prefix", "stack")
# By the paths of layers that read the same inputs, joined by commas: sums over the inputs; for each
# expert, if they are the weights of experts.
Sums = dict[str, tuple[Array, ...]]
Summed = Callable[[Array], tuple[Array, ...]]  # of inputs [N, I]


class LayerPath(NamedTuple):
    """A layer: the path of its leaves, and its number among the layers of its kind."""

    path: str  # such as stack/0
    number: int


class Stream:
    """The inputs of a layer by batch, in a file, as memory has one batch."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._shape: tuple[int, ...] = ()
        self._dtype = np.dtype(np.float32)

    def write(self, number: int, x: Array) -> None:
        """Write the inputs of a batch; all batches have the same shape."""
        values = np.asarray(x)
        self._shape, self._dtype = values.shape, values.dtype
        self._file.seek(number * values.nbytes)
        self._file.write(values.tobytes())

    def read(self, number: int) -> np.ndarray:
        """Return the inputs of a batch."""
        size = int(np.prod(self._shape)) * self._dtype.itemsize
        self._file.seek(number * size)
        return np.frombuffer(self._file.read(size), self._dtype).reshape(self._shape)


class _Start:
    """In the place of a stack: its inputs."""

    x: Array
    inputs: LayerInputs

    def __call__(self, x: Array, inputs: LayerInputs, **_: Any) -> tuple[Array, None, dict]:
        self.x, self.inputs = x, inputs
        return x, None, {}


class _Observed:
    """In the place of a linear layer: it adds its inputs to a list."""

    def __init__(self, name: str, layer: Linear, seen: list[tuple[str, int, Array]]):
        self._name, self._layer, self._seen = name, layer, seen

    def __call__(self, x: Array) -> Array:
        self._seen.append((self._name, len(self._layer.ins), x))
        return self._layer(x)


class ExpertRange(NamedTuple):
    """`size` experts of a layer from number `first` on."""

    first: int
    size: int


class _ObservedRouter:
    """In the place of a router: it sums the inputs of experts for which it chooses them.

    `first` and `size` are of an `ExpertRange`; `is_counted` is [B, T], False for padding; `summed`
    is that of the `LayerRunner`. The sums are in `sums` after a call.
    """

    def __init__(self, moe: Moe, first: Array, size: int, is_counted: Array, summed: Summed):
        self._moe, self._router = moe, moe.router
        self._first, self._size = first, size
        self._is_counted, self._summed = is_counted, summed
        self.sums: Sums = {}

    def __call__(self, x: Array) -> Array:
        logits, moe = self._router(x), self._moe
        chosen = moe.routes(logits).choices.reshape(-1, moe.config.top_k)
        rows, activation = x.reshape(-1, x.shape[-1]), ACTIVATIONS[moe.config.activation]
        is_counted = self._is_counted.reshape(-1)
        weights = moe.gate.values(), moe.up.values()

        def of_expert(number: Array) -> Any:
            is_read = (chosen == number).any(-1) & is_counted
            inputs = jnp.where(is_read[:, None], rows, 0.0)
            low = inputs.astype(moe.gate.precision.activations)
            products = (matmul(low, each[number], moe.gate.precision) for each in weights)
            hidden = gated(activation, *products).astype(jnp.float32)
            return self._summed(inputs), self._summed(hidden)

        read, hidden = jax.lax.map(of_expert, self._first + jnp.arange(self._size))
        self.sums = {"mlp/gate,mlp/up": read, "mlp/down": hidden}
        return logits


def gram_and_magnitudes(rows: Array) -> tuple[Array, Array]:
    """Return x^T x [I, I] and the sum of |x| [I] over rows."""
    return jnp.matmul(rows.T, rows, precision="highest"), jnp.abs(rows).sum(0)


def squares(rows: Array) -> tuple[Array]:
    """Return the sum of x^2 [I] over rows."""
    return (jnp.square(rows).sum(0),)


class LayerRunner:
    """One layer at a time of a decoder, on one device.

    Args:
      blueprint, params: the decoder.
      summed: what is summed of the inputs that weights read.
    """

    def __init__(self, blueprint: Blueprint, params: Params, summed: Summed = gram_and_magnitudes):
        self._blueprint, self._summed = blueprint, summed
        outer = {name: leaf for name, leaf in params.items() if name not in STACKS}
        self._outer = _on_one_device(outer)
        self._stacked = {name: params[name] for name in STACKS if name in params}
        module = blueprint.merge(blueprint.shapes)
        assert isinstance(module, Decoder)
        self.places: list[LayerPath] = []
        self._graphs: dict[str, tuple[Any, Any]] = {}
        for name in STACKS:
            stack: Stack | None = getattr(module, name)
            for number in range(0 if stack is None else stack.depth):
                assert stack is not None
                index, kind = divmod(number, stack.kinds)
                self.places.append(LayerPath(f"{name}/{kind}", index))
            for kind in range(0 if stack is None else stack.kinds):
                graph, state = nnx.split(getattr(stack, str(kind)))
                self._graphs[f"{name}/{kind}"] = graph, jax.tree.structure(state)
        self._programs: dict[Any, Any] = {}
        self._embed = jax.jit(lambda outer, batch: self._start(outer, batch).x)

    def block(self, place: LayerPath) -> Block:
        """Return a layer with its weights."""
        name, kind = place.path.split("/")
        leaves = [leaf[place.number] for leaf in jax.tree.leaves(self._stacked[name][kind])]
        graph, treedef = self._graphs[place.path]
        return nnx.merge(graph, jax.tree.unflatten(treedef, _on_one_device(leaves)))

    def embed(self, batch: Tokens) -> Array:
        """Return the stream before the first layer."""
        return self._embed(self._outer, batch)

    def outputs(self, place: LayerPath, block: Block, x: np.ndarray, batch: Tokens) -> Array:
        """Return the stream after a layer."""
        program = self._program(place, "outputs", self._outputs)
        return program(self._outer, nnx.state(block), x, batch)

    def inputs(
        self,
        place: LayerPath,
        block: Block,
        reads: tuple[str, ...] | ExpertRange,
        x: np.ndarray,
        batch: Tokens,
    ) -> Sums:
        """Return sums over the tokens of a batch, padding left out.

        Args:
          place, block: the layer.
          reads: paths of the linear layers in it, or experts.
          x: inputs of the layer, the stream.
          batch: the batch.
        """
        inputs = self._outer, nnx.state(block), x, batch
        if not isinstance(reads, ExpertRange):
            return self._program(place, reads, self._inputs, reads)(*inputs)
        program = self._program(place, reads.size, self._expert_inputs, reads.size)
        return program(*inputs, reads.first)

    def observed(
        self, place: LayerPath, block: Block, x: np.ndarray, batch: Tokens
    ) -> tuple[Array, Sums]:
        """Return `outputs`, and `inputs` of all linear layers and experts, of one pass."""
        program = self._program(place, "observed", self._observed)
        return program(self._outer, nnx.state(block), x, batch)

    def _program(self, place: LayerPath, key: Any, function: Any, *fixed: Any) -> Any:
        """Return a compiled function of the outer leaves, those of a layer, x and the batch."""
        if (place.path, key) not in self._programs:
            graph, _ = self._graphs[place.path]
            compiled = jax.jit(functools.partial(function, graph, *fixed))
            self._programs[place.path, key] = compiled
        return self._programs[place.path, key]

    def _outputs(self, graph: Any, outer: Params, state: Any, x: Array, batch: Tokens) -> Array:
        return nnx.merge(graph, state)(x, self._start(outer, batch).inputs)[0]

    def _expert_inputs(
        self,
        graph: Any,
        size: int,
        outer: Params,
        state: Any,
        x: Array,
        batch: Tokens,
        first: Array,
    ) -> Sums:
        block = nnx.merge(graph, state)
        observed = _ObservedRouter(block.mlp, first, size, batch.segments > 0, self._summed)
        block.mlp.router = observed
        block(x, self._start(outer, batch).inputs)
        return observed.sums

    def _inputs(
        self, graph: Any, names: tuple[str, ...], outer: Params, state: Any, x: Array, batch: Tokens
    ) -> Sums:
        block = nnx.merge(graph, state)
        return self._through(block, names, x, batch, self._start(outer, batch).inputs)[1]

    def _observed(
        self, graph: Any, outer: Params, state: Any, x: Array, batch: Tokens
    ) -> tuple[Array, Sums]:
        block, router = nnx.merge(graph, state), None
        names = tuple(folding.linear_layers(block))
        if experts := folding.expert_layers(block):
            count = len(experts["mlp/gate"].weight[...])
            is_counted = batch.segments > 0
            router = _ObservedRouter(block.mlp, jnp.int32(0), count, is_counted, self._summed)
            names = tuple(name for name in names if name != "mlp/router")
            block.mlp.router = router
        inputs = self._start(outer, batch).inputs
        outputs, sums = self._through(block, names, x, batch, inputs)
        return outputs, sums if router is None else sums | router.sums

    def _through(
        self, block: Block, names: tuple[str, ...], x: Array, batch: Tokens, inputs: LayerInputs
    ) -> tuple[Array, Sums]:
        """Return the outputs of a block, and the sums of what its layers `names` read.

        Args:
          block: the block, which is changed.
          names: paths of linear layers in it.
          x, batch, inputs: what the block reads.
        """
        layers = folding.linear_layers(block)
        seen: list[tuple[str, int, Array]] = []
        sums: Sums = {}
        for name in names:
            surgery.replace(block, tuple(name.split("/")), _Observed(name, layers[name], seen))
        outputs = block(x, inputs)[0]
        groups: dict[int, list[str]] = {}
        for name, _, each in seen:
            groups.setdefault(id(each), []).append(name)
        for _, dims, each in seen:
            if not (group := groups.pop(id(each), None)):
                continue
            rows = each.reshape(*each.shape[: each.ndim - dims], -1).astype(jnp.float32)
            rows = jnp.where((batch.segments > 0)[..., None], rows, 0.0)
            sums[",".join(group)] = self._summed(rows.reshape(-1, rows.shape[-1]))
        return outputs, sums

    def _start(self, outer: Params, batch: Tokens) -> _Start:
        module = self._blueprint.merge({**self._blueprint.shapes, **outer})
        start = _Start()
        module.prefix, module.stack = None, start
        module.read(batch, key=None)
        return start


def _on_one_device(leaves: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), leaves)
