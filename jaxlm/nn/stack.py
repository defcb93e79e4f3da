"""The only loop over layers."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from jaxlm.core.precision import Precision
from jaxlm.nn.block import Block
from jaxlm.nn.cache import LayerCache
from jaxlm.nn.config import REMAT_NAMES, BlockConfig
from jaxlm.nn.init import Initializer
from jaxlm.ops.masks import Mask

Layers = Literal["scan", "unroll"]


class Stack(nnx.Module):
    """`depth` blocks; layer i is of kind `pattern[i % len(pattern)]`.

    The blocks of one kind keep their parameters stacked along a first axis, `layers`, whether they are run as a scan
    or unrolled: the tree is the same, and so are checkpoints. A pattern repeats under one scan; layers left over at the
    end are unrolled.

    `remat` says what the backward pass computes again: `none`; `dots` keeps the results of matrix products; `full`
    keeps only the stream between repeats; `save:attention_out,mlp_out` keeps what it names.
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
    ):
        # Kinds that a shallow stack never reaches would be parameters without a layer.
        pattern = pattern[:depth]
        self.depth, self.kinds, self.layers, self.remat = depth, len(pattern), layers, remat
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
        caches: dict[str, LayerCache] | None = None,
        start: Int[Array, "B"] | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, LayerCache] | None]:
        """The stream after all layers, and every layer's cache."""
        names = [str(kind) for kind in range(self.kinds)]
        split = {name: nnx.split(getattr(self, name)) for name in names}
        blocks = {name: graphdef for name, (graphdef, _) in split.items()}
        states = {name: state for name, (_, state) in split.items()}
        keys = {
            name: None if key is None else _kind_keys(key, self.depth, self.kinds, int(name))
            for name in names
        }

        def layer(
            x: Array, name: str, state: Any, cache: LayerCache | None, key: Array | None
        ) -> tuple[Array, Any]:
            block = nnx.merge(blocks[name], state)
            return block(x, positions=positions, mask=mask, cache=cache, start=start, key=key)

        def repeat(x: Array, part: dict[str, Any]) -> tuple[Array, Any]:
            out = {}
            for name, (state, cache, layer_key) in part.items():
                x, out[name] = layer(x, name, state, cache, layer_key)
            return x, out

        unrolled = rematerialised(repeat, self.remat, looped=False)
        stacked = {
            name: (states[name], caches[name] if caches else None, keys[name]) for name in names
        }
        whole = self.depth // self.kinds
        parts = (
            {name: _unstack(stacked[name]) for name in names}
            if self.layers == "unroll" or self.depth % self.kinds
            else {}
        )
        outs: list[dict[str, Any]] = []
        if self.layers == "unroll":
            scanned = None
            for index in range(whole):
                x, out = unrolled(x, {name: parts[name][index] for name in names})
                outs.append(out)
        else:
            looped = rematerialised(repeat, self.remat, looped=True)
            x, scanned = lax.scan(looped, x, jax.tree.map(lambda leaf: leaf[:whole], stacked))
        if left := names[: self.depth % self.kinds]:
            x, out = unrolled(x, {name: parts[name][whole] for name in left})
            outs.append(out)
        if caches is None:
            return x, None
        return x, {
            name: _restack(scanned and scanned[name], [out[name] for out in outs if name in out])
            for name in names
        }


def rematerialised(function: Callable[..., Any], remat: str, *, looped: bool) -> Callable[..., Any]:
    """`function` with what its backward pass needs computed again, by the policy's name.

    Outside of a loop XLA would find the two computations equal and keep the first, so it is told not to look; the
    body of a loop has its own backward loop, where that would only be in the way.

    Raises:
      ValueError: where there is no such policy.
    """
    again = functools.partial(jax.checkpoint, function, prevent_cse=not looped)
    policies = jax.checkpoint_policies
    if remat == "none":
        return function
    if remat == "dots":
        return again(policy=policies.dots_with_no_batch_dims_saveable)
    if remat == "full":
        return again()
    kind, _, names = remat.partition(":")
    saved = names.split(",")
    if kind != "save" or not set(saved) <= set(REMAT_NAMES):
        raise ValueError(
            f"{remat!r} is no remat policy: none, dots, full, or save: with some of {','.join(REMAT_NAMES)}"
        )
    return again(policy=policies.save_only_these_names(*saved))


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
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _restack(scanned: Any, rest: list[Any]) -> Any:
    """The caches of one kind as they were: those from the scan, then those of unrolled layers."""
    if not rest:
        return scanned
    stacked = jax.tree.map(lambda *xs: jax.numpy.stack(xs), *rest)
    return (
        stacked
        if scanned is None
        else jax.tree.map(lambda a, b: jax.numpy.concatenate((a, b)), scanned, stacked)
    )
