"""Description of the collectives of a compiled step, and of the unexpected ones among them."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxlm.core import backend
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError
from jaxlm.data.batch import Answers, Rollout, TeacherTop, Tokens
from jaxlm.data.loader import (
    ANSWERS_MULTIPLE,
    with_pair,
    with_rollout,
    with_steps,
    with_teacher_top,
    with_values,
)
from jaxlm.data.teacher import most_ids
from jaxlm.monitor import chips
from jaxlm.objectives.config import Distill
from jaxlm.parallel import hlo, host, mesh
from jaxlm.parallel.config import format_mesh
from jaxlm.parallel.hlo import Collective, HloResult, Shape
from jaxlm.parallel.logical import mesh_axes, ways
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.recipes.plan.predict import Forecast, decoder_tokens, forecast
from jaxlm.recipes.train import programs
from jaxlm.recipes.train.programs import compiled_memory

Content = Literal["logits", "activations", "tokens", "parameters", "scalars"]
VOCAB_AXES = frozenset(mesh_axes("vocab"))
ROW_AXES = {"data", "fsdp", "expert"}  # over which rows are split

COUNTS = ("s32", "u32")  # such as tokens per expert; parameters and moments have other dtypes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Collectives of one kind and content, across the same axes, from the same source line."""

    kind: str
    axes: tuple[str, ...]
    content: Content
    count: int | None  # in one step; None if the trip count of a loop is unknown
    sent_bytes: float  # by each device in one step
    overlapped_bytes: float  # of those, sent while matrix products or attention may run
    largest: str  # the largest array, as XLA writes it
    source: str
    why_unexpected: str = ""

    def record(self) -> dict[str, Any]:
        """Return the JSON of the row."""
        return dataclasses.asdict(self) | {"is_expected": not self.why_unexpected}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShapes:
    """Sizes that identify the arrays of a step, and its designed communication."""

    tokens: int = 0  # of a micro-batch over all devices
    # Primes of numbers of tokens, multiplied, that no model size has; 0: nothing is judged.
    mark: int = 0
    vocab: int = 0  # a size that nothing but the vocabulary has
    head_dim: int = 0  # a size that nothing but heads has
    keys: int = 0  # elements of the keys (or values) of a micro-batch on one device, whole rows
    gathers: int = 0  # of such an array over context, in a step
    has_ring: bool = False  # context passes keys in a ring; else it gathers them
    has_places: bool = False  # experts have a capacity that tokens are sent to; else a gather
    has_groups: bool = False  # stages of a pipeline hold several groups of layers each
    figures: int = 0  # most intermediates of one kind that layers record and every device needs
    has_whole_matrices: bool = False  # the optimizer multiplies or decomposes whole matrices


def table(
    collectives: Sequence[Collective], mesh: Mapping[str, int], step: StepShapes = StepShapes()
) -> list[CollectiveRow]:
    """Return the rows of a step's collectives: unexpected ones first, then by bytes.

    If more arrays of the shape of keys are gathered than keys and values exist, none count as keys.
    """
    gathers = [each for each in collectives if each.kind == "all-gather"]
    gathers = [each for each in gathers if each.axes(mesh) == ("context",)]
    keys = [each for each in gathers if _are_keys(each.shapes, step)]
    gathered = sum(len(each.shapes) * (each.times or 1) for each in keys)
    if gathered > step.gathers:
        step = dataclasses.replace(step, keys=0)
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    sizes = (step.tokens, step.vocab, step.mark)
    for collective in collectives:
        axes = collective.axes(mesh)
        if not axes:
            continue  # every group is one device
        contents = {content_of(shape, *sizes) for shape in collective.shapes}
        content = next(known for known in get_args(Content) if known in contents)
        source = collective.source or collective.op or "unknown line"
        why = unexpected(collective.kind, axes, content, source, collective.shapes, step)
        groups.setdefault((collective.kind, axes, content, source, why), []).append(collective)
    lines = []
    for (kind, axes, content, source, why), group in groups.items():
        times = [collective.times for collective in group]
        shapes = [shape for collective in group for shape in collective.shapes]
        line = CollectiveRow(
            kind=kind,
            axes=axes,
            content=content,
            count=None if None in times else sum(n for n in times if n is not None),
            sent_bytes=sum(map(_sent, group)),
            overlapped_bytes=sum(_sent(each) for each in group if each.is_overlapped),
            largest=str(max(shapes, key=lambda shape: shape.bytes)),
            source=source,
            why_unexpected=why,
        )
        lines.append(line)
    return sorted(lines, key=lambda line: (not line.why_unexpected, -line.sent_bytes))


