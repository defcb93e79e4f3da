"""One layer: attention and MLP wired to the residual stream."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxlm.core.mean import Mean
from jaxlm.nn import intermediates
from jaxlm.nn.attention import Attention, CrossAttention, CrossInputs, LatentAttention, LayerInputs
from jaxlm.nn.cache import AnyCache, EncoderKV
from jaxlm.nn.config import BlockConfig, MoeConfig, norms_of
from jaxlm.nn.dropout import dropout
from jaxlm.nn.init import Initializer
from jaxlm.nn.mlp import Mlp
from jaxlm.nn.moe import Moe
from jaxlm.nn.norm import Norm
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class Block(nnx.Module):
    """Attention f and MLP g on the stream x, with norms n, wired by `residual`.

    - pre: x + f(n(x)), then + g(n(x)); pre_mlp omits the first n, for an x normalized already
    - post: n(x + f(x)), then n(x + g(x))
    - output: x + n(f(x)), then + n(g(x))      - sandwich: x + n(f(n(x))), then the same with g
    - parallel: x + f(n(x)) + g(n(x)), one norm for both; parallel_norms has one for each

    A layer with cross-attention c adds c(n(x)) between f and g, with a norm of its own.
    """

    def __init__(self, width: int, config: BlockConfig, *, key: Array, init: Initializer):
        self.config = config
        attention_key, mlp_key = jax.random.split(key)
        attention = Attention if config.attention.latent is None else LatentAttention
        self.attention = attention(width, config.attention, key=attention_key, init=init)
        self.mlp: Moe | Mlp
        if isinstance(config.mlp, MoeConfig):
            self.mlp = Moe(width, config.mlp, key=mlp_key, init=init)
        else:
            self.mlp = Mlp(width, config.mlp, key=mlp_key, init=init)
        self.cross = (
            CrossAttention(width, config.cross, key=jax.random.fold_in(key, 2), init=init)
            if config.cross
            else None
        )

        def norm(name: str) -> Norm | None:
            if name not in norms_of(config):
                return None
            return Norm({"embed": width}, config.norm, dtype=init.dtype)

        self.attention_norm, self.mlp_norm = norm("attention_norm"), norm("mlp_norm")
        self.cross_norm = norm("cross_norm")
        self.attention_out_norm = norm("attention_out_norm")
        self.mlp_out_norm = norm("mlp_out_norm")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: LayerInputs,
        *,
        cross_kv: EncoderKV | None = None,
        cache: AnyCache | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], AnyCache | None, dict[str, Mean]]:
        """Return the stream, the cache with the new tokens, and terms of the objective."""
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        residual, rate, mask = self.config.residual, self.config.dropout, inputs.mask
        is_whole, is_post = cache is None, residual == "post"
        x = checkpoint_name(x, "layer_in")
        normed = _normalize(None if is_post else self.attention_norm, x)
        added, cache = self.attention(normed, inputs, cache=cache, key=keys[0])
        added = _normalize(self.attention_out_norm, added)
        _record("attention_out", added, mask)
        added = dropout(checkpoint_name(added, "attention_out"), rate, keys[1])
        if residual in ("parallel", "parallel_norms"):
            normed = normed if self.mlp_norm is None else self.mlp_norm(x)
            mlp_added, losses = self._feed_forward(normed, mask, is_whole)
            _record("mlp_out", mlp_added, mask)
            x = _stream(x + added + dropout(mlp_added, rate, keys[2]))
            _record("stream", x, mask)
            return x, cache, losses
        x = _stream(x + added)
        if self.cross is not None:
            x = _stream(x + self._cross_attend(x, inputs.memory, cross_kv, key))
        x = _normalize(self.attention_norm if is_post else None, x)
        normed = _normalize(None if is_post else self.mlp_norm, x)
        added, losses = self._feed_forward(normed, mask, is_whole)
        added = _normalize(self.mlp_out_norm, added)
        _record("mlp_out", added, mask)
        x = _stream(x + dropout(added, rate, keys[2]))
        x = _normalize(self.mlp_norm if is_post else None, x)
        _record("stream", x, mask)
        return x, cache, losses

    def _cross_attend(
        self, x: Array, memory: CrossInputs | None, cross_kv: EncoderKV | None, key: Array | None
    ) -> Array:
        assert self.cross is not None
        assert memory is not None
        keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, 3))
        normed = _normalize(self.cross_norm, x)
        added = self.cross.cross_attend(normed, memory, cross_kv, keys[0])
        return dropout(checkpoint_name(added, "attention_out"), self.config.dropout, keys[1])

    def _feed_forward(self, x: Array, mask: Mask, is_whole: bool) -> tuple[Array, dict[str, Mean]]:
        losses: dict[str, Mean] = {}
        if isinstance(self.mlp, Moe):
            segments = mask.query_segments
            counted = jnp.ones(x.shape[:2]) if segments is None else segments > 0
            counted = counted.astype(jnp.float32)
            x, losses = self.mlp(x, counted, is_whole=is_whole, is_zigzag=mask.is_zigzag)
        else:
            x = self.mlp(x)
        return checkpoint_name(x, "mlp_out"), losses


def _stream(x: Array) -> Array:
    return constrain(x, "batch", "length", None)


def _normalize(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _record(name: str, x: Array, mask: Mask) -> None:
    """Record each token's mean square, summed over tokens; with the stream also their number.

    Record the stream itself if it is captured.
    """
    if name == "stream" and intermediates.is_captured("streams"):
        intermediates.record_sum(name, x)
    if not intermediates.is_captured("activations"):
        return
    segments = mask.query_segments
    counted = jnp.ones(x.shape[:2], bool) if segments is None else segments > 0
    squares = jnp.square(x.astype(jnp.float32)).mean(-1)
    intermediates.record_sum(f"{name}_square", jnp.where(counted, squares, 0.0).sum())
    if name == "stream":
        intermediates.record_sum("tokens", counted.sum(dtype=jnp.float32))
