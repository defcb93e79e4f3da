"""The layers of a model, with what comes after the last."""

import dataclasses
from typing import NamedTuple, Self

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.models import config as configs
from jaxlm.nn.attention import CrossInputs
from jaxlm.nn.cache import KVCache, LayerCache
from jaxlm.nn.config import BlockConfig
from jaxlm.nn.embedding import Embedding
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear
from jaxlm.nn.norm import Norm
from jaxlm.nn.relative import RelativePositions
from jaxlm.nn.stack import Caches, Layers, Stack
from jaxlm.ops.masks import Mask
from jaxlm.parallel.schedule import Schedule


class Hidden(NamedTuple):
    """What a model makes of its tokens before the unembedding."""

    values: Float[Array, "B T D"]
    cache: KVCache | None
    losses: dict[str, Mean]  # what layers add to the objective, such as an expert balance
    stream: Float[Array, "B T D"]  # before the final norm


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model computes, whatever its config: in which dtypes, how it runs its layers, and what the backward pass computes again.

    The last three are as those of `nn.stack.Stack`.
    """

    precision: Precision
    layers: Layers
    remat: str
    schedule: Schedule | None


def initializer(config: configs.Backbone, precision: Precision) -> Initializer:
    """How the weights of these layers, and of what stands around them, are drawn."""
    return Initializer(
        config.init, config.init_std, config.depth, precision.params, config.width_ratio
    )


@dataclasses.dataclass(frozen=True)
class EmbeddingBuilder:
    """What stands before and after the layers, each part drawn by its name: tables that are looked up, and the unembedding."""

    width: int
    key: Array
    init: Initializer
    precision: Precision

    def table(self, name: str, rows: int, axis: str) -> Embedding:
        """A row for each id or position."""
        return Embedding(
            rows,
            self.width,
            axis=axis,
            key=random.stream(self.key, name),
            init=self.init,
            precision=self.precision.exact,
        )

    def unembedding(self, vocab: int) -> Linear:
        """Logits of the stream, drawn as at the width where the parametrization is the standard one."""
        return Linear(
            {"embed": self.width},
            {"vocab": vocab},
            key=random.stream(self.key, "unembedding"),
            init=dataclasses.replace(self.init, width_ratio=1.0),
            precision=self.precision.exact,
            result=jnp.dtype(jnp.float32),
        )


class Backbone(nnx.Module):
    """The blocks of the prefix, those that repeat, and the final norm. `at` is what its stacks' names begin with."""

    def __init__(self, config: configs.Backbone, execution: Execution, *, key: Array, at: str = ""):
        self.config, self.precision = config, execution.precision
        init = initializer(config, execution.precision)

        def stack(
            name: str,
            depth: int,
            pattern: tuple[BlockConfig, ...],
            layers: Layers,
            schedule: Schedule | None = None,
            axis: str = "layers",
            first: int = 0,
        ) -> Stack:
            return Stack(
                config.width,
                depth,
                pattern,
                key=random.stream(key, name),
                init=init,
                precision=execution.precision,
                layers=layers,
                remat=execution.remat,
                schedule=schedule,
                axis=axis,
                name=at + name,
                drops=_drops(config.layer_drop, config.depth)[first : first + depth],
            )

        relative = config.pattern[0].attention.relative
        self.relative = (
            None
            if relative is None
            else RelativePositions(
                config.pattern[0].attention.heads,
                relative,
                key=random.stream(key, "relative"),
                init=init,
            )
        )
        self.prefix = (
            stack("prefix", len(config.prefix), config.prefix, "unroll", axis="prefix")
            if config.prefix
            else None
        )
        self.stack = stack(
            "stack",
            config.depth - len(config.prefix),
            config.pattern,
            execution.layers,
            execution.schedule,
            first=len(config.prefix),
        )
        self.final_norm = (
            None
            if config.final_norm is None
            else Norm({"embed": config.width}, config.final_norm, dtype=init.dtype)
        )

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
        """The stream after all layers and the final norm; `keys`, of the prefix and of the others, turn dropout on.

        The cache comes back with these tokens in it; its `length` is the caller's to advance.
        """
        if self.relative is not None:
            index = mask.key_index if cache is None else jnp.arange(cache.slots)[None]
            mask = dataclasses.replace(mask, bias=self.relative(mask.query_index, index))
        layers, start = (None, None) if cache is None else (cache.layers, cache.length)
        written: Caches = {}
        losses: dict[str, Mean] = {}
        for prefix, stack, stack_key in (
            ("prefix/", self.prefix, keys[0]),
            ("stack/", self.stack, keys[1]),
        ):
            if stack is None:
                continue
            own = layers and {
                name.removeprefix(prefix): layer
                for name, layer in layers.items()
                if name.startswith(prefix)
            }
            x, out, added = stack(
                x,
                positions=positions,
                mask=mask,
                memory=memory,
                caches=own,
                start=start,
                key=stack_key,
            )
            written |= {prefix + name: layer for name, layer in (out or {}).items()}
            losses = Mean.merged(losses, added)
        values = x if self.final_norm is None else self.final_norm(x)
        kept = None if cache is None else cache._replace(layers=written)
        return Hidden(values, kept, losses, x)

    def unstack_layers(self) -> Self:
        """The same layers, changed in place for a trace: weights as they are used, with a cache alone.

        Costs a second copy of the weights, which a loop over tokens then reads without cutting or casting them.
        """
        for name in ("prefix", "stack"):
            if (stack := getattr(self, name)) is not None:
                blocks = stack.unstacked()
                blocks.settle()
                setattr(self, name, blocks)
        return self

    def empty_cache(
        self, rows: int, slots: int, *, is_int8: bool = False, spare: int = 0
    ) -> KVCache:
        """A cache for `rows` sequences of up to `slots` tokens, in the dtype of activations or rounded to int8.

        The last `spare` of some tokens that are written at a time may be written again, see `LayerCache.empty`.
        """
        config = self.config
        dtype = jnp.dtype(jnp.int8) if is_int8 else self.precision.activations

        def empty(block: BlockConfig) -> LayerCache:
            own = block.attention
            # Biases are of all slots in their order.
            window = None if own.relative else own.window
            return LayerCache.empty(rows, slots, own.cached, dtype, window, spare)

        layers: Caches = {f"prefix/{i}": (empty(block),) for i, block in enumerate(config.prefix)}
        repeated, kinds = config.depth - len(config.prefix), len(config.pattern)
        for kind, block in enumerate(config.pattern[:repeated]):
            count = len(range(kind, repeated, kinds))
            layers[f"stack/{kind}"] = tuple(empty(block) for _ in range(count))
        return KVCache(layers, jnp.zeros((rows,), jnp.int32))


def _drops(rate: float, depth: int) -> tuple[float, ...]:
    """How often each layer is passed by: more the deeper it lies. None where none ever is."""
    return tuple(rate * number / depth for number in range(1, depth + 1)) if rate else ()
