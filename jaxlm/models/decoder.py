"""The decoder-only language model."""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.models import config as configs
from jaxlm.models.heads import Heads
from jaxlm.nn.cache import KVCache, LayerCache
from jaxlm.nn.config import BlockConfig
from jaxlm.nn.dropout import dropout, noise
from jaxlm.nn.embedding import Embedding
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear
from jaxlm.nn.norm import Norm
from jaxlm.nn.stack import Layers, Stack
from jaxlm.nn.unstacked import Caches
from jaxlm.ops import masks
from jaxlm.ops.masks import Mask
from jaxlm.parallel.pipeline import Schedule
from jaxlm.parallel.rules import constrain


class Hidden(NamedTuple):
    """What a model makes of its tokens before the unembedding."""

    values: Float[Array, "B T D"]
    cache: KVCache | None
    losses: dict[str, Mean]  # what layers add to the objective, such as an expert balance
    stream: Float[Array, "B T D"]  # before the final norm


class Decoder(nnx.Module):
    """Embedding, blocks, norm, unembedding."""

    def __init__(
        self,
        config: configs.Decoder,
        *,
        key: Array,
        precision: Precision,
        layers: Layers = "scan",
        remat: str = "none",
        schedule: Schedule | None = None,
    ):
        self.config, self.precision = config, precision
        init = Initializer(
            config.init, config.init_std, config.depth, precision.params, config.width_ratio
        )

        def at(name: str) -> Array:
            return random.stream(key, name)

        def table(name: str, rows: int, axis: str) -> Embedding:
            return Embedding(
                rows,
                config.width,
                axis=axis,
                key=at(name),
                init=init,
                precision=precision.exact,
            )

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
                key=at(name),
                init=init,
                precision=precision,
                layers=layers,
                remat=remat,
                schedule=schedule,
                axis=axis,
                name=name,
                drops=_drops(config.layer_drop, config.depth)[first : first + depth],
            )

        self.embedding = table("embedding", config.vocab, "vocab")
        self.positions = (
            None if config.positions is None else table("positions", config.positions, "positions")
        )
        self.inner = (
            None
            if config.inner_positions is None
            else table("inner", config.inner_positions, "positions")
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
            layers,
            schedule,
            first=len(config.prefix),
        )
        self.final_norm = (
            None
            if config.final_norm is None
            else Norm({"embed": config.width}, config.final_norm, dtype=init.dtype)
        )
        self.heads = (
            None
            if config.ahead is None
            else Heads(
                config,
                config.ahead,
                key=at("heads"),
                init=init,
                precision=precision,
                remat=remat.partition("/")[0],
            )
        )
        vocab = {"vocab": config.vocab}
        self.unembedding = (
            None
            if config.tied
            else Linear(
                {"embed": config.width},
                vocab,
                key=at("unembedding"),
                init=dataclasses.replace(init, width_ratio=1.0),
                precision=precision.exact,
                result=jnp.dtype(jnp.float32),
            )
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        reach: Int[Array, "B T"] | None = None,
        inner: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        count: Int[Array, "B"] | None = None,
        key: Array | None = None,
        dealt: int = 1,
    ) -> Hidden:
        """Reads `tokens` from left to right, each segment for itself; after those in `cache`, where there is one.

        With a `reach`, each sees up to that slot of the row, or of the cache, instead of its own. `inner` are second
        positions, for a model that has a table of them; None is 0 for all.
        `dealt` is the number of devices to which `parallel.context.deal` dealt the tokens of each row, if it did.
        `key` turns dropout on. The cache comes back with these tokens in it; its `length` is the caller's to advance,
        who knows how many of a padded row are real: the first `count`, or all.

        Raises:
          ValueError: where both segments and a cache are given: a cache keeps no segments, so its keys would be seen by all.
        """
        if segments is not None and cache is not None:
            raise ValueError("segments with a cache: each row of a cache is one sequence")
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        x = self.embedding(tokens) * self.config.embed_scale
        x = noise(x, self.config.embedding_noise, None if key is None else _noise_key(key))
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.inner is not None:
            x = x + self.inner(jnp.zeros_like(tokens) if inner is None else inner)
        x = dropout(
            constrain(x.astype(self.precision.activations), "batch", "length", None),
            self.config.dropout,
            keys[0],
        )
        mask = (
            masks.causal(tokens.shape[1], segments, reach, parts=dealt)
            if cache is None
            else _cache_mask(cache, tokens.shape[1], reach, count)
        )
        layers, start = (None, None) if cache is None else (cache.layers, cache.length)
        written: Caches = {}
        losses: dict[str, Mean] = {}
        for prefix, stack, stack_key in (
            ("prefix/", self.prefix, keys[1]),
            ("stack/", self.stack, keys[2]),
        ):
            if stack is None:
                continue
            own = layers and {
                name.removeprefix(prefix): layer
                for name, layer in layers.items()
                if name.startswith(prefix)
            }
            x, out, added = stack(
                x, positions=positions, mask=mask, caches=own, start=start, key=stack_key
            )
            written |= {prefix + name: layer for name, layer in (out or {}).items()}
            losses = Mean.merged(losses, added)
        values = x if self.final_norm is None else self.final_norm(x)
        kept = None if cache is None else KVCache(written, cache.length)
        return Hidden(values, kept, losses, x)

    def ahead(
        self,
        stream: Float[Array, "B T D"],
        ahead: list[tuple[Int[Array, "B T"], Bool[Array, "B T"]]],
        *,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        key: Array | None = None,
        dealt: int = 1,
    ) -> tuple[list[Float[Array, "B T D"]], dict[str, Mean]]:
        """What is to be unembedded for the tokens 2, 3, ... ahead, from the stream of the same tokens; see `heads.Heads`."""
        assert self.heads is not None

        def embed(ids: Array) -> Array:
            return self.embedding(ids) * self.config.embed_scale

        mask = masks.causal(stream.shape[1], segments, parts=dealt)
        return self.heads(stream, embed, ahead, positions=positions, mask=mask, key=key)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Scores of every id, float32; apart from the call so that a loss may take the rows in chunks."""
        out = (
            self.embedding.unembed(hidden) if self.unembedding is None else self.unembedding(hidden)
        )
        out = constrain(out, "batch", "length", "vocab")
        if self.config.width_ratio != 1:
            out = out / self.config.width_ratio
        cap = self.config.logit_cap
        return out if cap is None else cap * jnp.tanh(out / cap)

    def unstacked(self) -> Self:
        """The same model, changed in place for a trace: layers and weights as they are used, with a cache alone.

        Costs a second copy of the weights, which a loop over tokens then reads without cutting or casting them.
        """
        for name in ("prefix", "stack"):
            if (stack := getattr(self, name)) is not None:
                blocks = stack.unstacked()
                blocks.cast()
                setattr(self, name, blocks)
        if self.unembedding is None:
            self.embedding.turn()
        else:
            self.unembedding.cast()
        return self

    def empty_cache(self, rows: int, slots: int, *, is_int8: bool = False) -> KVCache:
        """A cache for `rows` sequences of up to `slots` tokens, in the dtype of activations or rounded to int8."""
        config = self.config
        dtype = jnp.dtype(jnp.int8) if is_int8 else self.precision.activations

        def empty(block: BlockConfig) -> LayerCache:
            own = block.attention
            return LayerCache.empty(rows, slots, own.kv_heads, own.head_dim, dtype, own.window)

        layers: Caches = {f"prefix/{i}": (empty(block),) for i, block in enumerate(config.prefix)}
        repeated, kinds = config.depth - len(config.prefix), len(config.pattern)
        for kind, block in enumerate(config.pattern[:repeated]):
            count = len(range(kind, repeated, kinds))
            layers[f"stack/{kind}"] = tuple(empty(block) for _ in range(count))
        return KVCache(layers, jnp.zeros((rows,), jnp.int32))


def _drops(rate: float, depth: int) -> tuple[float, ...]:
    """How often each layer is passed by: more the deeper it lies. None where none ever is."""
    return tuple(rate * number / depth for number in range(1, depth + 1)) if rate else ()


def _noise_key(key: Array) -> Array:
    return random.stream(key, "embedding noise")


def _cache_mask(cache: KVCache, length: int, reach: Array | None, count: Array | None) -> Mask:
    """Row b's new tokens lie at slots length[b] on, and see every slot up to their own, or to their reach.

    The indices of keys are for each layer's cache to say.
    """
    query = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return Mask(query_index=query, key_index=query, query_reach=reach, query_count=count)
