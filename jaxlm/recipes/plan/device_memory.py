"""Predicted bytes of a run on each device, by component. Free of JAX."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models.config import BackboneConfig, EncoderDecoderConfig, ModelConfig
from jaxlm.models.cost import activations
from jaxlm.models.cost.activations import DeviceShare
from jaxlm.models.cost.tensors import Tensor, tensors
from jaxlm.nn.config import BlockConfig
from jaxlm.objectives.config import Distill
from jaxlm.ops.kernels import BLOCK
from jaxlm.optim import patterns
from jaxlm.optim.average_config import NoAverage
from jaxlm.parallel import logical
from jaxlm.parallel.logical import LAYERS, LogicalAxes, Sizes
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels, divisibility
from jaxlm.tune import cost
from jaxlm.tune.config import Full, Lora, QLora

FRAGMENTATION = 1.1  # buffers are placed in a heap with holes
# Arrays of the size of the logits that a divergence needs more than the loss of labels, as they are
# compiled: from a teacher's logits, those of the student at the temperature, of what is compared,
# and their gradient; from stored ids, the first.
TEACHER_LOGITS, STORED_LOGITS = 3, 1
READ = ("/weight", "/lora_a", "/ia3")  # leaves whose gradient reads the input of their layer


def held_bytes(run: Run, decoder: ModelConfig, sizes: Sizes) -> dict[str, float]:
    """Return bytes per device of parameters, gradients of a step, optimizer state and average.

    With an adapter these are its own; `base` has the parameters that it does not train.

    `mesh.zero` decides which of them fsdp splits.
    """
    zero = run.mesh.zero
    item, moment = ITEM_BYTES[run.precision.params], ITEM_BYTES[run.precision.moments]
    leaves, frozen_leaves = cost.split(run.tune, tensors(decoder))
    frozen = patterns.frozen(run.optim, [each.path for each in leaves])
    trainable = [each for each in leaves if each.path not in frozen]
    numbers = sum(_part(each, sizes, is_split=zero == 3) for each in leaves)
    average = {} if isinstance(run.average, NoAverage) else {"average": 4.0 * numbers}
    gradients = sum(_part(each, sizes, is_split=zero >= 2) for each in trainable)
    optimizer = sum(
        _size(buffer.shape, buffer.axes, sizes) * (buffer.item_bytes or moment)
        for each in trainable
        for buffer in run.optim.state(each.shape, each.axes, sizes)
    )
    base = sum(
        _part(each, sizes, is_split=zero == 3) * (each.item_bytes or item) for each in frozen_leaves
    )
    return (
        {
            "parameters": numbers * item,
            "gradients": gradients * ITEM_BYTES[run.precision.reduce],
            "optimizer": optimizer * (0 if "optimizer" in run.train.offload else 1),
        }
        | average
        | ({"base": base} if base else {})
    )


def teacher_bytes(
    run: Run, teacher: Run, decoder: ModelConfig, share: DeviceShare, sizes: Sizes
) -> float:
    """Return bytes per device of a frozen teacher: its parameters, and its logits of a chunk.

    Args:
      run: the run that is trained.
      teacher: the run of the teacher.
      decoder: the teacher's model.
      share: a device's part of a micro-batch.
      sizes: size of each mesh axis.
    """
    is_split = run.mesh.zero == 3
    numbers = sum(_part(each, sizes, is_split=is_split) for each in tensors(decoder))
    tokens = share.rows * share.length
    if run.loss.chunk is not None:
        tokens = min(tokens, run.loss.chunk)
    logits = 4.0 * tokens * decoder.vocab / logical.ways(sizes, "vocab")
    return numbers * ITEM_BYTES[teacher.precision.params] + logits


def sharding(decoder: ModelConfig, sizes: Sizes, zero: int) -> list[dict[str, Any]]:
    """Return shape, logical axes, mesh axes and elements per device of each parameter."""
    return [
        {
            "path": each.path,
            "shape": list(each.shape),
            "axes": list(each.axes),
            "over": [_mesh_axes(axis, sizes, is_split=zero == 3) for axis in each.axes],
            "numbers_per_device": _part(each, sizes, is_split=zero == 3),
        }
        for each in tensors(decoder)
    ]


def share_of(run: Run, decoder: ModelConfig, sizes: Sizes, platform: str) -> DeviceShare:
    """Return a device's share of the rows of a micro-batch, on `cpu`, `gpu` or `tpu`."""
    length = run.data.sequence + run.tune.virtual_rows
    keys = run.data.sequence + run.tune.virtual_tokens
    kernels = {block.attention.kernel for block in decoder.layers}
    compute = ITEM_BYTES[run.precision.compute_dtype]
    return DeviceShare(
        rows=attention_kernels.rows_per_device(run, sizes),
        length=length // logical.ways(sizes, "length"),
        keys=keys if "reference" in kernels else min(BLOCK, keys),
        sizes=sizes,
        stream_bytes=4 if platform == "cpu" else compute,  # a CPU has float32 in every dtype
        compute_bytes=compute,
        platform=platform,
        has_segments=run.objective.document_mask,
        read=_read_layers(run, decoder),
    )


