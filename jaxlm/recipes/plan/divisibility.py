"""Whether a run fits its devices and its mesh: all that does not come out even, at once, with what would."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxlm.core import config, divisors
from jaxlm.core.errors import ConfigError
from jaxlm.models.config import EncoderDecoder, ModelConfig
from jaxlm.nn.config import BlockConfig
from jaxlm.parallel import logical
from jaxlm.parallel.config import AXES, OFFERED, beyond, crossings, flags, nearest, offered, shown
from jaxlm.parallel.logical import Sizes
from jaxlm.parallel.schedule import Schedule
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels

MAX_TRIED = 200  # combinations of settings; the nearest come first
MESHES_TRIED = 8  # with other settings, where no mesh fits by itself
LINES = 6  # of an error, beside what and where


class Indivisible(NamedTuple):
    """A number that does not divide: why, and the setting with the nearest values that would, if there is one."""

    why: str
    path: str
    values: tuple[Any, ...]


def check(run: Run, count: int, slices: int = 1) -> None:
    """Raises ConfigError, with everything that is wrong, where a run does not fit a mesh of `count` devices in `slices` groups.

    Each line of the fix, pasted alone, makes it fit: first the nearest meshes, then other settings for this one; where
    neither is enough, meshes with the settings that they need.
    """
    wanted = {axis: getattr(run.mesh, axis) for axis in AXES}
    why = []
    try:
        sizes = run.mesh.sizes(count)
        misfits = list(find_indivisible(run, sizes))
    except ConfigError as error:
        needed, *_ = error.why.splitlines()  # what fits is found below, as the model must, too
        why.append(f"{needed} devices, and there are {count}")
        fixed = {axis: 1 if size == "auto" else size for axis, size in wanted.items()}
        sizes, misfits = None, list(find_indivisible(run, fixed))
    is_cut = sizes is None or crossings(sizes, slices) is not None
    if not is_cut:
        why.append(
            f"{slices} slices: the outermost axes cross from one to another, and must divide by that"
        )
    why += [misfit.why for misfit in misfits]
    if not why:
        return
    near = sizes or wanted
    layouts = [fit for fit in nearest(near, count) if crossings(fit, slices) is not None]

    def line(fit: Sizes) -> str:
        return "" if any(find_indivisible(run, fit)) else flags(fit, wanted)

    fixes = offered(near, layouts, line)
    why += beyond(fixes)
    fixes = fixes[:OFFERED]
    if sizes and is_cut and (changes := _changes(run, sizes, misfits)):
        fixes.append(_pasted(changes))
    fixes = fixes or _both(run, near, layouts, wanted)
    room = LINES - len(fixes)
    if len(why) > room:
        why[room - 1 :] = ["; ".join(why[room - 1 :])]
    raise ConfigError(
        f"the run does not fit {count} device{'s' if count > 1 else ''}",
        where="mesh " + (shown(sizes) if sizes else _asked(wanted)),
        why="\n".join(why),
        fix="\n".join(fixes),
    )


def schedule(run: Run, sizes: Sizes) -> Schedule | None:
    """How micro-batches go through the stages of a mesh; None where it has one."""
    stages = logical.ways(sizes, "stages")
    return None if stages == 1 else Schedule(stages, run.train.microbatches, run.train.turns)


def unscaled(run: Run) -> ConfigError:
    """That a run's model is trained, planned and used, but not made smaller or larger for another question."""
    return ConfigError(
        f"model.family={run.model.family} is only trained, planned, evaluated and used",
        where="model.family",
        why="no other widths and depths are known of an encoder and a decoder",
        fix="train it: a first step shows whether it fits",
    )


def find_indivisible(run: Run, sizes: Sizes) -> Iterator[Indivisible]:
    """What does not come out even on a mesh of these sizes."""
    decoder = dataclasses.replace(
        run.model,
        vocab=logical.ways(sizes, "vocab") if run.model.vocab == "auto" else run.model.vocab,
    ).build()
    yield from _model(run, decoder, sizes)
    yield from _rows(run, decoder, sizes)
    yield from _stages(run, decoder, sizes)


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
            # The dense layers of a model of experts have a setting of their own.
            field = next(
                (each for each in (field, "dense_hidden") if getattr(run.model, each, 0) == size),
                field,
            )
            step = math.lcm(ways, _of_width(run, block)) if field == "width" else ways
            axes = logical.RULES[name]
            yield _misfit(f"{field} = {size}", f"model.{field}", size, ways, axes, step=step)
    if isinstance(decoder, EncoderDecoder):
        for axis in ("pipe", "context"):
            if sizes[axis] > 1:
                why = f"{axis} = {sizes[axis]} splits no encoder-decoder, 1 would do"
                yield Indivisible(why, f"mesh.{axis}", (1,))
        return
    stages = logical.ways(sizes, "stages")
    unit = len(decoder.pattern) * stages * run.train.turns
    layers, first = decoder.depth - len(decoder.prefix), len(decoder.prefix)
    if stages > 1 and layers % unit:
        named = f"depth = {decoder.depth}" + (f" without its first {first}" if first else "")
        yield _misfit(named, "model.depth", layers, unit, "pipe", beside=first)


