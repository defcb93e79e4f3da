"""A run made small enough to try on fake devices: the same parts, the same pattern, the same axes, and sizes that still divide."""

import dataclasses
import math
from typing import Any

from jaxlm.core import config
from jaxlm.core.config import Change
from jaxlm.ops.kernels import Target
from jaxlm.parallel.config import AXES, MeshConfig
from jaxlm.recipes import attention
from jaxlm.recipes.config import Run

HEAD_DIM = 8
VOCAB = 512  # more than the bytes' ids, and more than any width here
# Nothing has these as sizes, and parts of them are marks too, however an array is reshaped.
MARKS = (5, 7, 11, 13, 17)
# Drawn by micro-batch where there are stages, and by place where a ring deals slots out: no loss of one device to compare with.
RATES = (
    "embedding_dropout",
    "attention_dropout",
    "residual_dropout",
    "layer_drop",
    "embedding_noise",
)


@dataclasses.dataclass(frozen=True)
class Small:
    """A small run, the mesh it fits, and what became what on the way."""

    run: Run
    mesh: dict[str, int]
    mark: int  # divides the number of elements of an array just where the array has tokens
    changes: tuple[Change, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, over all devices."""
        return self.run.tokens_per_step // self.run.train.microbatches


def mesh_sizes(wanted: MeshConfig, limit: int) -> dict[str, int]:
    """The axes of a mesh at 2 where they split anything, then doubled while `limit` devices suffice, the longest first.

    `auto` may take any size.
    """
    sizes = {axis: 1 if getattr(wanted, axis) == 1 else 2 for axis in AXES}
    most = {
        axis: math.inf if getattr(wanted, axis) == "auto" else getattr(wanted, axis)
        for axis in AXES
    }
    while math.prod(sizes.values()) * 2 <= limit:
        free = [axis for axis in AXES if sizes[axis] > 1 and sizes[axis] * 2 <= most[axis]]
        if not free:
            break
        # An axis of which the config says nothing grows last.
        longest = max(free, key=lambda axis: (most[axis] < math.inf, most[axis] / sizes[axis]))
        sizes[longest] *= 2
    return sizes


def shrink(run: Run, steps: int, limit: int) -> Small:
    """The run on at most `limit` devices (more where 2 an axis needs more), `steps` long, in float32.

    The number of tokens has a prime factor that no size of the model has. So an array on a device holds tokens just
    where its number of elements has this factor, whatever the compiler made of its shape. What `auto` would choose for
    attention by the sizes of the run itself is asked for by name; blockwise stands in for kernels of other platforms.
    Nothing is dropped and no noise added: other meshes draw other numbers.
    """
    mesh = mesh_sizes(run.mesh, limit)
    model = _model(run.model, mesh, run.train.pipeline_repeats)
    mark = next(mark for mark in MARKS if all(size % mark for size in model.values() if size))
    sequence = 2 * mark * mesh["context"]  # ring attention deals out two parts a device
    microbatches = max(min(run.train.microbatches, 2), mesh["pipe"])
    rows = math.prod(mesh[axis] for axis in ("data", "fsdp", "expert")) * microbatches
    if hasattr(run.model, "context"):
        model["context"] = 2 ** math.ceil(math.log2(sequence))  # a table of positions has no tokens
    if getattr(run.model, "capacity", None):
        # As many places as the mark in each row, so that what is sent to experts has it too.
        model["capacity"] = mark * model["experts"] / (sequence * model["top_k"])
    raw = config.to_json(run)
    raw["model"] |= model
    raw["mesh"] |= mesh
    if getattr(run.model, "dropout", 0):
        raw["model"]["dropout"] = 0.0
    raw["regularisation"] |= {name: 0.0 for name in RATES if raw["regularisation"][name]}
    kernels = _kernels(run, mesh)
    if mesh["context"] > 1:
        raw["mesh"]["context_keys"] = "ring" if "ring" in kernels else "gather"
    else:
        raw["train"]["attention"] = "reference" if kernels == {"reference"} else "blockwise"
    raw["data"] |= {"sequence": sequence, "sequence_warmup": []}
    raw["train"] |= {"steps": steps, "batch": rows, "microbatches": microbatches, "patience": None}
    raw["train"]["batch_warmup"] = []
    if run.loss.chunk is not None:
        # Half of what is scored at once; behind a pipeline that is all micro-batches.
        raw["loss"]["chunk"] = rows * sequence // (microbatches if mesh["pipe"] == 1 else 1) // 2
    raw["schedule"] = {"name": "constant", "warmup": "0"}
    raw["precision"] = {"params": "float32", "compute": "float32"}
    if hasattr(run.optim, "newton_schulz_dtype"):
        raw["optim"]["newton_schulz_dtype"] = "float32"
    small = config.from_json(Run, raw)
    changes = [change for change in config.diff(run, small) if change.path.partition(".")[0] in raw]
    return Small(small, mesh, mark, tuple(changes))


def _kernels(run: Run, small: dict[str, int]) -> set[str]:
    """Those with which the run itself computes attention, on its own mesh; an axis that is `auto` has the small one's size."""
    asked = {axis: getattr(run.mesh, axis) for axis in AXES}
    sizes = {axis: small[axis] if size == "auto" else size for axis, size in asked.items()}
    decoder = dataclasses.replace(run.model, vocab=VOCAB).build()
    decoder = attention.fitted(run, decoder, sizes, Target("cpu"))
    return {layer.attention.kernel for layer in decoder.layers}


def _model(model: Any, mesh: dict[str, int], repeats: int) -> dict[str, Any]:
    """The model's sizes: as few heads as `tensor` and the grouping allow, as few layers as stages and the pattern do."""
    tensor = mesh["tensor"]
    first = min(getattr(model, "dense_depth", 0), 1)
    less = {"dense_depth": first} if hasattr(model, "dense_depth") else {}
    decoder = dataclasses.replace(model, vocab=VOCAB, **less).build()
    heads_of = decoder.pattern[0].attention
    kv_heads = math.lcm(tensor, min(heads_of.kv_heads, 2))
    # Where heads can share keys they do, so that queries are told from keys by their number.
    grouped = 2 if hasattr(model, "kv_heads") else 1
    heads = kv_heads * grouped
    width = math.lcm(heads * HEAD_DIM, mesh["fsdp"])
    turns = -(-(decoder.depth - len(decoder.prefix)) // len(decoder.pattern))
    turns = min(turns, 2) if mesh["pipe"] == 1 else repeats * mesh["pipe"]
    experts = math.lcm(mesh["expert"], min(getattr(model, "experts", 1), 4))
    groups = min(getattr(model, "groups", 1), experts // 2)
    is_limited = getattr(model, "top_groups", 1) < getattr(model, "groups", 1)
    sizes = {
        "vocab": math.lcm(VOCAB, tensor),
        "width": width,
        "depth": len(decoder.prefix) + turns * len(decoder.pattern),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "nope_dim": HEAD_DIM // 2,
        "rope_dim": HEAD_DIM // 2,
        "value_dim": HEAD_DIM,
        "kv_rank": 2 * width,
        "query_rank": 2 * width if getattr(model, "query_rank", None) else None,
        "hidden": 2 * width,
        "experts": experts,
        "groups": max(groups, 1),
        "top_groups": 1 if is_limited else max(groups, 1),
        "top_k": min(getattr(model, "top_k", 1), 2),
        "shared": 2 * width if getattr(model, "shared", 0) else 0,
        "dense_depth": first,
        "dense_hidden": 2 * width,
    }
    return {name: size for name, size in sizes.items() if hasattr(model, name)}