def _read_layers(run: Run, decoder: ModelConfig) -> frozenset[str] | None:
    """Return the layers of a block whose input a gradient reads, see `DeviceShare`."""
    if isinstance(run.tune, Full):
        return None
    trained, _ = cost.split(run.tune, tensors(decoder))
    layers = (each.path.rpartition("/")[0] for each in trained if each.path.endswith(READ))
    return frozenset("/".join(layer.split("/")[-2:]) for layer in layers)


def stacks(
    decoder: ModelConfig, share: DeviceShare, targets: int
) -> list[tuple[BackboneConfig, DeviceShare]]:
    """Return each stack of layers with its share; a decoder with an encoder has `targets` slots."""
    if not isinstance(decoder, EncoderDecoderConfig):
        return [(decoder, share)]
    target_share = dataclasses.replace(share, length=targets, keys=targets, source=share.length)
    return [(decoder.encoder, share), (decoder.decoder, target_share)]


def predicted_tokens(run: Run, decoder: ModelConfig, share: DeviceShare, targets: int = 0) -> int:
    """Return the tokens of a device that are scored together if `loss.chunk` is None.

    They are those of the last stack; after a pipeline, of all micro-batches.

    Args:
      run: the run.
      decoder: its model.
      share: a device's part of a micro-batch.
      targets: sequence length of a decoder that has an encoder, else 0.
    """
    *_, (_, last) = stacks(decoder, share, targets)
    tokens = last.tokens - last.rows * run.tune.virtual_rows
    return tokens * (run.train.microbatches if share.sizes["pipe"] > 1 else 1)


