"""What predicts tokens beyond the next one, from the stream that the decoder's layers have made."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxlm.core import random
from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.models import config as configs
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear
from jaxlm.nn.norm import Norm
from jaxlm.nn.stack import Stack
from jaxlm.ops.masks import Mask
from jaxlm.parallel.rules import constrain


class Head(nnx.Module):
    """One more layer, of the kind of the decoder's last, and a norm; a sequential one reads a token more before.

    parallel     h_k = layer_k(x)
    sequential   h_k = layer_k(M_k [norm(h_{k-1}); norm(embedding of the token k ahead)]), with h_0 = x

    where x is the stream after all of the decoder's layers, before its final norm. What comes out of the norm of h_k is
    unembedded as the decoder's own.

    Source: Gloeckle et al. 2024, arXiv:2404.19737, section 2 (parallel; there the next token has a layer of its own too, and
    so the shared ones are one fewer); DeepSeek-AI 2024, arXiv:2412.19437, section 2.2 (sequential).
    """

    def __init__(
        self,
        config: configs.Decoder,
        kind: configs.HeadKind,
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
        remat: str,
        name: str,
    ):
        (block,) = config.layers[-1:]
        stream, norm = {"embed": config.width}, config.final_norm
        inner = config.final_norm or block.norm
        is_sequential = kind == "sequential"
        self.hidden_norm = Norm(stream, inner, dtype=init.dtype) if is_sequential else None
        self.token_norm = Norm(stream, inner, dtype=init.dtype) if is_sequential else None
        self.join = (
            Linear(
                {"joined": 2 * config.width},
                stream,
                key=random.stream(key, "join"),
                init=init,
                precision=precision.exact,
                is_gathered=True,
            )
            if is_sequential
            else None
        )
        self.block = Stack(
            config.width,
            1,
            (block,),
            key=random.stream(key, "block"),
            init=init,
            precision=precision,
            layers="unroll",
            remat=remat,
            axis="prefix",
            name=f"{name}/block",
        )
        self.norm = None if norm is None else Norm(stream, norm, dtype=init.dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        token: Callable[[], Float[Array, "B T D"]],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        key: Array | None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Mean]]:
        """The stream after this head, and what its layer adds to the objective. `token` is the embedding of the token ahead."""
        if self.join is not None:
            assert self.hidden_norm is not None
            assert self.token_norm is not None
            both = jnp.concatenate(
                [self.hidden_norm(x), self.token_norm(token().astype(x.dtype))], -1
            )
            x = constrain(self.join(both), "batch", "length", None)
        x, _, losses = self.block(x, positions=positions, mask=mask, key=key)
        return x, losses


class Heads(nnx.Module):
    """The heads of the tokens 2, 3, ... ahead, under their numbers from 0."""

    def __init__(
        self,
        config: configs.Decoder,
        ahead: configs.Ahead,
        *,
        key: Array,
        init: Initializer,
        precision: Precision,
        remat: str,
    ):
        self.kind, self.count = ahead.kind, ahead.tokens
        for number in range(ahead.tokens):
            head = Head(
                config,
                ahead.kind,
                key=jax.random.fold_in(key, number),
                init=init,
                precision=precision,
                remat=remat,
                name=f"heads/{number}",
            )
            setattr(self, str(number), head)

    def __call__(
        self,
        stream: Float[Array, "B T D"],
        embed: Callable[[Array], Array],
        ahead: list[tuple[Int[Array, "B T"], Bool[Array, "B T"]]],
        *,
        positions: Int[Array, "B T"],
        mask: Mask,
        key: Array | None,
    ) -> tuple[list[Float[Array, "B T D"]], dict[str, Mean]]:
        """What each head makes of the stream, to be unembedded; and what their layers add to the objective.

        `ahead` has the token 1, 2, ... ahead of each slot, and whether its document has one; where not, nothing is read.
        """
        x, found, losses = stream, [], []
        for number, (ids, is_there) in enumerate(ahead):
            head = getattr(self, str(number))

            def token(ids: Array = ids, is_there: Array = is_there) -> Array:
                return jnp.where(is_there[..., None], embed(ids), 0)

            x, added = head(
                stream if self.kind == "parallel" else x,
                token,
                positions=positions,
                mask=mask,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            found.append(x if head.norm is None else head.norm(x))
            losses.append(added)
        return found, Mean.merged(*losses)
