"""The layers of a model, and the tables and norms around them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.models import config as configs
from jaxlm.nn import intermediates
from jaxlm.nn.attention import CrossInputs, LayerInputs, RelativePositions
from jaxlm.nn.cache import AnyCache, BlockedCache, KVCache, LayerCache
from jaxlm.nn.config import BlockConfig, NormConfig
from jaxlm.nn.embedding import Embedding
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear, Product
from jaxlm.nn.norm import Norm
from jaxlm.nn.stack import Caches, Layers, Stack, StackSpec
from jaxlm.ops.masks import Mask
from jaxlm.parallel.schedule import Schedule


class Hidden(NamedTuple):
    """Output of a model before the unembedding."""

    values: Float[Array, "B T D"]
    cache: KVCache | None
    losses: dict[str, Mean]  # auxiliary losses of layers, such as an expert balance
    stream: Float[Array, "B T D"]  # before the final norm


@dataclasses.dataclass(frozen=True)
class Execution:
    """Dtypes, and the arguments of `nn.stack.Stack` that change how a model is computed."""

    precision: Precision
    layers: Layers
    remat: str
    schedule: Schedule | None


def initializer(config: configs.BackboneConfig, precision: Precision) -> Initializer:
    """Return the initializer of the weights of a backbone and of the tables around it."""
    return Initializer(config.init, config.init_std, config.depth, precision, config.width_ratio)


def optional_norm(width: int, config: NormConfig | None, init: Initializer) -> Norm | None:
    """Return a norm of the stream if there is a config for it."""
    return None if config is None else Norm({"embed": width}, config, dtype=init.dtype)


@dataclasses.dataclass(frozen=True)
class EmbeddingBuilder:
    """Builder of the tables before the layers and of the unembedding, each from its own key."""

    width: int
    key: Array
    init: Initializer

    def table(self, name: str, rows: int, axis: str) -> Embedding:
        """Return a table with a row for each id or position."""
        key = random.stream(self.key, name)
        return Embedding(rows, self.width, axis=axis, key=key, init=self.init.exact)

    def positions(self, name: str, rows: int | None) -> Embedding | None:
        """Return a table of positions or token types if there are rows for it."""
        return None if rows is None else self.table(name, rows, "positions")

    def unembedding(self, vocab: int, *, tied: bool) -> Linear | None:
        """Return the output layer of an untied model, initialized as at muP's base width."""
        if tied:
            return None
        return Linear(
            {"embed": self.width},
            {"vocab": vocab},
            key=random.stream(self.key, "unembedding"),
            init=dataclasses.replace(self.init.exact, width_ratio=1.0),
            product=Product(result=jnp.dtype(jnp.float32)),
        )


