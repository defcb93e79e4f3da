"""How each layer computes attention on this mesh: which kernel, how queries reach the keys of other devices, and why."""

import dataclasses
from typing import NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models.config import Decoder
from jaxlm.nn.config import AttentionConfig, BlockConfig
from jaxlm.ops import kernels
from jaxlm.ops.kernels import Kernel
from jaxlm.parallel import context_keys, logical
from jaxlm.parallel.config import shown
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import Run


class Way(NamedTuple):
    """How a layer computes attention, in words too."""

    kernel: Kernel
    told: str


def fitted(run: Run, decoder: Decoder, sizes: Sizes) -> Decoder:
    """The model with the kernel of each of its layers."""

    def of(block: BlockConfig) -> BlockConfig:
        kernel = _way(run, block.attention, sizes).kernel
        return dataclasses.replace(
            block, attention=dataclasses.replace(block.attention, kernel=kernel)
        )

    return dataclasses.replace(
        decoder, pattern=tuple(map(of, decoder.pattern)), prefix=tuple(map(of, decoder.prefix))
    )


def told(run: Run, decoder: Decoder, sizes: Sizes) -> str:
    """What was chosen and why, a line for each kind of layer that differs in it."""
    return "\n".join(
        dict.fromkeys(_way(run, layer.attention, sizes).told for layer in decoder.layers)
    )


def check(run: Run, decoder: Decoder, sizes: Sizes) -> None:
    """Raises ConfigError where a kernel was asked for that cannot compute this model."""
    layers = fitted(run, decoder, sizes).layers
    dropping = [layer.attention.kernel for layer in layers if layer.attention.dropout]
    if "ring" in dropping:
        raise ConfigError(
            "keys in a ring leave no room for attention dropout",
            where="mesh.context_keys",
            why=f"model.dropout = {run.model.dropout:g} drops attention weights too",
            fix="--config.mesh.context_keys=gather\n--config.model.dropout=0",
        )
    if "blockwise" in dropping:
        raise ConfigError(
            "blockwise attention knows no dropout",
            where="train.attention",
            why=f"model.dropout = {run.model.dropout:g} drops attention weights too",
            fix="--config.train.attention=reference\n--config.model.dropout=0",
        )
    if run.train.attention == "blockwise" and logical.ways(sizes, "length") > 1:
        raise ConfigError(
            "blockwise attention is for whole rows",
            where="train.attention",
            why=f"mesh {shown(sizes)} splits them",
            fix="--config.train.attention=auto\n--config.mesh.context=1",
        )


def check_length(sizes: Sizes, decoder: Decoder, length: int, *, flag: str) -> None:
    """Raises ConfigError where rows of another length than the run's do not divide over their devices; `flag` sets it."""
    parts = logical.ways(sizes, "length")
    unit = 2 * parts if decoder.has_ring else parts
    if parts == 1 or length % unit == 0:
        return
    most = decoder.positions or length + unit
    around = (length // unit * unit, -(-length // unit) * unit)
    raise ConfigError(
        f"rows of {length} tokens do not divide over {parts} devices",
        where=flag,
        why=f"mesh {shown(sizes)} needs a multiple of {unit}"
        + (", two chunks for each device of the ring" if decoder.has_ring else ""),
        fix="\n".join(f"{flag}={size}" for size in around if 0 < size <= most)
        or "--config.mesh.context=1",
    )


def _way(run: Run, attention: AttentionConfig, sizes: Sizes) -> Way:
    parts = logical.ways(sizes, "length")
    if parts == 1:
        kernel, reason = kernels.choose(
            run.train.attention, length=run.data.sequence, dropout=attention.dropout
        )
        return Way(kernel, f"{kernel}: {reason}")
    keys, reason = _keys(run, attention, sizes)
    if keys == "gather":
        return Way("reference", f"keys gathered from {parts} devices: {reason}")
    return Way(
        "ring",
        f"keys in a ring of {parts} devices, tokens dealt out in {2 * parts} chunks: {reason}",
    )


def _keys(run: Run, attention: AttentionConfig, sizes: Sizes) -> context_keys.Keys:
    tensor = logical.ways(sizes, "heads")
    rows = run.train.batch // (run.train.microbatches * logical.ways(sizes, "batch"))
    return context_keys.choose(
        run.mesh.context_keys,
        ways=logical.ways(sizes, "length"),
        rows=max(rows, 1),
        length=run.data.sequence,
        heads=max(attention.heads // tensor, 1),
        kv_heads=max(attention.kv_heads // tensor, 1),
        head_dim=attention.head_dim,
        itemsize=ITEM_BYTES[run.precision.compute],
        dropout=attention.dropout,
    )
