"""Choice between gathered keys and ring attention. Free of JAX, so that configs need no JAX."""

from typing import Literal, NamedTuple

from jaxlm.parallel.config import ContextKeys

GATHERED_BYTES = 256 * 2**20  # of keys, values and scores of a layer on a device; above: the ring


class KeyTransport(NamedTuple):
    """Transport of keys to the queries of other devices, and the reason in words."""

    keys: Literal["gather", "ring"]
    reason: str


def choose(
    setting: ContextKeys,
    *,
    ways: int,
    rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    dropout: float,
) -> KeyTransport:
    """Choose a layer's transport of keys by the bytes that one device would hold.

    Gathered keys cost rows T K (H + U) itemsize bytes for all keys and values, and 4 rows N
    (T / ways) T for the scores. Both move the same keys. The ring holds 1 / ways of keys and
    scores, skips the half of the products that causality hides, and moves keys while it computes,
    but in ways - 1 sequential messages.

    Args:
      setting: mesh.context_keys.
      ways: devices of the context axis.
      rows, heads, kv_heads: on one device.
      length, head_dim, value_dim: sequence length; sizes of keys and values.
      itemsize: bytes of a number in a product.
      dropout: rate for the attention weights.
    """
    size = rows * length * kv_heads * (head_dim + value_dim) * itemsize
    size += 4 * rows * heads * (length // ways) * length
    cost = f"gathered keys, values and scores of a layer are {size / 2**20:.3g} MiB a device"
    if setting != "auto":
        return KeyTransport(setting, f"set by mesh.context_keys; {cost}")
    if dropout:
        return KeyTransport("gather", f"a ring has no attention dropout; {cost}")
    is_small, limit = size <= GATHERED_BYTES, f"{GATHERED_BYTES / 2**20:.0f}"
    reason = f"{cost}, {'within' if is_small else 'above'} {limit}"
    return KeyTransport("gather" if is_small else "ring", reason)
