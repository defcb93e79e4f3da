"""Heads of a decoder: multi-token prediction from the stream, and scores: a reward, a value."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.models import config as configs
from jaxlm.models.backbone import optional_norm
from jaxlm.nn.attention import LayerInputs
from jaxlm.nn.cache import AnyCache
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear, Product, parameter
from jaxlm.nn.stack import Caches, Stack, StackSpec, Unstacked
from jaxlm.parallel.rules import constrain

# Path prefixes of the heads that an objective adds: of a reward model, of PPO, of later tokens.
ADDED_HEADS = "reward/", "value/", "heads/"


class Head(nnx.Module):
    """A layer like the decoder's last, and a norm; a sequential head also reads the token ahead.

    parallel     h_k = layer_k(x)
    sequential   h_k = layer_k(M_k [norm(h_{k-1}); norm(embedding of the token k ahead)]), h_0 = x

    x is the stream after all layers of the decoder, before its final norm. The norm of h_k is
    unembedded as the decoder's own output.

    Source: Gloeckle et al. 2024, arXiv:2404.19737, section 2 (parallel; there the next token has a
    layer of its own too, so the shared layers are one fewer); DeepSeek-AI 2024, arXiv:2412.19437,
    section 2.2 (sequential).
    """

    def __init__(
        self, config: configs.DecoderConfig, name: str, *, key: Array, init: Initializer, remat: str
    ):
        (block,), width = config.heads[:1], config.width
        is_sequential = config.mtp is not None and config.mtp.kind == "sequential"
        inner = (config.final_norm or block.norm) if is_sequential else None
        self.hidden_norm = optional_norm(width, inner, init)
        self.token_norm = optional_norm(width, inner, init)
        gathered = Product(is_gathered=True)
        join = functools.partial(Linear, {"joined": 2 * width}, {"embed": width}, product=gathered)
        self.join = join(key=random.stream(key, "join"), init=init.exact) if is_sequential else None
        self.block: Stack | Unstacked = Stack(
            StackSpec(width, 1, (block,), "prefix", f"{name}/block"),
            key=random.stream(key, "block"),
            init=init,
            layers="unroll",
            remat=remat,
        )
        self.norm = optional_norm(width, config.final_norm, init)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        token: Callable[[], Float[Array, "B T D"]],
        inputs: LayerInputs,
        key: Array | None,
        cache: AnyCache | None = None,
    ) -> tuple[Float[Array, "B T D"], AnyCache | None, dict[str, Mean]]:
        """Return the stream after this head, its KV cache and losses.

        Args:
          x: the stream that it reads.
          token: embeds the token ahead.
          inputs: positions and mask.
          key: turns dropout on.
          cache: KV cache of its layer.
        """
        if self.join is not None:
            assert self.hidden_norm is not None
            assert self.token_norm is not None
            token_stream = self.token_norm(token().astype(x.dtype))
            both = jnp.concatenate([self.hidden_norm(x), token_stream], -1)
            x = constrain(self.join(both), "batch", "length", None)
        caches: Caches | None = None if cache is None else {"0": (cache,)}
        x, written, losses = self.block(x, inputs, caches=caches, key=key)  # type: ignore[arg-type]
        return x, None if written is None else written["0"][0], losses

    def relayout_for_decode(self) -> None:
        """Store the weights as `Unstacked.relayout_for_decode` does; calls need a cache then."""
        assert isinstance(self.block, Stack)
        block = self.block.unstacked()
        block.relayout_for_decode()
        self.block = block
        if self.join is not None:
            self.join.relayout_for_decode()

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return what is unembedded of the stream after this head."""
        return x if self.norm is None else self.norm(x)


class Heads(nnx.Module):
    """The heads of the tokens 2, 3, ... ahead, by their numbers from 0."""

    def __init__(
        self,
        config: configs.DecoderConfig,
        ahead: configs.MtpConfig,
        *,
        key: Array,
        init: Initializer,
        remat: str,
    ):
        self.kind, self.count = ahead.kind, ahead.tokens
        for number in range(ahead.tokens):
            head_key = jax.random.fold_in(key, number)
            head = Head(config, f"heads/{number}", key=head_key, init=init, remat=remat)
            setattr(self, str(number), head)

    def __call__(
        self,
        stream: Float[Array, "B T D"],
        embed: Callable[[Array], Array],
        ahead: list[tuple[Int[Array, "B T"], Bool[Array, "B T"]]],
        inputs: LayerInputs,
        *,
        key: Array | None,
    ) -> tuple[list[Float[Array, "B T D"]], dict[str, Mean]]:
        """Return each head's input of the unembedding, and the auxiliary losses of their layers.

        `ahead` holds the id of the token 1, 2, ... ahead of each slot, and if its document has one;
        otherwise its embedding is 0.
        """
        x, outputs, losses = stream, [], []
        for number, (ids, exists) in enumerate(ahead):
            head = self.head(number)

            def token(ids: Array = ids, exists: Array = exists) -> Array:
                return jnp.where(exists[..., None], embed(ids), 0)

            head_key = None if key is None else jax.random.fold_in(key, number)
            x = stream if self.kind == "parallel" else x
            x, _, added = head(x, token, inputs, head_key)
            outputs.append(head.normed(x))
            losses.append(added)
        return outputs, Mean.merged(*losses)

    def relayout_for_decode(self) -> None:
        """Relayout each head, see `Head.relayout_for_decode`."""
        for number in range(self.count):
            self.head(number).relayout_for_decode()

    def head(self, number: int) -> Head:
        """Return a head by its number from 0."""
        return getattr(self, str(number))


class ScoreHead(nnx.Module):
    """A score of each slot: w . h, with h the stream after the final norm, and w initially 0."""

    def __init__(self, width: int, dtype: jnp.dtype):
        self.weight = parameter(jnp.zeros((width,), dtype), "features")

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Return the scores, float32."""
        weight = self.weight[...].astype(jnp.float32)
        return (hidden.astype(jnp.float32) * weight[None, None]).sum(-1)


def add_reward_head(module: Any, key: Array) -> None:
    """Add the head of a reward model to a decoder that was just built, see `Blueprint`."""
    del key
    module.reward = ScoreHead(module.config.width, module.precision.params)


def add_value_head(module: Any, key: Array) -> None:
    """Add the head of PPO, the expected reward of the rest of an answer, to a new decoder."""
    del key
    module.value = ScoreHead(module.config.width, module.precision.params)