def _sent(collective: Collective) -> float:
    return collective.sent * (collective.times or 1)


def content_of(shape: Shape, tokens: int, vocab: int, mark: int) -> Content:
    """Classify an array by its number of elements; without a mark, arrays count as parameters."""
    if mark and math.gcd(shape.elements, mark) > 1:
        if vocab in shape.sizes:
            return "logits"
        return "activations" if shape.elements > tokens else "tokens"
    return "parameters" if shape.elements > 1 else "scalars"


def unexpected(
    kind: str,
    axes: Sequence[str],
    content: Content,
    source: str,
    shapes: Sequence[Shape],
    step: StepShapes,
) -> str:
    """Return why a collective should not exist; empty if it is expected.

    Arrays with more than one number per token stay with their tokens: `tensor` sums them, `pipe`
    passes them on, and no device needs all of them. Exceptions: keys and values over `context`,
    gathered or in a ring; tokens sent to experts; one maximum and id per token and vocabulary shard
    if ids are sampled (`ops.gumbel`). The number of elements separates queries from keys; if each
    head has its own keys, `table` counts them.

    Args:
      kind: of the collective, as XLA names it.
      axes: mesh axes that it crosses.
      content: what it sends.
      source: file and line of its operation.
      shapes: of the arrays that it sends.
      step: sizes and designed communication of the step.
    """
    if content == "logits":
        return "logits are sent whole; each device needs only its part of the vocabulary"
    file = source.rpartition(":")[0].rpartition("/")[2]
    if file == "gumbel.py" and kind == "all-gather" and set(axes) <= VOCAB_AXES:
        return ""
    if content == "parameters" and step.mark:
        return _unexpected_parameters(kind, axes, shapes, step)
    if content != "activations":
        return ""
    is_exchange = (kind == "all-to-all") == step.has_places
    if set(axes) == {"expert"} and file == "expert.py" and is_exchange:
        return ""
    if kind == "all-gather":
        if set(axes) == {"context"} and _are_keys(shapes, step) and not step.has_ring:
            return ""
        return "activations are gathered; no device needs them whole"
    if kind in ("all-to-all", "ragged-all-to-all"):
        return "activations are exchanged; only those sent to experts need it"
    if kind == "collective-permute":
        passing = {"pipe", "context"} if step.has_ring else {"pipe"}
        is_passing = len(axes) == 1 and axes[0] in passing
        return "" if is_passing else "activations are passed on; only stages and rings do that"
    if kind in ("all-reduce", "reduce-scatter") and ROW_AXES & set(axes):
        return "activations are summed over devices that hold other rows"
    return ""


def _unexpected_parameters(
    kind: str, axes: Sequence[str], shapes: Sequence[Shape], step: StepShapes
) -> str:
    """Return why parameters, gradients or optimizer state should not be sent so; empty if expected.

    Sums may cross any axis; whole vocabulary tables may not be summed over axes that split them.
    `fsdp` gathers what it splits (weights at zero=3, updates at zero=1 and 2). A circular pipeline
    passes its groups of layers to the stages. All other axes compute with the part that they hold.
    Exceptions: intermediates that every device needs, such as the largest logit of each head for
    clipping; muon multiplies and soap decomposes whole matrices, except vocabulary tables.
    """
    if all(shape.dtype in COUNTS for shape in shapes):
        return ""
    has_vocab = any(step.vocab in shape.sizes for shape in shapes)
    if kind in ("all-reduce", "reduce-scatter"):
        is_table = has_vocab and VOCAB_AXES & set(axes)
        return "a table is summed whole over devices that hold parts of it" if is_table else ""
    is_figure = all(shape.elements <= step.figures for shape in shapes)
    if kind == "all-gather" and (set(axes) == {"fsdp"} or is_figure):
        return ""
    if step.has_groups and kind in ("all-to-all", "collective-permute") and set(axes) == {"pipe"}:
        return ""
    if step.has_whole_matrices and set(axes) <= {"fsdp", "tensor"} and not has_vocab:
        return ""
    if kind == "all-gather":
        return "parameters are gathered; each device needs only its part"
    return "parameters are moved to other devices; each device needs only its part"


