"""Sample ids from a softmax with Gumbel noise that every shard of the vocabulary computes alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

BELOW_ONE = 1.0 - 2.0**-24  # largest float32 below 1: log1p(-u) stays finite


def sample(logits: Float[Array, "*N V"], seeds: Int[Array, "*N"]) -> Int[Array, "*N"]:
    """Return one id for each token, id v with probability softmax(logits)_v.

        argmax_v logits_v + g_v,  g_v = -log(-log(1 - u_v)),  u_v = hash(seed, v) in (0, 1)

    The noise depends only on the token's seed and the id. So each shard of the vocabulary computes
    its own part, and ids do not depend on the sharding of tokens and vocabulary. A vocabulary
    split over a mesh axis costs a gather of one maximum and one id of each token and shard; no
    array of tokens x vocabulary leaves its device.

    Args:
      logits: float32; ids of -inf are never drawn.
      seeds: any 32 bits for each token. Tokens with one seed share their noise.

    Source: Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030, section 2.
    """
    return jnp.argmax(logits + _noise(seeds, logits.shape), axis=-1).astype(jnp.int32)


def _noise(seeds: Int[Array, "*N"], shape: tuple[int, ...]) -> Float[Array, "*N V"]:
    """Return Gumbel(0, 1) noise for each seed and id.

    The largest values win; they belong to the smallest u, which have steps of 2^-32: the winner
    among 2^17 ids has about 2^-17. Float32 is coarse near u = 1, but such ids never win.
    """
    ids = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    bits = _mix(_mix(seeds.astype(jnp.uint32))[..., None] ^ ids)
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, BELOW_ONE)))


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permute 32 bits so that each bit of x changes each bit of the result half of the time.

    Source: the finalizer of MurmurHash3 with the constants `lowbias32` of Wellons 2018,
    "Prospecting for Hash Functions".
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x21F0AAAD)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
