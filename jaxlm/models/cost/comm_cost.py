"""Bytes that devices send each other in a step, in closed form, by mesh axis. Free of JAX."""

import dataclasses
import math
from collections.abc import Sequence

from jaxlm.models.config import BackboneConfig, EncoderDecoderConfig, ModelConfig
from jaxlm.models.cost.tensors import Tensor, tensors
from jaxlm.nn.config import AttentionConfig, MoeConfig
from jaxlm.parallel import logical
from jaxlm.parallel.logical import LAYERS
from jaxlm.parallel.schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWorkload:
    """A chip's part of one step, and the bytes of a weight, a gradient and an activation.

    With an adapter, `trained` are its leaves and `frozen` those of its base as they are stored.
    """

    model: ModelConfig
    sequence: int
    rows: int  # of this chip: tokens / sequence, if context and tensor axes share them
    microbatches: int = 1
    repeats: int = 1  # groups of layers of a pipeline stage
    weight_bytes: int = 2
    gradient_bytes: int = 4
    activation_bytes: int = 2
    targets: int = 0  # tokens of a row of an encoder-decoder's decoder
    zero: int = 3  # ZeRO stage of fsdp: shards optimizer state (1), gradients (2), weights (3)
    sums_locally: bool = False  # data sums gradients once, after the last micro-batch
    loss_parts: int = 1  # parts of a pass; each gathers and sums the output matrix
    trained: tuple[Tensor, ...] | None = None  # None for all
    frozen: tuple[Tensor, ...] = ()

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream of all rows."""
        return self.rows * self.sequence * self.model.width * self.activation_bytes

    def schedule(self, sizes: dict[str, int]) -> Schedule:
        """Return the schedule of the pipeline."""
        return Schedule(sizes["pipe"], self.microbatches, self.repeats)

    def passes(self, sizes: dict[str, int]) -> tuple[float, int]:
        """Return passes of a chip through its layers and through the tables in one step.

        One per micro-batch; a pipeline runs one group of layers per tick, and the embedding and the
        unembedding once for all micro-batches.
        """
        if sizes["pipe"] > 1:
            return self.schedule(sizes).ticks / self.repeats, 1
        return self.microbatches, self.microbatches


def matrices(model: ModelConfig, tensor: int) -> tuple[float, float, float]:
    """Return the parameters per tensor device of layers, of both tables, and of the embedding."""
    lookup = model.vocab * model.width / tensor
    sizes = {"tensor": tensor}
    blocks = sum(
        each.size / math.prod(logical.ways(sizes, axis) for axis in each.axes)
        for each in tensors(model)
        if each.is_matrix and each.axes[0] in LAYERS
    )
    return blocks, lookup * (1 if model.tied else 2), lookup


def fsdp_bytes(work: StepWorkload, sizes: dict[str, int]) -> float:
    """Return the bytes that a chip sends over fsdp in one step.

    ZeRO 3: each pass gathers layers and the unembedding forward and again backward, and the
    embedding once (if tied, for the unembedding too), and reduce-scatters gradients; a pipeline
    does so with its layers in each tick. Otherwise updated weights are gathered once, in the bytes
    they are stored in, and gradients of each pass are reduce-scattered (ZeRO 2) or all-reduced (1).
    Each further part of the loss gathers the output matrix twice, and all-reduces its gradient.
    An adapter gathers the codes of a quantized base, and sums its own gradients alone.
    """
    blocks, tables, lookup = matrices(work.model, sizes["tensor"])
    through_blocks, through_tables = work.passes(sizes)
    is_split = work.zero == 3
    if work.trained is not None:
        return _ring(sizes["fsdp"]) * _adapter_fsdp_bytes(work, work.trained, sizes)
    gathered = (
        2 * blocks * through_blocks + (lookup + tables) * through_tables
        if is_split
        else blocks + tables
    )
    summed = (blocks * through_blocks + tables * through_tables) * (2 if work.zero == 1 else 1)
    further = 2 * lookup * (work.loss_parts - 1) * through_tables
    gathered += further if is_split else 0
    summed += further
    sent = gathered * work.weight_bytes + summed * work.gradient_bytes
    return _ring(sizes["fsdp"]) * sent / sizes["pipe"]


def _adapter_fsdp_bytes(
    work: StepWorkload, trained: Sequence[Tensor], sizes: dict[str, int]
) -> float:
    """Return the bytes of `fsdp_bytes` for all devices of an adapter's step.

    Layers are gathered forward and again backward, tables once, as they have no gradient.
    Gradients of leaves that fsdp does not split are all-reduced.
    """
    through_blocks, through_tables = work.passes(sizes)
    sent = 0.0
    for each in (*trained, *work.frozen):
        is_layer, is_trained = each.axes[:1] != () and each.axes[0] in LAYERS, each in trained
        passes = through_blocks if is_layer else through_tables
        size = _per_device(each, sizes | {"fsdp": 1})
        is_divided = any(logical.ways({"fsdp": 2}, axis) > 1 for axis in each.axes)
        if is_divided and len(each.axes) - is_layer > 1 and (is_trained or work.zero == 3):
            times = 1.0 if work.zero < 3 else passes * (2 if is_layer else 1)
            sent += times * size * (each.item_bytes or work.weight_bytes)
        if is_trained:
            times = 1 if is_divided and work.zero > 1 else 2
            sent += passes * times * size * work.gradient_bytes
    return sent


def _per_device(tensor: Tensor, sizes: dict[str, int]) -> float:
    """Return the elements of a leaf on a device."""
    return tensor.size / math.prod(logical.ways(sizes, axis) for axis in tensor.axes)


def _summed(work: StepWorkload, sizes: dict[str, int]) -> float:
    """Return the elements of an adapter's gradients on a device, in all passes."""
    through_blocks, through_tables = work.passes(sizes)
    return sum(
        _per_device(each, sizes)
        * (through_blocks if each.axes[:1] and each.axes[0] in LAYERS else through_tables)
        for each in work.trained or ()
    )


