"""One layer: how attention and MLP are wired to the residual stream."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.nn import intermediates
from jaxlm.nn.attention import Attention, CrossAttention, CrossInputs
from jaxlm.nn.cache import EncoderKV, LayerCache
from jaxlm.nn.config import BlockConfig, MoeConfig, norms_of
from jaxlm.nn.dropout import dropout
from jaxlm.nn.init import Initializer
from jaxlm.nn.latent import LatentAttention
from jaxlm.nn.mlp import Mlp
from jaxlm.nn.moe import Moe
from jaxlm.nn.norm import Norm
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class Block(nnx.Module):
    """Attention f and MLP g on the stream x, with norms n, wired in one of these ways.

    - pre: x + f(n(x)), then + g(n(x)); pre_mlp leaves out the first n, where x was normed already
    - post: n(x + f(x)), then n(x + g(x))
    - output: x + n(f(x)), then + n(g(x))      - sandwich: x + n(f(n(x))), then the same with g
    - parallel: x + f(n(x)) + g(n(x)), one norm for both; each has its own in parallel_norms

    A layer with cross attention c reads + c(n(x)) between f and g, by a norm of its own.
    """

    def __init__(
        self,
        width: int,
        config: BlockConfig,
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
    ):
        self.config = config
        attention_key, mlp_key = jax.random.split(key)
        attends = Attention if config.attention.latent is None else LatentAttention
        self.attention = attends(
            width, config.attention, key=attention_key, init=init, precision=precision
        )
        self.mlp = (
            Moe(width, config.mlp, key=mlp_key, init=init, precision=precision)
            if isinstance(config.mlp, MoeConfig)
            else Mlp(width, config.mlp, key=mlp_key, init=init, precision=precision)
        )

        self.cross = (
            None
            if config.cross is None
            else CrossAttention(
                width,
                config.cross,
                key=jax.random.fold_in(key, 2),
                init=init,
                precision=precision,
            )
        )

        def norm(name: str) -> Norm | None:
            if name not in norms_of(config):
                return None
            return Norm({"embed": width}, config.norm, dtype=init.dtype)

        self.attention_norm, self.mlp_norm = norm("attention_norm"), norm("mlp_norm")
        self.cross_norm = norm("cross_norm")
        self.attention_out_norm, self.mlp_out_norm = (
            norm("attention_out_norm"),
            norm("mlp_out_norm"),
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        memory: CrossInputs | None = None,
        known: EncoderKV | None = None,
        cache: LayerCache | None = None,
        start: Int[Array, "B"] | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, dict[str, Mean]]:
        """The stream after this layer, the layer's cache with these tokens in it, and what it adds to the objective."""
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        residual, rate = self.config.residual, self.config.dropout
        is_whole, is_post = cache is None, residual == "post"
        x = checkpoint_name(x, "layer_in")
        read = _normed(None if is_post else self.attention_norm, x)
        added, cache = self.attention(
            read, positions=positions, mask=mask, cache=cache, start=start, key=keys[0]
        )
        added = _normed(self.attention_out_norm, added)
        _note("attention_out", added, mask)
        added = dropout(checkpoint_name(added, "attention_out"), rate, keys[1])
        if residual in ("parallel", "parallel_norms"):
            read = read if self.mlp_norm is None else self.mlp_norm(x)
            beside, losses = self._feed_forward(read, mask, is_whole)
            _note("mlp_out", beside, mask)
            x = self._stream(x + added + dropout(beside, rate, keys[2]))
            _note("stream", x, mask)
            return x, cache, losses
        x = self._stream(x + added)
        if self.cross is not None:
            x = self._stream(x + self._across(x, memory, known, key, rate))
        x = _normed(self.attention_norm if is_post else None, x)
        added, losses = self._feed_forward(
            _normed(None if is_post else self.mlp_norm, x), mask, is_whole
        )
        added = _normed(self.mlp_out_norm, added)
        _note("mlp_out", added, mask)
        x = self._stream(x + dropout(added, rate, keys[2]))
        x = _normed(self.mlp_norm if is_post else None, x)
        _note("stream", x, mask)
        return x, cache, losses

    def _across(
        self,
        x: Array,
        memory: CrossInputs | None,
        known: EncoderKV | None,
        key: Array | None,
        rate: float,
    ) -> Array:
        """What the layer reads of what the encoder has read."""
        assert self.cross is not None
        assert memory is not None
        keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, 3))
        added = self.cross.cross_attend(_normed(self.cross_norm, x), memory, known, keys[0])
        return dropout(checkpoint_name(added, "attention_out"), rate, keys[1])

    def _feed_forward(self, x: Array, mask: Mask, is_whole: bool) -> tuple[Array, dict[str, Mean]]:
        losses: dict[str, Mean] = {}
        if isinstance(self.mlp, Moe):
            segments = mask.query_segments
            counted = jnp.ones(x.shape[:2]) if segments is None else segments > 0
            x, losses = self.mlp(
                x, counted.astype(jnp.float32), is_whole=is_whole, is_dealt=mask.is_dealt
            )
        else:
            x = self.mlp(x)
        return checkpoint_name(x, "mlp_out"), losses

    def _stream(self, x: Array) -> Array:
        return constrain(x, "batch", "length", None)


def _normed(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _note(name: str, x: Array, mask: Mask) -> None:
    """The mean square of each token, summed over those that are not padding; and their number, with the stream's."""
    if not intermediates.is_captured("activations"):
        return
    segments = mask.query_segments
    counted = jnp.ones(x.shape[:2], bool) if segments is None else segments > 0
    squares = jnp.square(x.astype(jnp.float32)).mean(-1)
    intermediates.record_sum(f"{name}_square", jnp.where(counted, squares, 0.0).sum())
    if name == "stream":
        intermediates.record_sum("tokens", counted.sum(dtype=jnp.float32))