class Unembedder:
    """Mixin: logits by the embedding's transpose, or by an output layer of their own."""

    embedding: Embedding
    unembedding: Linear | None

    config: Any  # of the model
    hidden: Callable[..., Hidden]  # each model has these two methods
    logits: Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]]

    @property
    def text_positions(self) -> int | None:
        """Largest number of tokens of a document that the position table has rows for, if any."""
        return self.config.positions

    @overload
    def __call__(
        self, tokens: Int[Array, "B T"], *, cache: None = None, **inputs: Any
    ) -> Float[Array, "B T V"]: ...

    @overload
    def __call__(
        self, tokens: Int[Array, "B T"], *, cache: KVCache, **inputs: Any
    ) -> tuple[Float[Array, "B T V"], KVCache]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        **inputs: Any,
    ) -> Any:
        """Return the logits, float32; with a KV cache also the cache that has these tokens.

        Args:
          tokens: ids.
          positions: of the tokens in their documents; None for 0, 1, 2, ... from the start of each
            segment, or from the end of the cache.
          segments: documents packed into a row, from 1; None for one document per row.
          cache: KV cache of the tokens before these, see `Backbone.empty_cache`.
          inputs: further arguments of `hidden`, such as `source` of an encoder-decoder.

        Raises:
          ValueError: if there are segments and a cache, which stores no segments.
        """
        if positions is None:
            index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            if segments is not None:
                is_first = segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
                starts = jnp.where(is_first, index, 0)
                positions = index - jax.lax.cummax(starts, axis=1)
            else:
                positions = index if cache is None else index + cache.length[:, None]
        if segments is not None:
            inputs["segments"] = segments
        if cache is None:
            return self.logits(self.hidden(tokens, positions=positions, **inputs).values)
        hidden = self.hidden(tokens, positions=positions, cache=cache, **inputs)
        assert hidden.cache is not None
        length = cache.length + tokens.shape[1]
        return self.logits(hidden.values), hidden.cache._replace(length=length)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the product with the unembedding, float32."""
        return (self.unembedding or self.embedding.unembed)(hidden)

    def relayout_unembedding(self) -> None:
        """Store the unembedding in the layout that is fastest for a few rows."""
        (self.unembedding or self.embedding).relayout_for_decode()


class VirtualTokens(nnx.Module):
    """Tokens without ids before every document: each token sees them, at positions from `count` on.

    They do not see the document, so all documents of a row share them.

    Args:
      count: number of tokens.
      rows: their stream before the first layer, [count, D]; None if the attention of each layer
        has their keys and values, see `nn.attention.LeadingKV`.
    """

    def __init__(self, count: int, rows: nnx.Param | None = None):
        self.count, self.rows = count, rows


class Backbone(nnx.Module):
    """The layers of the prefix, those that repeat, and the final norm; `side` prefixes names."""

    virtual: VirtualTokens | None = None

    def __init__(
        self, config: configs.BackboneConfig, execution: Execution, *, key: Array, side: str = ""
    ):
        self.config, self.precision = config, execution.precision
        init = initializer(config, execution.precision)
        first, drops = len(config.prefix), _layer_drops(config.layer_drop, config.depth)

        prefix = StackSpec(
            config.width, first, config.prefix, "prefix", f"{side}prefix", drops[:first]
        )
        others = StackSpec(
            *(config.width, config.depth - first, config.pattern),
            name=f"{side}stack",
            drops=drops[first:],
        )
        stack = functools.partial(Stack, init=init, remat=execution.remat)

        attention = config.pattern[0].attention
        self.relative = (
            RelativePositions(
                attention.heads, attention.relative, key=random.stream(key, "relative"), init=init
            )
            if attention.relative
            else None
        )
        self.prefix = (
            stack(prefix, key=random.stream(key, "prefix"), layers="unroll")
            if config.prefix
            else None
        )
        self.stack = stack(
            others,
            key=random.stream(key, "stack"),
            layers=execution.layers,
            schedule=execution.schedule,
        )
        self.final_norm = optional_norm(config.width, config.final_norm, init)

    @property
    def leading(self) -> int:
        """Number of virtual tokens before every document."""
        return 0 if self.virtual is None else self.virtual.count

    def apply_layers(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        memory: CrossInputs | None = None,
        cache: KVCache | None = None,
        keys: tuple[Array | None, Array | None] = (None, None),
    ) -> Hidden:
        """Return the stream after all layers and the final norm.

        Args:
          x, positions: the stream before the first layer, and positions in documents.
          mask, memory: visible keys of each query, and inputs of cross attention.
          cache: KV cache; it is returned with these tokens, and the caller advances its `length`.
          keys: of the prefix and of the other layers; keys turn dropout on.
        """
        if self.relative is not None:
            index = mask.key_index if cache is None else jnp.arange(cache.slots)[None]
            mask = dataclasses.replace(mask, bias=self.relative(mask.query_index, index))
        if intermediates.is_captured("streams"):
            intermediates.record_sum("embedded", x)
        layers, start = (None, None) if cache is None else (cache.layers, cache.length)
        written: Caches = {}
        losses: dict[str, Mean] = {}
        reach = None if cache is None else cache.reach
        inputs = LayerInputs(positions, mask, memory, start, reach)
        for prefix, stack, key in zip(
            ("prefix/", "stack/"), (self.prefix, self.stack), keys, strict=True
        ):
            if stack is None:
                continue
            caches = layers and {
                name.removeprefix(prefix): layer
                for name, layer in layers.items()
                if name.startswith(prefix)
            }
            x, out, added = stack(x, inputs, caches=caches, key=key)
            written |= {prefix + name: layer for name, layer in (out or {}).items()}
            losses = Mean.merged(losses, added)
        values = x if self.final_norm is None else self.final_norm(x)
        cache = None if cache is None else cache._replace(layers=written)
        return Hidden(values, cache, losses, x)

    def unstack_layers(self) -> Self:
        """Replace stacked layers by separate ones, in the layout that decoding reads fastest.

        For use within a trace, with a cache. Costs a second copy of the weights, which a loop over
        tokens then reads without slicing or casting them.
        """
        for name in ("prefix", "stack"):
            if (stack := getattr(self, name)) is not None:
                blocks = stack.unstacked()
                blocks.relayout_for_decode()
                setattr(self, name, blocks)
        return self

    def empty_cache(
        self,
        rows: int,
        slots: int,
        *,
        is_int8: bool = False,
        spare: int = 0,
        block: int | None = None,
    ) -> KVCache:
        """Return a KV cache for `rows` sequences of up to `slots` tokens.

        Args:
          rows, slots: number of sequences, and their largest length.
          is_int8: store int8; the default is `Precision.cached`.
          spare: the last tokens written at a time that may be written again, see
            `LayerCache.empty`.
          block: slots of a block; layers without a window, virtual tokens and biases are a
            `BlockedCache`. By default (None) no layer is.
        """
        config = self.config
        dtype = jnp.dtype(jnp.int8) if is_int8 else self.precision.cached

        def empty(layer: BlockConfig) -> AnyCache:
            return layer_cache(layer, (rows, slots, spare, self.leading), dtype, block)

        layers: Caches = {f"prefix/{i}": (empty(layer),) for i, layer in enumerate(config.prefix)}
        repeated, kinds = config.depth - len(config.prefix), len(config.pattern)
        for kind, layer in enumerate(config.pattern[:repeated]):
            count = len(range(kind, repeated, kinds))
            layers[f"stack/{kind}"] = tuple(empty(layer) for _ in range(count))
        return KVCache(layers, jnp.zeros((rows,), jnp.int32))


def layer_cache(
    layer: BlockConfig, sizes: tuple[int, int, int, int], dtype: jnp.dtype, block: int | None
) -> AnyCache:
    """Return the empty KV cache of a layer, see `Backbone.empty_cache`.

    `sizes` are rows, slots, spare slots, and virtual tokens before each row.
    """
    rows, slots, spare, leading = sizes
    attention = layer.attention
    # Relative biases index all slots in order, so no window is applied to the cache.
    window = None if attention.relative else attention.window
    whole = LayerCache.empty(rows, slots, attention.cached, dtype, window, spare, leading)
    is_plain = not (whole.is_ring or leading or attention.relative)
    return BlockedCache.of(whole, block) if block and is_plain else whole


def _layer_drops(rate: float, depth: int) -> tuple[float, ...]:
    """Return each layer's rate of stochastic depth, linear in depth; empty without any."""
    return tuple(rate * number / depth for number in range(1, depth + 1)) if rate else ()
