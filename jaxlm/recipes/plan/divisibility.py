"""Check that a run divides over its devices and its mesh, and suggest fixes. Free of JAX."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import divisors
from jaxlm.models.config import EncoderDecoderConfig, ModelConfig, is_sum_over_rows
from jaxlm.nn.config import BlockConfig
from jaxlm.parallel import logical
from jaxlm.parallel.config import (
    AXES,
    MAX_FIXES,
    format_mesh,
    layout_fixes,
    mesh_flags,
    nearest_layouts,
    remaining_fixes,
    slice_crossings,
)
from jaxlm.parallel.logical import Sizes
from jaxlm.parallel.schedule import Schedule
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels
from jaxlm.tune.config import Full, Quantized

MAX_TRIED = 200  # combinations of settings; the nearest come first
MESHES_TRIED = 8  # with other settings, if no mesh fits by itself
MAX_NOISE_PARTS = 8  # of a batch, to measure gradient noise if the step has no micro-batches
LINES = 6  # of the why and the fix of an error


class Indivisible(NamedTuple):
    """A number that does not divide: the reason, its setting, and the nearest valid values."""

    why: str
    path: str
    values: tuple[Any, ...]


def check(run: Run, count: int, slices: int = 1) -> None:
    """Raise ConfigError with everything that keeps a run from a mesh of `count` devices.

    Each line of the fix works when it is pasted alone: the nearest meshes first, then other
    settings for this mesh; if neither is enough, meshes with the settings that they need.
    `slices` is the number of groups of devices, such as TPU slices.
    """
    if isinstance(run.tune, Quantized):
        raise ConfigError(
            "quantized weights cannot be trained",
            where=f"tune.name = {run.tune.name}",
            why=run.tune.unmerged,
            fix="train the model before quantization: base.json of a quantized run names it",
        )
    requested = {axis: getattr(run.mesh, axis) for axis in AXES}
    why = []
    try:
        sizes = run.mesh.sizes(count)
        misfits = list(find_indivisible(run, sizes))
    except ConfigError as error:
        needed, *_ = error.why.splitlines()  # the search below also takes the model into account
        why.append(f"{needed} devices, {count} are available")
        fixed = {axis: 1 if size == "auto" else size for axis, size in requested.items()}
        sizes, misfits = None, list(find_indivisible(run, fixed))
    is_cut = sizes is None or slice_crossings(sizes, slices) is not None
    if not is_cut:
        why.append(f"{slices} slices: the outermost axes cross them and must divide by that number")
    why += [misfit.why for misfit in misfits]
    if not why:
        return
    near = sizes or requested
    layouts = [
        fit for fit in nearest_layouts(near, count) if slice_crossings(fit, slices) is not None
    ]

    def line(fit: Sizes) -> str:
        return "" if any(find_indivisible(run, fit)) else mesh_flags(fit, requested)

    fixes = layout_fixes(near, layouts, line)
    why += remaining_fixes(fixes)
    fixes = fixes[:MAX_FIXES]
    if sizes and is_cut and (changes := _changes(run, sizes, misfits)):
        fixes.append(config_flags(changes))
    fixes = fixes or _meshes_with_settings(run, near, layouts, requested)
    room = LINES - len(fixes)
    if len(why) > room:
        why[room - 1 :] = ["; ".join(why[room - 1 :])]
    what = f"the run does not fit {count} device{'s' if count > 1 else ''}"
    cut = " x ".join(f"{axis}={size}" for axis, size in requested.items() if size != 1)
    where = f"mesh {format_mesh(sizes) if sizes else cut or 'of one'}"
    raise ConfigError(what, where=where, why="\n".join(why), fix="\n".join(fixes))


def schedule(run: Run, sizes: Sizes) -> Schedule | None:
    """Return the pipeline schedule of a mesh; None if it has one stage."""
    stages = logical.ways(sizes, "stages")
    return None if stages == 1 else Schedule(stages, run.train.microbatches, run.train.turns)


def unscaled(run: Run) -> ConfigError:
    """Return the error for a command that cannot resize the run's model."""
    what = f"model.family={run.model.family} cannot be resized"
    why = "an encoder-decoder has no rule for other widths and depths"
    fix = "train it: a first step shows whether it fits"
    return ConfigError(what, where="model.family", why=why, fix=fix)


def find_indivisible(run: Run, sizes: Sizes) -> Iterator[Indivisible]:
    """Yield every number of the run that does not divide on a mesh of these sizes."""
    vocab = logical.ways(sizes, "vocab") if run.model.vocab == "auto" else run.model.vocab
    decoder = dataclasses.replace(run.model, vocab=vocab).build()
    yield from _model(run, decoder, sizes)
    yield from _rows(run, decoder, sizes)
    yield from _warmups(run, decoder, sizes)


