"""Rows whose tokens lie on several devices: whether that is possible, and how queries reach the keys of other devices."""

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.models.config import Decoder
from jaxlm.nn.config import AttentionConfig, BlockConfig
from jaxlm.parallel import context, rules
from jaxlm.parallel.config import shown
from jaxlm.parallel.context import Keys
from jaxlm.recipes.config import Run


def fitted(run: Run, decoder: Decoder, mesh: Mesh | AbstractMesh) -> Decoder:
    """The model with the way to other devices' keys in each of its layers."""
    if rules.split(mesh, "length") == 1:
        return decoder

    def of(block: BlockConfig) -> BlockConfig:
        keys = _chosen(run, block.attention, mesh).keys
        return dataclasses.replace(
            block, attention=dataclasses.replace(block.attention, context_keys=keys)
        )

    return dataclasses.replace(
        decoder, pattern=tuple(map(of, decoder.pattern)), prefix=tuple(map(of, decoder.prefix))
    )


def told(run: Run, decoder: Decoder, mesh: Mesh | AbstractMesh) -> str | None:
    """What was chosen and why, a line for each kind of layer that differs in it; None where rows are whole."""
    parts = rules.split(mesh, "length")
    if parts == 1:
        return None
    chosen = dict.fromkeys(_chosen(run, layer.attention, mesh) for layer in decoder.layers)
    ways = {
        "gather": "keys gathered from {parts} devices",
        "ring": "keys in a ring of {parts} devices, tokens dealt out in {chunks} chunks",
    }
    return "\n".join(
        f"{ways[each.keys].format(parts=parts, chunks=2 * parts)}: {each.reason}" for each in chosen
    )


def check(run: Run, decoder: Decoder, mesh: Mesh | AbstractMesh) -> None:
    """Raises ConfigError where a ring meets attention dropout."""
    split = fitted(run, decoder, mesh)
    if split.has_ring and any(layer.attention.dropout for layer in split.layers):
        raise ConfigError(
            "keys in a ring leave no room for attention dropout",
            where="mesh.context_keys",
            why=f"model.dropout = {run.model.dropout:g} drops attention weights too",
            fix="--config.mesh.context_keys=gather\n--config.model.dropout=0",
        )


def check_length(mesh: Mesh | AbstractMesh, decoder: Decoder, length: int, *, flag: str) -> None:
    """Raises ConfigError where rows of another length than the run's do not divide over their devices; `flag` sets it."""
    parts = rules.split(mesh, "length")
    unit = 2 * parts if decoder.has_ring else parts
    if parts == 1 or length % unit == 0:
        return
    most = decoder.positions or length + unit
    around = (length // unit * unit, -(-length // unit) * unit)
    raise ConfigError(
        f"rows of {length} tokens do not divide over {parts} devices",
        where=flag,
        why=f"mesh {shown(mesh.shape)} needs a multiple of {unit}"
        + (", two chunks for each device of the ring" if decoder.has_ring else ""),
        fix="\n".join(f"{flag}={size}" for size in around if 0 < size <= most)
        or "--config.mesh.context=1",
    )


def _chosen(run: Run, attention: AttentionConfig, mesh: Mesh | AbstractMesh) -> Keys:
    tensor = rules.split(mesh, "heads")
    rows = run.train.batch // (run.train.microbatches * rules.split(mesh, "batch"))
    return context.choose(
        run.mesh.context_keys,
        ways=rules.split(mesh, "length"),
        rows=max(rows, 1),
        length=run.data.sequence,
        heads=max(attention.heads // tensor, 1),
        kv_heads=max(attention.kv_heads // tensor, 1),
        head_dim=attention.head_dim,
        itemsize=Precision.of(run.precision).compute.itemsize,
        dropout=attention.dropout,
    )