def _of_width(run: Run, block: BlockConfig) -> int:
    """What a width must divide by, whatever the mesh: its heads, which are rotated in pairs; 1 where they have a size of their own."""
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
        own, left = divmod(batch, rows)
        # As few as go around, or as this batch can be cut into.
        cut = [] if left else [n for n in divisors.divisors(own) if n >= stages]
        why = f"microbatches = {parts} cannot go around {stages} stages (pipe)"
        parts = min(cut, default=stages)
        yield Indivisible(f"{why}, {parts} would", "train.microbatches", (parts,))
    if batch % (rows * parts):
        misfit = _misfit(
            f"batch = {batch}", "train.batch", batch, rows * parts, logical.RULES["batch"]
        )
        said = f"{rows} devices x {parts} micro-batches" if parts > 1 else f"{rows} devices"
        yield misfit._replace(why=f"{misfit.why}: {said}")
    if run.eval.batch != "auto" and run.eval.batch % rows:
        size, axes = run.eval.batch, logical.RULES["batch"]
        yield _misfit(f"eval.batch = {size}", "eval.batch", size, rows, axes)


def _stages(run: Run, decoder: ModelConfig, sizes: Sizes) -> Iterator[Indivisible]:
    """The smaller batches and shorter rows of a warm-up are dealt out as those after it are."""
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


def _misfit(
    named: str, path: str, size: int, unit: int, axes: Any, *, step: int = 0, beside: int = 0
) -> Indivisible:
    """`beside` is what the setting counts beside the size that is divided, `step` what else would do is a multiple of, if not the unit."""
    step = step or unit
    values = tuple(value for value in (size // step * step, -(-size // step) * step) if value)
    values = tuple(beside + value for value in sorted(values, key=lambda value: abs(value - size)))
    over = " x ".join((axes,) if isinstance(axes, str) else axes)
    wanted = " or ".join(map(str, values))
    return Indivisible(f"{named} does not divide by {unit} ({over}), {wanted} would", path, values)


def _both(
    run: Run, near: Mapping[str, Any], layouts: list[dict[str, int]], wanted: Mapping[str, Any]
) -> list[str]:
    """The nearest of some meshes, each with the settings that make the run fit it; replicas alone suit every model."""
    replicas = [fit for fit in layouts[MESHES_TRIED:] if fit["data"] == math.prod(fit.values())]

    def line(fit: Sizes) -> str:
        changes = _changes(run, fit, list(find_indivisible(run, fit)))
        return f"{flags(fit, wanted)} {_pasted(changes)}".strip() if changes else ""

    return offered(near, [*layouts[:MESHES_TRIED], *replicas], line)[:OFFERED]


def _pasted(changes: Mapping[str, Any]) -> str:
    return " ".join(f"--config.{path}={value}" for path, value in changes.items())


def _changes(run: Run, sizes: Sizes, misfits: list[Indivisible]) -> dict[str, Any]:
    """Settings that make the run fit this mesh, those nearest to what they are; empty where none is found."""
    known = config.flatten(run)
    paths = {misfit.path: misfit.values for misfit in misfits if known.get(misfit.path)}
    # Heads go together: one cannot grow without the other, nor beyond the width.
    if {"model.heads", "model.kv_heads"} & set(paths):
        most = known["model.heads"]
        unit = logical.ways(sizes, "heads")
        for path in {"model.heads", "model.kv_heads"} & known.keys():
            now = most if known[path] == "auto" else known[path]
            near = range(max(1, now // unit - 8), now // unit + 9)
            multiples = sorted((k * unit for k in near), key=functools.partial(_distance, now))
            paths[path] = tuple(multiples[:8])
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
    """Whether a run with other settings fits the mesh, and its sections agree; its ranges are not looked at, which takes long."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = dataclasses.replace(
        run,
        **{
            section: dataclasses.replace(getattr(run, section), **values)
            for section, values in sections.items()
        },
    )
    parts = [changed, *(getattr(changed, section) for section in sections)]
    is_sound = not any(any(part.problems()) for part in parts if hasattr(part, "problems"))
    return is_sound and not any(find_indivisible(changed, sizes))


def _distance(a: int, b: int) -> int:
    return abs(a - b)


def _asked(wanted: Mapping[str, Any]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in wanted.items() if size != 1) or "of one"