def data_bytes(work: StepWorkload, sizes: dict[str, int]) -> float:
    """Return the bytes over data: an all-reduce of a chip's gradients, in each pass or once.

    In each pass the gradient of the output matrix is summed in each part of the loss.
    """
    blocks, tables, lookup = matrices(work.model, sizes["tensor"])
    through_blocks, through_tables = (1, 1) if work.sums_locally else work.passes(sizes)
    further = 0 if work.sums_locally else lookup * (work.loss_parts - 1)
    parts = sizes["pipe"] * sizes["fsdp"]
    summed = (blocks * through_blocks + (tables + further) * through_tables) / parts
    if work.trained is not None:
        summed = _summed(work, sizes)
    return 2 * _ring(sizes["data"]) * summed * work.gradient_bytes


def tensor_bytes(work: StepWorkload, sizes: dict[str, int], *, is_remat: bool = True) -> float:
    """Return the bytes over tensor: all-reduces of the stream.

    Each layer has 2 forward, 5 backward (one per product that reads the stream: query, key, value,
    gate, up), and 1 recomputed under full remat; the embedding has 1 forward, the unembedding 1
    backward. Cross attention adds 1 forward, 1 backward for queries, 1 recomputed, and 2 backward
    of the stream that keys and values read. With latents, gradients of the latents are reduced.
    """
    model = work.model
    if isinstance(model, EncoderDecoderConfig):
        share, cross = work.targets / work.sequence, model.decoder.depth
        source = _all_reduces(model.encoder, is_remat=is_remat) + 2 * cross + 1
        target = _all_reduces(model.decoder, is_remat=is_remat) + (2 + is_remat) * cross + 2
        streams = source + share * target
    else:
        streams = _all_reduces(model, is_remat=is_remat) / sizes["pipe"] + 2
    return 2 * _ring(sizes["tensor"]) * streams * work.stream_bytes