def unsharded_arrays(
    results: Sequence[HloResult], mesh: Mapping[str, int], step: StepShapes
) -> list[str]:
    """Return a line per operation whose result has the whole vocabulary for several tokens.

    Operations inside fusions count. Without a mesh axis that splits the vocabulary, or a mark that
    identifies tokens, nothing is judged.
    """
    if not step.mark or ways(mesh, "vocab") == 1:
        return []
    sizes = (step.tokens, step.vocab, step.mark)
    whole = [each for each in results if content_of(each.shape, *sizes) == "logits"]
    sources = [each.source or each.op_name or "unknown line" for each in whole]
    pairs = zip(sources, whole, strict=True)
    return list(dict.fromkeys(f"{source}: {each.op} of {each.shape}" for source, each in pairs))


def _are_keys(shapes: Sequence[Shape], step: StepShapes) -> bool:
    """Identify keys by shape, not by line: the compiler moves a gather past operations on keys."""
    return all(s.sizes[-1:] == (step.head_dim,) and s.elements == step.keys for s in shapes)


def compile_step(run: Run, grid: Mesh) -> jax.stages.Compiled:
    """Compile the update of a run for the devices of a mesh, from shapes alone."""
    # The random key is a number: the chips of the mesh may be absent.
    engine = programs.without_data(run, grid, vocabulary(run))
    (platform,) = {device.platform for device in grid.devices.flat}
    with backend.compiling_for(platform), jax.set_mesh(grid):
        batch = abstract_batch(run, grid)
        return engine.step.lower(engine.abstract(), batch, **engine.extra_inputs).compile()


def with_answers(batch: Tokens, run: Run) -> Tokens:
    """Return a host's batch with the fields of answers that the objective of the run has."""
    objective = run.objective
    if objective.samples_answers:
        batch = with_rollout(batch)
    if objective.has_value_head:
        batch = with_values(batch)
    if objective.labels_steps:
        return with_steps(batch)
    if isinstance(objective, Distill) and objective.stored:
        return with_teacher_top(batch, most_ids(vocabulary(run)))
    return with_pair(batch) if objective.compares_answers else batch


def abstract_batch(run: Run, grid: Mesh) -> Tokens:
    """Return shapes and sharding of a run's batches, with the fields that its objective has."""
    sharding = host.batch_sharding(grid)

    def slots(length: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((run.train.batch, length), dtype, sharding=sharding)

    read, wrote = run.data.sequence, decoder_tokens(run) or run.data.sequence
    fields: Any = dict.fromkeys(Tokens._fields, slots(wrote))
    fields |= dict.fromkeys(("weights", "predicts_ahead", "steps"), slots(wrote, jnp.float32))
    fields |= dict.fromkeys(("source", "source_segments"), slots(read))
    is_paired = run.architecture == "encoder-decoder"
    is_stored = isinstance(run.objective, Distill) and bool(run.objective.stored)
    has = {
        "visible_until": run.objective.bidirectional,
        "source": is_paired,
        "source_segments": is_paired,
        "block_positions": run.objective.block_positions is not None,
        "predicts_ahead": run.objective.marks_mtp_rows,
        "answers": run.objective.compares_answers and not run.objective.labels_steps,
        "steps": run.objective.labels_steps,
        "rollout": run.objective.samples_answers,
        "prefix_segments": False,  # of tasks alone
        "teacher": is_stored,
    }
    columns = 5 if run.objective.has_value_head else 3
    fields["rollout"] = Rollout(*(slots(wrote, jnp.float32) for _ in range(columns)))
    shape, half = (run.train.batch, wrote, most_ids(vocabulary(run))), slots(wrote, jnp.float16)
    top: Any = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in (jnp.int32, jnp.float16)
    ]
    fields["teacher"] = TeacherTop(top[0], top[1], half, half)
    fields["answers"] = Answers(*(slots(ANSWERS_MULTIPLE, jnp.float32) for _ in range(3)))
    return Tokens(**fields | {name: None for name, is_used in has.items() if not is_used})


