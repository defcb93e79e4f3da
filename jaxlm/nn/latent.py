"""Multi-head latent attention: keys and values of all heads are made of one small vector a token, which a cache keeps."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.core.precision import Precision
from jaxlm.nn.attention import AttentionBase
from jaxlm.nn.cache import LayerCache
from jaxlm.nn.config import AttentionConfig
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import HeadLinear, Linear
from jaxlm.nn.norm import Norm
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class LatentAttention(AttentionBase):
    """Queries, keys and values of the same tokens x, of R and Rq numbers a token, R shared by the keys and the values.

        c = norm(x latent),   keys_n = [c key_n; rotated(x rotary_key)],   values_n = c value_n
        q = norm(x query_latent), or x itself,   queries_n = q query_n, whose last features are rotated

    A cache keeps c and the rotated key, which is the same for all heads. Few new tokens meet it as it is: a score is
    (key_n queries_n) . c, and a head's result value_n times what it reads of c, so that no key and no value is made of
    what was read before. For many, as of a prompt, that would be more work than to make them all, and they are made.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and appendix C.
    """

    def __init__(
        self,
        width: int,
        config: AttentionConfig,
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
    ):
        latent = config.latent
        assert latent is not None
        self.config, self.precision, self.latent_config = config, precision, latent
        names = ("query_latent", "query", "latent", "rotary_key", "key", "value", "out")
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        stream, made = {"embed": width}, {"latent": latent.rank}

        def linear(name: str, ins: dict[str, int], outs: dict[str, int]) -> Linear:
            return Linear(
                ins,
                outs,
                key=keys[name],
                init=init,
                precision=precision,
                ends_on_residual=name == "out",
            )

        def per_head(name: str, size: int) -> HeadLinear:
            return HeadLinear(made, heads(size), key=keys[name], init=init, precision=precision)

        def heads(size: int) -> dict[str, int]:
            return {"heads": config.heads, "head_dim": size}

        rank = latent.query_rank
        self.query_latent = None if rank is None else linear("query_latent", stream, {"rank": rank})
        self.query_norm = (
            None if rank is None else Norm({"rank": rank}, latent.norm, dtype=init.dtype)
        )
        self.query = linear(
            "query", stream if rank is None else {"latent": rank}, heads(config.head_dim)
        )
        self.latent = linear("latent", stream, {"rank": latent.rank})
        self.latent_norm = Norm({"rank": latent.rank}, latent.norm, dtype=init.dtype)
        self.rotary_key = linear("rotary_key", stream, {"rank": latent.rotary_dim})
        self.key = per_head("key", config.head_dim - latent.rotary_dim)
        self.value = per_head("value", latent.value_dim)
        self.out = linear("out", heads(latent.value_dim), stream)

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
        config, turned = self.config, self.latent_config.rotary_dim
        read = x
        if self.query_latent is not None and self.query_norm is not None:
            read = self.query_norm(constrain(self.query_latent(x), "batch", "length", "rank"))
        query = constrain(self.query(read), "batch", "length", "heads", "head_dim")
        made = self.latent_norm(constrain(self.latent(x), "batch", "length", "rank"))
        rotary = constrain(self.rotary_key(x), "batch", "length", "rank")[:, :, None]
        plain, own = query[..., :-turned], query[..., -turned:]
        own, rotary = self._apply_rope(positions, turned, own, rotary)
        if cache is not None:
            assert start is not None
            cache, (rotary, known, index) = cache.extended(
                rotary, made[:, :, None], start, mask.query_count
            )
            made, mask = known[:, :, 0], dataclasses.replace(mask, key_index=index)
        mask = dataclasses.replace(mask, window=config.window)
        if cache is not None and self._is_short(x.shape[1]):
            asked = jnp.concatenate((self.key.asked(plain), own), axis=-1)
            keys = jnp.concatenate((made[:, :, None], rotary), axis=-1)
            found = self._attend(
                asked, keys, made[:, :, None], mask, key, kernel="reference", is_cached=True
            )
            return self._out_projection(self.value.of_each(found)), cache
        query = jnp.concatenate((plain, own), axis=-1)
        keys, values = self._made(made, rotary, "length" if cache is None else None)
        return self._self_attend(query, keys, values, mask, key, is_cached=cache is not None), cache

    def _made(
        self, latent: Float[Array, "B S R"], rotary: Float[Array, "B S 1 h"], length: str | None
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N U"]]:
        """The keys and values of all heads; `length` is the logical axis of S."""
        axes = ("batch", length, "heads", "head_dim")
        keys, values = constrain(self.key(latent), *axes), constrain(self.value(latent), *axes)
        # Copied in float32: the gradient of the one key is the sum of those of all heads.
        shape = (*keys.shape[:3], rotary.shape[-1])
        shared = jnp.broadcast_to(rotary.astype(jnp.float32), shape).astype(keys.dtype)
        return jnp.concatenate((keys, shared), axis=-1), values

    def _is_short(self, length: int) -> bool:
        """Whether so many queries meet a latent in less work than it takes to make keys and values of it, and to meet those.

        For each latent and head 2 T (2 R + h) FLOPs, against 2 R (H - h + U) and 2 T (H + U).
        """
        latent, size = self.latent_config, self.config.head_dim
        plain = size - latent.rotary_dim + latent.value_dim
        return length * (2 * latent.rank - plain) < latent.rank * plain