def temporary_bytes(
    run: Run,
    decoder: ModelConfig,
    share: DeviceShare,
    sizes: Sizes,
    held: Mapping[str, float],
    targets: int = 0,
) -> dict[str, float]:
    """Return bytes per device of the buffers that exist only during a step.

    These are saved activations, and the larger of the loss's buffers and a layer's backward pass.

    Args:
      run: the run.
      decoder: its model.
      share: a device's part of a micro-batch.
      sizes: size of each mesh axis.
      held: bytes of the state, from `held_bytes`.
      targets: sequence length of a decoder that has an encoder, else 0.
    """
    policies = run.train.remat.split("/")
    stages = sizes["pipe"]
    # In each tick of a pipeline a stage computes one of its groups of layers.
    schedule = divisibility.schedule(run, sizes)
    passes = schedule.ticks / schedule.repeats if schedule else 1
    saved, layer = 0.0, 0.0
    for stack, stack_share in stacks(decoder, share, targets):
        first = len(stack.prefix)
        layers = list(zip(stack.layers, itertools.cycle(policies), strict=False))
        # A block that repeats is the same object in all its layers.
        kinds = {(id(block), policy): block for block, policy in layers}
        saved_of = functools.partial(activations.saved_bytes, stack, share=stack_share)
        saved_by_kind = {kind: saved_of(block, policy=kind[1]) for kind, block in kinds.items()}
        saved += activations.relative_bias(stack, stack_share) + sum(
            saved_by_kind[id(block), policy] * (passes / stages if number >= first else 1)
            for number, (block, policy) in enumerate(layers)
        )
        saved += sum(saved_of(block, policy=policies[0]) for block in stack.heads)
        largest = max(
            _largest_layer(run, stack, block, stack_share, policy)
            for (_, policy), block in kinds.items()
        )
        extra = activations.attention_workspace(stack, stack_share)
        extra += activations.padded_operands(stack, stack_share)
        layer = max(layer, largest + extra)
    stored = _adapter_results(run, decoder, share, policies)
    saved += stored * passes / stages
    layer = max(layer - stored / decoder.depth, 0.0)  # what is stored is not made again
    predicted = predicted_tokens(run, decoder, share, targets)
    tokens = min(run.loss.chunk or predicted, predicted)
    # With their exponentials or gradients; unchunked logits of each further head are saved.
    heads = 0 if tokens < predicted else len(decoder.heads)
    divergence = 0
    if isinstance(run.objective, Distill):
        divergence = STORED_LOGITS if run.objective.stored else TEACHER_LOGITS
    wide = 1 + divergence + heads  # in float32
    logits = (wide * 4 + share.logit_bytes) * tokens * _outputs(run, decoder, share)
    repeated = [each for each in tensors(decoder) if each.axes[0] == "layers"]
    gathered = groups = 0.0
    if sizes["fsdp"] > 1 and run.mesh.zero == 3:
        item = ITEM_BYTES[run.precision.params]
        trained, base = cost.split(run.tune, tensors(decoder))
        whole = sum(  # of a quantized base, its codes; with a gradient, that too
            copies * _part(each, sizes, is_split=False) * (each.item_bytes or item)
            for copies, leaves in ((2, trained), (1, base))
            for each in leaves
            if each.axes[:1] == ("layers",)
        )
        prefix = 0 if isinstance(decoder, EncoderDecoderConfig) else len(decoder.prefix)
        gathered = whole / (decoder.depth - prefix) * stages
    if schedule and schedule.repeats > 1:
        local = sum(_part(each, sizes, is_split=run.mesh.zero == 3) for each in repeated)
        groups = local * passes * ITEM_BYTES[run.precision.params]
    dequantized = 0.0
    if isinstance(run.tune, QLora):  # XLA for CPU reads all weights of a layer before it uses them
        by_layer = Counter[str]()
        for each in cost.adapted_weights(run.tune, tensors(decoder)):
            count = each.shape[0] if each.axes[0] in LAYERS else 1
            name = each.path.rsplit("/", 3)[0]
            by_layer[name] += int(_part(each, sizes, is_split=False) / count)
        dequantized = float(share.compute_bytes * max(by_layer.values()))
    copies = _copied_weights(run, decoder, sizes, policies)
    sums = held["gradients"] if run.train.microbatches > 1 and stages == 1 else 0.0
    # A GPU frees the loss's buffers before the layers have gradients.
    shared = min(logits, held["gradients"]) if share.platform == "gpu" and not sums else 0.0
    return {
        "activations": FRAGMENTATION * (saved + max(layer - logits, 0.0)) + copies,
        "logits": FRAGMENTATION * logits - shared,
        "accumulators": sums,
        "gathered": gathered,
        "dequantized": dequantized,
        # Weights that a circular pipeline reads for a tick, under every remat policy.
        "groups": groups,
        # The gradient of the curvature, and the point of the gradient if not the parameters.
        "curvature": held["gradients"] if run.optim.curvature_every else 0.0,
        "ahead": held["parameters"] if run.optim.averages_parameters else 0.0,
    }


