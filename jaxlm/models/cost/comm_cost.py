"""What devices send each other in a step, in closed form, axis by axis. Free of JAX."""

import dataclasses
import math

from jaxlm.models.config import Backbone, EncoderDecoder, ModelConfig
from jaxlm.models.cost.tensors import tensors
from jaxlm.nn.config import AttentionConfig, MoeConfig
from jaxlm.parallel import logical
from jaxlm.parallel.logical import LAYERS
from jaxlm.parallel.schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a chip is given in one step, and the bytes of a number in a gathered weight, a summed gradient, an activation."""

    model: ModelConfig
    sequence: int
    rows: int  # rows of this chip's part of the batch: tokens / sequence, where context and tensor share them
    microbatches: int = 1
    repeats: int = 1  # groups of layers that a stage of a pipeline holds
    weight_bytes: int = 2
    gradient_bytes: int = 4
    activation_bytes: int = 2
    targets: int = 0  # tokens of a row that a decoder writes beside an encoder's
    zero: int = 3  # what fsdp splits: the optimizer's state (1), gradients too (2), weights too (3)

    @property
    def stream_bytes(self) -> int:
        """The residual stream of all rows, whole."""
        return self.rows * self.sequence * self.model.width * self.activation_bytes

    def schedule(self, sizes: dict[str, int]) -> Schedule:
        """How micro-batches go through the stages."""
        return Schedule(sizes["pipe"], self.microbatches, self.repeats)

    def passes(self, sizes: dict[str, int]) -> tuple[float, int]:
        """How often in one step a chip goes through its blocks, and through the embedding and the unembedding.

        Once for each micro-batch; in a pipeline through one of its groups of blocks for each tick, and through the tables
        once, for all micro-batches.
        """
        if sizes["pipe"] > 1:
            return self.schedule(sizes).ticks / self.repeats, 1
        return self.microbatches, self.microbatches


def matrices(model: ModelConfig, tensor: int) -> tuple[float, float, float]:
    """Numbers in the matrices of all blocks, in embedding and unembedding together, and in the embedding: as many as are
    left where `tensor` devices share what they can.
    """
    lookup = model.vocab * model.width / tensor
    sizes = {"tensor": tensor}
    blocks = sum(
        each.size / math.prod(logical.ways(sizes, axis) for axis in each.axes)
        for each in tensors(model)
        if each.is_matrix and each.axes[0] in LAYERS
    )
    return blocks, lookup * (1 if model.tied else 2), lookup


def fsdp_bytes(work: Work, sizes: dict[str, int]) -> float:
    """Sent by a chip over fsdp in one step.

    Where weights are split, ZeRO 3, in each pass blocks and the unembedding are gathered forward and again backward, the
    embedding once, which of a tied one serves the unembedding too, and gradients scattered as they are summed. A pipeline does
    so with its blocks in each tick. Else updated weights are gathered once, in the bytes they are kept in, and gradients of
    each pass summed: scattered under ZeRO 2, and handed out as over data under 1.
    """
    blocks, tables, lookup = matrices(work.model, sizes["tensor"])
    through_blocks, through_tables = work.passes(sizes)
    is_split = work.zero == 3
    gathered = (
        2 * blocks * through_blocks + (lookup + tables) * through_tables
        if is_split
        else blocks + tables
    )
    summed = (blocks * through_blocks + tables * through_tables) * (2 if work.zero == 1 else 1)
    sent = gathered * work.weight_bytes + summed * work.gradient_bytes
    return _ring(sizes["fsdp"]) * sent / sizes["pipe"]


def data_bytes(work: Work, sizes: dict[str, int]) -> float:
    """Over data: all gradients that a chip holds, summed and handed out.

    In each pass, as the step is written and XLA for CPU compiles it: a compiler may move the sum out of the loop.
    """
    blocks, tables, _ = matrices(work.model, sizes["tensor"])
    through_blocks, through_tables = work.passes(sizes)
    summed = blocks * through_blocks + tables * through_tables
    parts = sizes["pipe"] * sizes["fsdp"]
    return 2 * _ring(sizes["data"]) * summed / parts * work.gradient_bytes


def tensor_bytes(work: Work, sizes: dict[str, int], *, is_remat: bool = True) -> float:
    """Over tensor: sums of the stream.

    In each layer 2 forward, 5 backward (each product that reads the stream is summed by itself: queries, keys, values,
    gate, up), and 1 of those forward again under full remat; beside the layers, the embedding forward and the unembedding
    backward. A decoder's attention across adds 1 forward, 1 backward for its queries, 1 of those forward again, and 2
    backward of what its keys and values have read. Heads that are made of latents give back the sums of these.
    """
    model = work.model
    if isinstance(model, EncoderDecoder):
        share, across = work.targets / work.sequence, model.decoder.depth
        read = _sums(model.encoder, is_remat=is_remat) + 2 * across + 1
        wrote = _sums(model.decoder, is_remat=is_remat) + (2 + is_remat) * across + 2
        streams = read + share * wrote
    else:
        streams = _sums(model, is_remat=is_remat) / sizes["pipe"] + 2
    return 2 * _ring(sizes["tensor"]) * streams * work.stream_bytes


def _sums(stack: Backbone, *, is_remat: bool) -> float:
    """Of the stream, in the layers of a stack, but for attention across."""
    (block, *_), width = stack.pattern, stack.width
    backward = 2 if isinstance(block.mlp, MoeConfig) or block.mlp.gated else 1
    return (2 + backward + is_remat + _given_back(block.attention, width) / width) * stack.depth


def _given_back(attention: AttentionConfig, width: int) -> int:
    """Numbers of a token that are summed over heads, going back from queries, keys and values."""
    latent = attention.latent
    if latent is None:
        return 3 * width
    return (latent.query_rank or width) + 2 * latent.rank + latent.rotary_dim


def context_bytes(work: Work, sizes: dict[str, int]) -> float:
    """Over context: keys and values of whole rows, gathered forward and again under remat, their gradients scattered; and
    the gradients of all parameters, summed in each pass as over data, but that of the embedding before fsdp splits it.
    """
    assert not isinstance(work.model, EncoderDecoder), "its rows are whole"
    attention = work.model.pattern[0].attention
    kv = attention.kv_heads * (attention.head_dim + attention.value_dim) / sizes["tensor"]
    one = work.rows * work.sequence * sizes["context"] * kv * work.activation_bytes
    keys = 3 * one * work.model.depth / sizes["pipe"]
    blocks, tables, lookup = matrices(work.model, sizes["tensor"])
    through_blocks, through_tables = work.passes(sizes)
    split = blocks * through_blocks + (tables - lookup) * through_tables
    summed = (split / sizes["fsdp"] + lookup * through_tables) / sizes["pipe"]
    return _ring(sizes["context"]) * (keys + 2 * summed * work.gradient_bytes)


def pipe_bytes(work: Work, sizes: dict[str, int]) -> float:
    """Over pipe: the stream of a micro-batch to the next stage each tick, and its gradient back; and four sums of the
    stream: of the embedding, as stages hold parts of the vocabulary, and of the last stage's result forward, of the
    gradients of the unembedding and of the first stage's batch backward. Beside them, what `dealt_bytes` counts.
    """
    if sizes["pipe"] == 1:
        return 0.0
    moved = 2 * work.schedule(sizes).ticks * work.stream_bytes / work.microbatches
    return moved + 2 * _ring(sizes["pipe"]) * 4 * work.stream_bytes + dealt_bytes(work, sizes)


def dealt_bytes(work: Work, sizes: dict[str, int]) -> float:
    """Over pipe with R > 1 groups of blocks on each of P stages: each chip's parameters to the stages of their groups, and
    their gradients back.

    Each way (P - 1) / P of them where P divides R. Where R divides P, (R - 1) / R of them are exchanged among R chips, and
    all handed on to others. Else XLA gathers them: P - 1 times what a chip holds, at most.
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
