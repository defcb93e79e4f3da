"""Multi-head attention with its projections."""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlm.core.precision import Precision
from jaxlm.nn import noted
from jaxlm.nn.cache import LayerCache
from jaxlm.nn.config import AttentionConfig
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear
from jaxlm.nn.norm import Norm
from jaxlm.ops import attention as ops
from jaxlm.ops import rope
from jaxlm.ops.attention_figures import attention_figures
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class Attention(nnx.Module):
    """Queries, keys and values of the same tokens; grouped, rotated, normed and capped as the config says."""

    def __init__(
        self,
        width: int,
        config: AttentionConfig,
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
    ):
        self.config, self.precision = config, precision
        keys = jax.random.split(key, 4)
        stream = {"embed": width}
        queries = {"heads": config.heads, "head_dim": config.head_dim}
        shared = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        self.query = Linear(
            stream, queries, key=keys[0], init=init, precision=precision, bias=config.bias
        )
        self.key = Linear(
            stream, shared, key=keys[1], init=init, precision=precision, bias=config.bias
        )
        self.value = Linear(
            stream, shared, key=keys[2], init=init, precision=precision, bias=config.bias
        )
        self.out = Linear(
            queries,
            stream,
            key=keys[3],
            init=init,
            precision=precision,
            bias=config.out_bias,
            ends_on_residual=True,
        )

        def norm(dims: dict[str, int]) -> Norm | None:
            if config.qk_norm is None:
                return None
            over = {"head_dim": config.head_dim} if config.qk_norm_over == "head" else dims
            return Norm(over, config.qk_norm, dtype=init.dtype)

        self.query_norm, self.key_norm = norm(queries), norm(shared)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        cache: LayerCache | None = None,
        start: Int[Array, "B"] | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Attends over `x`, or over the cache once `x` is written into it from slot `start` on."""
        config, precision = self.config, self.precision
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        keys = constrain(self.key(x), "batch", "length", "kv_heads", "head_dim")
        values = constrain(self.value(x), "batch", "length", "kv_heads", "head_dim")
        if self.query_norm is not None and self.key_norm is not None:
            query, keys = self.query_norm(query), self.key_norm(keys)
        if config.rotary is not None:
            turns = rope.angles(
                positions,
                config.rotary.dims(config.head_dim),
                config.rotary.theta,
                factors=config.rotary.factors(config.head_dim),
                amplitude=config.rotary.scaling.amplitude,
            )
            query, keys = rope.rotate(query, *turns), rope.rotate(keys, *turns)
        if cache is not None:
            assert start is not None
            cache, (keys, values, index) = cache.extended(keys, values, start, mask.query_count)
            mask = dataclasses.replace(mask, key_index=index)
            # A cache is as activations are. On CPU casting it for every token costs more than it saves, and XLA has no
            # product of bfloat16 in batches there (jax 0.12).
            precision = dataclasses.replace(precision, compute=precision.activations)
        mask = dataclasses.replace(mask, window=config.window)
        scale = config.head_dim**-0.5 if config.scale is None else config.scale
        self._note(query, keys, mask, scale)
        out = ops.attention(
            query,
            keys,
            values,
            mask,
            precision,
            scale=scale,
            cap=config.cap,
            dropout=config.dropout,
            dropout_key=key,
            kernel=config.kernel if cache is None else "reference",
        )
        return self.out(constrain(out, "batch", "length", "heads", "head_dim")), cache

    def _note(self, query: Array, keys: Array, mask: Mask, scale: float) -> None:
        """Each head's largest score and its entropy, of queries that are not padding."""
        entropy = noted.is_asked("entropy")
        if not (entropy or noted.is_asked("logits")):
            return
        peak, spread, queries = attention_figures(
            query,
            keys,
            mask,
            self.precision.compute,
            scale=scale,
            cap=self.config.cap,
            entropy=entropy,
        )
        noted.peak("logit_max", peak)
        if spread is not None:
            noted.add("entropy", spread)
            noted.add("queries", queries)
