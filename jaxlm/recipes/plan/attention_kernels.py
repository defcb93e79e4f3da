"""Choice of the attention kernel of each layer on a mesh, with the reason. Free of JAX."""

import dataclasses
from typing import NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models.config import ModelConfig
from jaxlm.nn.config import AttentionConfig, BlockConfig
from jaxlm.ops import kernels
from jaxlm.ops.kernels import AttentionWork, Kernel, Target
from jaxlm.parallel import context_keys, logical
from jaxlm.parallel.config import format_mesh
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import Run


class KernelPlan(NamedTuple):
    """The attention kernel of a layer and the reason for it."""

    kernel: Kernel
    description: str


def with_kernels(run: Run, decoder: ModelConfig, sizes: Sizes, target: Target) -> ModelConfig:
    """Return the model with the kernel of each of its layers filled in."""

    def of(block: BlockConfig) -> BlockConfig:
        kernel = _plan(run, block.attention, sizes, target).kernel
        attention = dataclasses.replace(block.attention, kernel=kernel)
        return dataclasses.replace(block, attention=attention)

    return decoder.map_blocks(of)


def has_ring(run: Run, decoder: ModelConfig, sizes: Sizes) -> bool:
    """Return True if any layer passes its keys in a ring over the devices that split rows."""
    return logical.ways(sizes, "length") > 1 and any(
        _keys(run, block.attention, sizes).keys == "ring" for block in decoder.layers
    )


def describe_kernels(run: Run, decoder: ModelConfig, sizes: Sizes, target: Target) -> str:
    """Return a line for each distinct choice of kernel, and one for sampling if that differs."""
    plans = [_plan(run, layer.attention, sizes, target) for layer in decoder.layers]
    lines = dict.fromkeys(plan.description for plan in plans)
    if any(plan.kernel != "reference" for plan in plans):
        lines["samples: reference, as the other kernels have no KV cache"] = None
    return "\n".join(lines)


def check(run: Run, decoder: ModelConfig, sizes: Sizes, target: Target) -> None:
    """Raise ConfigError if the requested kernel cannot compute this model on this target."""
    if run.tune.virtual_tokens and logical.ways(sizes, "length") > 1:
        what = f"tune.name={run.tune.name} does not support rows that are split over devices"
        why = f"mesh {format_mesh(sizes)} splits them, and each text needs all virtual tokens"
        raise ConfigError(what, where="mesh.context", why=why, fix="--config.mesh.context=1")
    kinds = dict.fromkeys(layer.attention for layer in decoder.layers)
    plans = [(attention, _plan(run, attention, sizes, target)) for attention in kinds]
    if any(attention.dropout and plan.kernel == "ring" for attention, plan in plans):
        what = "ring attention does not support attention dropout"
        why = "model.dropout or regularization.attention_dropout drops attention weights"
        fix = "--config.mesh.context_keys=gather\n--config.regularization.attention_dropout=0"
        raise ConfigError(what, where="mesh.context_keys", why=why, fix=fix)
    for stage in run.pace.phases[:-1]:
        short = run.at(stage)
        for attention, plan in plans:
            if plan.kernel == "ring":
                continue
            work = _work(short, attention, sizes)
            if misfit := next(iter(kernels.misfits(plan.kernel, target, work)), None):
                what = f"attention cannot compute warm-up rows of {stage.length} tokens"
                what, where = f"{plan.kernel} {what}", "data.sequence_warmup"
                fix = "--config.train.attention=reference\n'--config.data.sequence_warmup=()'"
                raise ConfigError(what, where=where, why=misfit.why, fix=fix)
    named = run.train.attention
    if named not in ("auto", "reference") and logical.ways(sizes, "length") > 1:
        what, why = f"{named} attention needs whole rows", f"mesh {format_mesh(sizes)} splits them"
        fix = "--config.train.attention=auto\n--config.mesh.context=1"
        raise ConfigError(what, where="train.attention", why=why, fix=fix)
    if named == "auto":
        return
    works = dict.fromkeys(_work(run, attention, sizes) for attention in kinds)
    misfits = (misfit for work in works for misfit in kernels.misfits(named, target, work))
    if wrong := dict.fromkeys(misfits):
        # The setting is a complete fix only if nothing else is wrong.
        extra_fixes = [misfit.fix for misfit in wrong if misfit.fix and len(wrong) == 1]
        fixes = [f"--config.{setting}" for setting in ("train.attention=auto", *extra_fixes)]
        what, where = f"{named} attention cannot compute this run", f"train.attention={named}"
        why = "\n".join(misfit.why for misfit in wrong)
        raise ConfigError(what, where=where, why=why, fix="\n".join(fixes))


def check_length(sizes: Sizes, decoder: ModelConfig, length: int, *, flag: str) -> None:
    """Raise ConfigError if rows of `length` tokens do not divide over devices; `flag` sets it."""
    parts = logical.ways(sizes, "length")
    unit = 2 * parts if decoder.has_ring else parts
    if parts == 1 or length % unit == 0:
        return
    longest = decoder.positions or length + unit
    candidates = (length // unit * unit, -(-length // unit) * unit)
    fixes = [f"{flag}={size}" for size in candidates if 0 < size <= longest]
    what = f"rows of {length} tokens do not divide over {parts} devices"
    chunks = ", two chunks for each device of the ring" if decoder.has_ring else ""
    why = f"mesh {format_mesh(sizes)} needs a multiple of {unit}{chunks}"
    raise ConfigError(what, where=flag, why=why, fix="\n".join(fixes) or "--config.mesh.context=1")


def _plan(run: Run, attention: AttentionConfig, sizes: Sizes, target: Target) -> KernelPlan:
    parts = logical.ways(sizes, "length")
    if parts == 1:
        kernel, reason = kernels.choose(run.train.attention, target, _work(run, attention, sizes))
        return KernelPlan(kernel, f"{kernel}: {reason}")
    keys, reason = _keys(run, attention, sizes)
    if keys == "gather":
        return KernelPlan("reference", f"keys gathered from {parts} devices: {reason}")
    ring = f"keys in a ring of {parts} devices, zigzag over {2 * parts} chunks"
    return KernelPlan("ring", f"{ring}: {reason}")


def _work(run: Run, attention: AttentionConfig, sizes: Sizes) -> AttentionWork:
    return AttentionWork(
        rows=rows_per_device(run, sizes),
        length=run.data.sequence + run.tune.virtual_tokens,
        leading=run.tune.virtual_tokens,
        head_dim=max(attention.head_dim, attention.value_dim),
        compute=run.precision.compute_dtype,
        softcap=attention.softcap,
        dropout=attention.dropout,
        has_bias=attention.relative is not None,
        stages=logical.ways(sizes, "stages"),
        both_ways=run.objective.bidirectional,
    )


def rows_per_device(run: Run, sizes: Sizes) -> int:
    """Return the rows of a micro-batch on one device."""
    return max(run.train.batch // (run.train.microbatches * logical.ways(sizes, "batch")), 1)


def _keys(run: Run, attention: AttentionConfig, sizes: Sizes) -> context_keys.KeyTransport:
    tensor = logical.ways(sizes, "heads")
    return context_keys.choose(
        run.mesh.context_keys,
        ways=logical.ways(sizes, "length"),
        rows=rows_per_device(run, sizes),
        length=run.data.sequence,
        heads=max(attention.heads // tensor, 1),
        kv_heads=max(attention.kv_heads // tensor, 1),
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        itemsize=ITEM_BYTES[run.precision.compute_dtype],
        dropout=attention.dropout,
    )