def evaluation_bytes(
    run: Run,
    decoder: ModelConfig,
    share: DeviceShare,
    held: Mapping[str, float],
    targets: int = 0,
) -> float:
    """Return bytes per device in an evaluation: the whole state, and a forward pass of some rows.

    They are the rows of a micro-batch, or `eval.batch` of them. No layer stores anything.

    Args:
      run: the run.
      decoder: its model.
      share: a device's part of a micro-batch.
      held: bytes of the state, from `held_bytes`.
      targets: sequence length of a decoder that has an encoder, else 0.
    """
    share = dataclasses.replace(share, has_segments=True)
    if run.eval.batch != "auto":
        rows = math.ceil(run.eval.batch / logical.ways(share.sizes, "batch"))
        share = dataclasses.replace(share, rows=rows)
    layer = 0.0
    for stack, stack_share in stacks(decoder, share, targets):
        workspace = activations.attention_workspace(stack, stack_share)
        workspace += activations.padded_operands(stack, stack_share)
        for block in set(stack.layers):
            one = activations.saved_bytes(stack, block, stack_share, policy="none")
            layer = max(layer, one + workspace)
    tokens = min(run.loss.chunk or stack_share.tokens, stack_share.tokens)
    logits = 4 * tokens * _outputs(run, decoder, share)
    state = sum(size for name, size in held.items() if name != "gradients")
    return state + FRAGMENTATION * max(layer, logits)


def _largest_layer(
    run: Run, stack: BackboneConfig, block: BlockConfig, share: DeviceShare, policy: str
) -> float:
    """Return the bytes of a layer's backward pass beyond those that the layer stores.

    Recomputed activations are made first, and gradients are as large as the activations. A LoRA has
    no gradients of large weights: the gradients of results that `dots` stores are used up one by
    one, and casts of operands have no gradient of their own. Without adapters in the MLP nothing
    keeps its gradients until those of the attention, which come after them.
    """
    saved_of = functools.partial(activations.saved_bytes, stack, block)
    stored = saved_of(share, policy=policy)
    recomputed = saved_of(share, policy="none") - stored
    if isinstance(run.tune, Full):
        return 2 * recomputed + stored
    is_lora = isinstance(run.tune, Lora)
    has_mlp = is_lora and share.reads("mlp/gate", "mlp/up", "mlp/down")
    if policy not in ("none", "dots") and not has_mlp:
        stored_mlp, mlp = activations.mlp_bytes(stack, block, share)
        attention = recomputed + stored - stored_mlp
        return max(recomputed + mlp, 2 * attention)
    if not is_lora:
        return 2 * recomputed + stored
    is_cast = share.stream_bytes != share.compute_bytes
    bare = dataclasses.replace(share, read=frozenset()) if is_cast else share
    gradients = saved_of(bare, policy="none") - (stored if policy == "dots" else 0.0)
    return recomputed + gradients


def _adapter_results(
    run: Run, decoder: ModelConfig, share: DeviceShare, policies: Sequence[str]
) -> float:
    """Return the bytes of the products with LoRA's A that layers store under `none` and `dots`."""
    if not isinstance(run.tune, Lora):
        return 0.0
    item = {"none": share.compute_bytes, "dots": share.stream_bytes}
    a_token = run.tune.rank * sum(item.get(policy, 0) for policy in policies) / len(policies)
    weights = cost.adapted_weights(run.tune, tensors(decoder))
    layers = sum(each.shape[0] if each.axes[0] in LAYERS else 1 for each in weights)
    return share.tokens * layers * a_token


def _copied_weights(run: Run, decoder: ModelConfig, sizes: Sizes, policies: Sequence[str]) -> float:
    """Return the bytes of the attention's weights as matrices, which a scan stores under `none`."""
    if run.train.stack != "scan" or isinstance(run.tune, Full | QLora):
        return 0.0
    weights = (each for each in tensors(decoder) if each.axes[0] == "layers" and each.is_matrix)
    numbers = sum(
        _part(each, sizes, is_split=run.mesh.zero == 3)
        for each in weights
        if len(each.shape) > 3 and "experts" not in each.axes  # of several heads
    )
    return (
        numbers * ITEM_BYTES[run.precision.compute_dtype] * policies.count("none") / len(policies)
    )


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


def _outputs(run: Run, decoder: ModelConfig, share: DeviceShare) -> float:
    """Return the number of outputs of a token on a device: logits, or one score."""
    return 1 if run.objective.has_reward_head else share.local_size(decoder.vocab, "vocab")