def _all_reduces(stack: BackboneConfig, *, is_remat: bool) -> float:
    """Return the all-reduces of the stream in a stack, without cross attention."""
    (block, *_), width = stack.pattern, stack.width
    backward = 2 if isinstance(block.mlp, MoeConfig) or block.mlp.gated else 1
    return (2 + backward + is_remat + _reduced_size(block.attention, width) / width) * stack.depth


def _reduced_size(attention: AttentionConfig, width: int) -> int:
    """Return the elements per token of the gradients of queries, keys and values to reduce."""
    latent = attention.latent
    if latent is None:
        return 3 * width
    return (latent.query_rank or width) + 2 * latent.rank + latent.rotary_dim


def context_bytes(work: StepWorkload, sizes: dict[str, int]) -> float:
    """Return the bytes over context.

    Keys and values of whole rows are gathered forward and again under remat, and their gradients
    scattered. Gradients of all parameters are all-reduced in each pass as over data, the
    embedding's before fsdp shards it.
    """
    assert not isinstance(work.model, EncoderDecoderConfig), (
        "an encoder-decoder has no context axis"
    )
    attention = work.model.pattern[0].attention
    kv = attention.kv_heads * (attention.head_dim + attention.value_dim) / sizes["tensor"]
    one = work.rows * work.sequence * sizes["context"] * kv * work.activation_bytes
    keys = 3 * one * work.model.depth / sizes["pipe"]
    blocks, tables, lookup = matrices(work.model, sizes["tensor"])
    through_blocks, through_tables = work.passes(sizes)
    split = blocks * through_blocks + (tables - lookup) * through_tables
    summed = (split / sizes["fsdp"] + lookup * through_tables) / sizes["pipe"]
    if work.trained is not None:
        summed = _summed(work, sizes)
    return _ring(sizes["context"]) * (keys + 2 * summed * work.gradient_bytes)


def pipe_bytes(work: StepWorkload, sizes: dict[str, int]) -> float:
    """Return the bytes over pipe.

    Each tick sends the stream of a micro-batch to the next stage, and its gradient back. Four sums
    of the stream: the embedding, as stages hold parts of the vocabulary, and the last stage's
    result forward; gradients of the unembedding and of the first stage's batch backward. Plus
    `regroup_bytes`.
    """
    if sizes["pipe"] == 1:
        return 0.0
    moved = 2 * work.schedule(sizes).ticks * work.stream_bytes / work.microbatches
    return moved + 2 * _ring(sizes["pipe"]) * 4 * work.stream_bytes + regroup_bytes(work, sizes)


def regroup_bytes(work: StepWorkload, sizes: dict[str, int]) -> float:
    """Return the bytes over pipe of moving parameters to the stages of their groups of layers.

    With R > 1 groups on each of P stages, parameters move there and gradients back. Each way sends
    (P - 1) / P of them if P divides R. If R divides P, R chips exchange (R - 1) / R of them, and
    all are sent on. Otherwise XLA gathers them: at most P - 1 times what a chip holds.
    """
    stages, repeats = sizes["pipe"], work.repeats
    if stages == 1 or repeats == 1:
        return 0.0
    if repeats % stages == 0:
        sent = _ring(stages)
    else:
        sent = _ring(repeats) + 1 if stages % repeats == 0 else stages - 1
    blocks, _, _ = matrices(work.model, sizes["tensor"])
    return blocks / (stages * sizes["fsdp"]) * sent * (work.weight_bytes + work.gradient_bytes)


def _ring(devices: int) -> float:
    return (devices - 1) / devices


BYTES = {
    "fsdp": fsdp_bytes,
    "data": data_bytes,
    "tensor": tensor_bytes,
    "context": context_bytes,
    "pipe": pipe_bytes,
}