def _model(run: Run, decoder: ModelConfig, sizes: Sizes) -> Iterator[Indivisible]:
    blocks = dict.fromkeys(decoder.layers)
    dims = [("vocab", "vocab", decoder.vocab), ("embed", "width", decoder.width)]
    for block in blocks:
        dims.append(("heads", "heads", block.attention.heads))
        if (latent := block.attention.latent) is None:
            dims.append(("kv_heads", "kv_heads", block.attention.kv_heads))
        else:
            dims.append(("latent", "kv_rank", latent.rank))
            dims.append(("latent", "query_rank", latent.query_rank or 0))
        dims += [
            (name, field, value)
            for name, field in (("mlp", "hidden"), ("mlp", "shared"), ("experts", "experts"))
            if (value := getattr(block.mlp, field, 0))
        ]
    for name, field, size in dict.fromkeys(dims):
        ways = logical.ways(sizes, name)
        if size % ways:
            # The dense layers of a mixture of experts have their own setting.
            is_own = getattr(run.model, field, 0) == size
            if not is_own and getattr(run.model, "dense_hidden", 0) == size:
                field = "dense_hidden"
            step = math.lcm(ways, _width_unit(run, block)) if field == "width" else ways
            axes = logical.RULES[name]
            yield _misfit(f"{field} = {size}", f"model.{field}", size, ways, axes, step=step)
    if isinstance(decoder, EncoderDecoderConfig):
        for axis in ("pipe", "context"):
            if sizes[axis] > 1:
                why = f"{axis} = {sizes[axis]} does not split an encoder-decoder, 1 would do"
                yield Indivisible(why, f"mesh.{axis}", (1,))
        return
    stages = logical.ways(sizes, "stages")
    unit = len(decoder.pattern) * stages * run.train.turns
    layers, first = decoder.depth - len(decoder.prefix), len(decoder.prefix)
    if stages > 1 and layers % unit:
        named = f"depth = {decoder.depth}" + (f" without its first {first}" if first else "")
        yield _misfit(named, "model.depth", layers, unit, "pipe", offset=first)


def _width_unit(run: Run, block: BlockConfig) -> int:
    """Return the divisor of a width on any mesh: its rotated heads, or 1 if head_dim is set."""
    attention = block.attention
    if attention.latent is not None or getattr(run.model, "head_dim", "auto") != "auto":
        return 1
    return attention.heads * (1 if attention.rotary is None else 2)


def _rows(run: Run, decoder: ModelConfig, sizes: Sizes) -> Iterator[Indivisible]:
    length, batch, parts = run.data.sequence, run.train.batch, run.train.microbatches
    ways = logical.ways(sizes, "length")
    if ways > 1:
        unit = ways * (2 if attention_kernels.has_ring(run, decoder, sizes) else 1)
        if length % unit:
            yield _misfit(f"sequence = {length}", "data.sequence", length, unit, "context")
    rows, stages = logical.ways(sizes, "batch"), logical.ways(sizes, "stages")
    if run.train.pipeline == "circular" and parts < stages:
        per_device, left = divmod(batch, rows)
        # The fewest that fill the stages and divide this batch.
        counts = [] if left else [n for n in divisors(per_device) if n >= stages]
        why = f"microbatches = {parts} cannot fill {stages} stages (pipe)"
        parts = min(counts, default=stages)
        yield Indivisible(f"{why}, {parts} would", "train.microbatches", (parts,))
    axes = logical.RULES["batch"]
    if batch % (rows * parts):
        misfit = _misfit(f"batch = {batch}", "train.batch", batch, rows * parts, axes)
        devices = f"{rows} devices x {parts} micro-batches" if parts > 1 else f"{rows} devices"
        yield misfit._replace(why=f"{misfit.why}: {devices}")
    if run.eval.batch != "auto" and run.eval.batch % rows:
        size = run.eval.batch
        yield _misfit(f"eval.batch = {size}", "eval.batch", size, rows, axes)


def _warmups(run: Run, decoder: ModelConfig, sizes: Sizes) -> Iterator[Indivisible]:
    """Yield warm-up batches and rows that do not divide as the later ones do."""
    unit = logical.ways(sizes, "batch") * run.train.microbatches
    parts = logical.ways(sizes, "length")
    parts *= 2 if attention_kernels.has_ring(run, decoder, sizes) else 1
    for size in dict.fromkeys(stage.rows for stage in run.pace.phases[:-1]):
        if size % unit:
            why = f"{size} rows of the warm-up do not divide by {unit}"
            yield Indivisible(why, "train.batch_warmup", ((),))
    for length in dict.fromkeys(stage.length for stage in run.pace.phases[:-1]):
        if length % parts:
            why = f"{length} tokens of the warm-up do not divide by {parts}"
            yield Indivisible(why, "data.sequence_warmup", ((),))


def sums_locally(run: Run, model: ModelConfig, sizes: Sizes) -> bool:
    """Return if a step sums gradients over `data` once, see `training.gradient.GradientSpec`.

    Otherwise it does so in each micro-batch. An adapter has a base with further parameters.
    """
    has_replicas = sizes["data"] > 1 and sizes["pipe"] == 1 and run.train.microbatches > 1
    if not has_replicas or not isinstance(run.tune, Full) or not run.objective.sums_over_rows:
        return False
    return is_sum_over_rows(run.regularization.applied(model))