def vocabulary(run: Run) -> int:
    """Return the rows of the embedding; 4096 if the tokenizer is not trained yet."""
    return 4096 if run.model.vocab == "auto" else run.model.vocab


def compile_for(run: Run, name: str, say: Log = lambda _: None) -> dict[str, Any]:
    """Compile a run's step for a TPU slice such as v5e-16: bytes, FLOPs and collectives per chip.

    `exposed_seconds` is the least time of the bytes that are sent while no product runs, and
    `roofline` a bound of the speed (`_roofline`).

    Raises CommandError if the slice or its compiler does not exist here, and ConfigError if the run
    does not fit.
    """
    known = chips.tpu_slice(name, flag="--topology")
    divisibility.check(run, known.devices)
    grid = mesh.build(run.mesh, devices_of(known))
    place = f"{format_mesh(grid.shape)} on {name}, {known.devices} chips"
    say(f"{place}; compiling for them takes minutes")
    compiled = compile_step(run, grid)
    memory = compiled_memory(compiled)
    # The sizes of a real run have no mark that identifies activations: no judgment here.
    text = compiled.as_text() or ""
    rows = table(hlo.read_collectives(text), dict(grid.shape))
    exposed = sum(row.sent_bytes - row.overlapped_bytes for row in rows) / known.chip.link_speed
    return {
        "topology": known.topology,
        "devices": known.devices,
        "mesh": dict(grid.shape),
        "bytes_per_device": memory,
        "hbm_bytes": known.chip.memory_bytes,
        "fits": memory["total"] <= known.chip.memory_bytes,
        "collectives": [line.record() for line in rows],
        "exposed_seconds": exposed,
        "roofline": _roofline(forecast(run, known), hlo.read_flops(text), exposed),
    }


def _roofline(plan: Forecast, flops: hlo.ProgramFlops, exposed: float) -> dict[str, Any]:
    """Return a compiled step's FLOPs on a chip, those of the plan, and the bound of MFU.

    The least time has all products at the peak of the chip, the communication that no product
    hides, and nothing else: no elementwise operation, no wait for memory. `mfu` is None if not all
    products could be counted.
    """
    devices, peak = plan.machine.devices, plan.peak_flops
    model = plan.flops_per_token * plan.run.tokens_per_step / devices
    seconds = flops.total / peak + exposed
    return {
        "flops_per_device": flops.total,
        "attention_flops_per_device": flops.attention,
        "planned_flops_per_device": plan.hardware_flops / devices,
        "model_flops_per_device": model,
        "unknown_products": flops.unknown,
        "peak_flops": peak,
        "product_seconds": flops.total / peak,
        "seconds": seconds,
        "mfu": model / (peak * seconds) if seconds and not flops.unknown else None,
    }


def compile_here(run: Run, count: int, say: Log = lambda _: None) -> dict[str, Any]:
    """Compile a step for `count` CPU devices: bytes per device. Raises ConfigError for a misfit."""
    setup.start(count)
    divisibility.check(run, count)
    grid = mesh.build(run.mesh, jax.devices()[:count])
    say(f"{format_mesh(grid.shape)} on this CPU; compiling the step")
    return {"devices": count, "bytes_per_device": compiled_memory(compile_step(run, grid))}


def devices_of(known: chips.Machine) -> list[jax.Device]:
    """Return the chips of a slice, to compile for. Raises CommandError without the TPU compiler."""
    # Without these, libtpu queries the cloud's metadata server and writes logs.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    jax.config.update("jax_platforms", "cpu")
    assert known.topology
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=known.topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        what, where = "the compiler for TPUs does not start here", f"--topology, {known.topology}"
        fix = "pip install 'jaxlm[tpu]'    # in an environment of its own"
        if "lockfile" in str(error):
            fix = "wait for the other process of this machine that compiles for TPUs"
        why = str(error).partition("\n")[0][:200]
        raise CommandError(what, where=where, why=why, fix=fix) from error
    return list(topology.devices)
