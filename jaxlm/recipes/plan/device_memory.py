"""The bytes of a run on each device, part by part, in arithmetic. Free of JAX."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models import routed
from jaxlm.models.config import Backbone, EncoderDecoder, ModelConfig
from jaxlm.models.cost import activations
from jaxlm.models.cost.activations import Share
from jaxlm.models.cost.tensors import Tensor, tensors
from jaxlm.ops.kernels import BLOCK
from jaxlm.optim import patterns
from jaxlm.optim.average_config import NoAverage
from jaxlm.parallel import logical
from jaxlm.parallel.logical import LogicalAxes, Sizes
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility

LOOSE = 1.1  # a buffer's place is found in a heap with holes


def held_bytes(run: Run, decoder: ModelConfig, sizes: Sizes) -> dict[str, float]:
    """Bytes on each device by what they are: parameters, gradients (while a step is computed), optimizer's state, average.

    `mesh.zero` says which of them fsdp splits.
    """
    zero = run.mesh.zero
    item, moment = ITEM_BYTES[run.precision.params], ITEM_BYTES[run.precision.moments]
    found = list(tensors(decoder))
    frozen = patterns.frozen(run.optim, [each.path for each in found])
    trained = [each for each in found if each.path not in frozen]
    numbers = sum(_part(each, sizes, is_split=zero == 3) for each in found)
    average = {} if isinstance(run.average, NoAverage) else {"average": 4.0 * numbers}
    return {
        "parameters": numbers * item,
        "gradients": sum(_part(each, sizes, is_split=zero >= 2) for each in trained)
        * ITEM_BYTES[run.precision.reduce],
        "optimizer": sum(
            _size(kept.shape, kept.axes, sizes) * (kept.item_bytes or moment)
            for each in trained
            for kept in run.optim.state(each.shape, each.axes, sizes)
        )
        * (0 if "optimizer" in run.train.offload else 1),
    } | average


def sharding(decoder: ModelConfig, sizes: Sizes, zero: int) -> list[dict[str, Any]]:
    """Each parameter: its shape, its axes, the mesh axes that split them, and the numbers on a device."""
    rows = []
    for each in tensors(decoder):
        over = [_mesh_axes(axis, sizes, is_split=zero == 3) for axis in each.axes]
        rows.append(
            {
                "path": each.path,
                "shape": list(each.shape),
                "axes": list(each.axes),
                "over": over,
                "numbers_per_device": _part(each, sizes, is_split=zero == 3),
            }
        )
    return rows


def share_of(run: Run, decoder: ModelConfig, sizes: Sizes, platform: str) -> Share:
    """Return a device's share of the rows of a micro-batch that are read, on `cpu`, `gpu` or `tpu`.

    Activations on a CPU are float32, whatever its products are.
    """
    rows = run.train.batch // (run.train.microbatches * logical.ways(sizes, "batch"))
    length = run.data.sequence
    kernels = {block.attention.kernel for block in decoder.layers}
    compute = ITEM_BYTES[run.precision.compute]
    return Share(
        rows=max(rows, 1),
        length=length // logical.ways(sizes, "length"),
        keys=length if "reference" in kernels else min(BLOCK, length),
        sizes=sizes,
        stream_bytes=4 if platform == "cpu" else compute,
        compute_bytes=compute,
        is_dense=routed.is_dense(platform),
    )


def stacks(decoder: ModelConfig, share: Share, targets: int) -> list[tuple[Backbone, Share]]:
    """Each stack of layers with what a device has of its rows; a decoder beside an encoder writes rows of `targets`."""
    if not isinstance(decoder, EncoderDecoder):
        return [(decoder, share)]
    written = dataclasses.replace(share, length=targets, keys=targets, source=share.length)
    return [(decoder.encoder, share), (decoder.decoder, written)]


def temporary_bytes(
    run: Run,
    decoder: ModelConfig,
    share: Share,
    sizes: Sizes,
    held: Mapping[str, float],
    targets: int = 0,
) -> dict[str, float]:
    """What comes and goes in a step: kept activations, and the larger of the loss's and of one layer's going back."""
    policies = run.train.remat.split("/")
    stages = sizes["pipe"]
    # In each tick of a pipeline a stage goes through one of its groups of layers.
    schedule = divisibility.schedule(run, sizes)
    passes = schedule.ticks / schedule.repeats if schedule else 1
    kept, layer = 0.0, 0.0
    for stack, own in stacks(decoder, share, targets):
        first = len(stack.prefix)
        layers = list(zip(stack.layers, itertools.cycle(policies), strict=False))
        # A block that repeats is the same object in all its layers.
        kinds = {(id(block), policy): block for block, policy in layers}
        keeps = {
            kind: activations.kept(stack, block, own, kind[1]) for kind, block in kinds.items()
        }
        kept += activations.biases(stack, own) + sum(
            keeps[id(block), policy] * (passes / stages if number >= first else 1)
            for number, (block, policy) in enumerate(layers)
        )
        kept += sum(activations.kept(stack, block, own, policies[0]) for block in stack.heads)
        # Its gradients are as large as what it keeps, and what it kept not is made again first.
        largest = max(
            2 * activations.kept(stack, block, own, "none") - keeps[kind]
            for kind, block in kinds.items()
        )
        beside = activations.meeting(stack, own) + activations.padded(stack, own)
        layer = max(layer, largest + beside)
    predicted = own.tokens  # of the last stack; behind a pipeline of all micro-batches at once
    predicted *= run.train.microbatches if schedule else 1
    tokens = min(run.loss.chunk or predicted, predicted)
    # With their exponentials or their gradients; those of each further head are kept, but for chunks.
    heads = 0 if run.loss.chunk else len(decoder.heads)
    logits = (2 + heads) * 4 * tokens * share.own(decoder.vocab, "vocab")
    gathered = 0.0
    if sizes["fsdp"] > 1 and run.mesh.zero == 3:
        whole = dict(sizes) | {"fsdp": 1}
        repeated = sum(
            _part(each, whole, is_split=True)
            for each in tensors(decoder)
            if each.axes[0] == "layers"
        )
        beside = 0 if isinstance(decoder, EncoderDecoder) else len(decoder.prefix)
        per_layer = repeated / (decoder.depth - beside) * stages
        gathered = 2 * per_layer * ITEM_BYTES[run.precision.params]
    groups = 0.0
    if schedule and schedule.repeats > 1:
        own_layers = sum(
            _part(each, sizes, is_split=run.mesh.zero == 3)
            for each in tensors(decoder)
            if each.axes[0] == "layers"
        )
        groups = own_layers * passes * ITEM_BYTES[run.precision.params]
    sums = held["gradients"] if run.train.microbatches > 1 and stages == 1 else 0.0
    return {
        "activations": LOOSE * (kept + max(layer - logits, 0.0)),
        "logits": LOOSE * logits,
        "accumulators": sums,
        "gathered": gathered,
        # Weights that a circular pipeline has read for a tick, whatever remat computes again.
        "groups": groups,
        # Where the gradient is taken, if not at the parameters.
        "curvature": held["gradients"] if run.optim.curvature_every else 0.0,
        "ahead": held["parameters"] if run.optim.averages_parameters else 0.0,
    }


def _part(tensor: Tensor, sizes: Sizes, *, is_split: bool) -> float:
    return _size(tensor.shape, tensor.axes, sizes if is_split else dict(sizes) | {"fsdp": 1})


def _size(shape: tuple[int, ...], axes: LogicalAxes, sizes: Sizes) -> float:
    numbers = 1
    for size, axis in zip(shape, axes, strict=True):
        numbers *= size // logical.ways(sizes, axis)
    return numbers


def _mesh_axes(axis: str | None, sizes: Sizes, *, is_split: bool) -> list[str]:
    return [
        name for name in logical.mesh_axes(axis) if sizes[name] > 1 and (is_split or name != "fsdp")
    ]