def observer_microbatches(run: Run, sizes: Sizes) -> int:
    """Return the micro-batches of the observer: the step's, or enough to measure gradient noise.

    Raises ConfigError if `log.layers` has the noise and a device has one row.
    """
    microbatches = run.train.microbatches
    if microbatches > 1 or "noise" not in run.log.layers:
        return microbatches
    ways = logical.ways(sizes, "batch")
    rows = math.gcd(*(phase.rows for phase in run.pace.phases))
    parts = max(n for n in divisors(max(rows // ways, 1)) if n <= MAX_NOISE_PARTS)
    if parts == 1:
        entries = [entry.partition("@") for entry in run.train.batch_warmup]
        doubled = ",".join(f"{2 * int(rows)}@{span}" for rows, _, span in entries)
        warmup = f" --config.train.batch_warmup={doubled}" if doubled else ""
        rest = ",".join(name for name in run.log.layers if name != "noise")
        without = f"--config.log.layers={rest}" if rest else "'--config.log.layers=()'"
        raise ConfigError(
            "log.layers cannot measure the noise of the gradient",
            where="log.layers",
            why=f"noise is the difference between the gradients of equal parts of a batch, and"
            f" {rows} rows on {ways} devices do not divide into parts of whole rows",
            fix=f"--config.train.batch={2 * run.train.batch}{warmup}\n"
            f"{without}    # does not measure the noise",
        )
    return parts


def _misfit(
    named: str, path: str, size: int, unit: int, axes: Any, *, step: int = 0, offset: int = 0
) -> Indivisible:
    """Describe a size that does not divide by `unit`.

    Suggested values are `offset` plus a multiple of `step`, or of the unit without one.
    """
    step = step or unit
    values = tuple(value for value in (size // step * step, -(-size // step) * step) if value)
    values = tuple(offset + value for value in sorted(values, key=lambda value: abs(value - size)))
    over = " x ".join((axes,) if isinstance(axes, str) else axes)
    suggested = " or ".join(map(str, values))
    why = f"{named} does not divide by {unit} ({over}), {suggested} would"
    return Indivisible(why, path, values)


def _meshes_with_settings(
    run: Run, near: Mapping[str, Any], layouts: list[dict[str, int]], requested: Mapping[str, Any]
) -> list[str]:
    """Return the nearest meshes, each with the settings that it needs."""
    # Meshes of replicas alone are tried last, as they suit every model.
    replicas = [fit for fit in layouts[MESHES_TRIED:] if fit["data"] == math.prod(fit.values())]

    def line(fit: Sizes) -> str:
        changes = _changes(run, fit, list(find_indivisible(run, fit)))
        return f"{mesh_flags(fit, requested)} {config_flags(changes)}".strip() if changes else ""

    return layout_fixes(near, [*layouts[:MESHES_TRIED], *replicas], line)[:MAX_FIXES]


def config_flags(settings: Mapping[str, Any]) -> str:
    """Return the flags that change settings."""
    return " ".join(f"--config.{path}={value}" for path, value in settings.items())


def _changes(run: Run, sizes: Sizes, misfits: list[Indivisible]) -> dict[str, Any]:
    """Return the nearest settings that fit this mesh; empty if none are found."""
    known = config.flatten(run)
    paths = {misfit.path: misfit.values for misfit in misfits if known.get(misfit.path)}
    # Both numbers of heads change together, and are limited by the width.
    if {"model.heads", "model.kv_heads"} & set(paths):
        heads = known["model.heads"]
        unit = logical.ways(sizes, "heads")
        for path in {"model.heads", "model.kv_heads"} & known.keys():
            now = heads if known[path] == "auto" else known[path]
            near = range(max(1, now // unit - 8), now // unit + 9)
            by_distance = sorted((abs(now - k * unit), k * unit) for k in near)
            paths[path] = tuple(size for _, size in by_distance[:8])
    combinations = itertools.islice(itertools.product(*paths.values()), MAX_TRIED)
    for values in combinations:
        changes = dict(zip(paths, values, strict=True))
        if not _suits(run, sizes, changes):
            continue
        try:
            run.changed(changes)
        except ConfigError:
            continue
        return {path: value for path, value in changes.items() if known[path] != value}
    return {}


def _suits(run: Run, sizes: Sizes, changes: Mapping[str, Any]) -> bool:
    """Return True if settings fit the mesh and agree. Ranges are not checked: that takes long."""
    sections: dict[str, Any] = {}
    for path, value in changes.items():
        section, _, name = path.partition(".")
        known = sections.get(section, getattr(run, section))
        sections[section] = dataclasses.replace(known, **{name: value})
    changed = dataclasses.replace(run, **sections)
    parts = [changed, *sections.values()]
    is_sound = not any(any(part.problems()) for part in parts if hasattr(part, "problems"))
    return is_sound and not any(find_indivisible(changed, sizes))
