"""What a training run says before its first step and after its last."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.core import tree
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.data import baselines, peek
from jaxlm.data.mixture import Mixture
from jaxlm.models.cost import model_cost
from jaxlm.monitor import formatting, noise, plots, report, sinks
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel.config import shown
from jaxlm.recipes import jax_setup
from jaxlm.recipes.plan import attention_kernels
from jaxlm.recipes.train.trainer import Trainer


def print_header(session: Trainer, held_out: str = "") -> None:
    """What is about to be trained, on what, and from where.

    `held_out` is why a part of the training text is the validation set, if the user has not chosen the set.
    """
    run, data, model = session.run, session.engine.data, session.engine.model
    mesh, decoder = model.mesh, model.blueprint.config
    train = data.train.shards.manifest
    kind = mesh.devices.flat[0].device_kind
    facts = [
        ("processes", _processes(session)),
        ("devices", f"{mesh.devices.size} x {kind}, mesh {shown(mesh.shape)}"),
        (
            "model",
            f"{run.model.family}, {formatting.count(model_cost.parameters(decoder))} parameters: {decoder.depth} layers, "
            f"{decoder.width} wide, {decoder.vocab} ids ({data.tokenizer.size} in use)",
        ),
        (
            "data",
            f"{formatting.count(train.documents)} documents, {formatting.count(train.tokens)} tokens, {formatting.size(train.bytes)}; "
            + (
                f"{len(data.train.sources)} sources"
                if isinstance(data.train, Mixture)
                else f"{data.train.epochs(run.rows):.2f} epochs"
            ),
        ),
        *(("source", told) for told in _sources(session)),
        ("", _example(session)),
        ("memory", _memory(session)),
        (
            "run",
            f"{run.train.steps} steps of {run.train.batch} rows x {run.data.sequence} tokens, "
            f"{run.optim.name} at {run.optim.lr:g}, {run.schedule.name}, "
            f"{_arithmetic(run.precision)}",
        ),
    ]
    facts += [("stage", told) for told in _stages(session)]
    facts += [("plan", _plan(session)), ("checks", _checks(session))]
    facts.append(
        (
            "attention",
            attention_kernels.describe_kernels(run, decoder, mesh.shape, jax_setup.target(mesh)),
        )
    )
    if data.validation:
        told = _validation(session)
        facts.append(("validation", f"{told}; {held_out}" if held_out else told))
    if run.objective.name != "causal":
        facts.append(("objective", _objective(session)))
    if plan := model.blueprint.schedule:
        facts.append(("pipeline", f"{plan}: each stage idles {plan.bubble:.0%} of the ticks"))
    if session.start:
        facts.append(("resumed", f"after step {session.start}"))
    facts += [("changed", str(change)) for change in session.changes]
    if flags := str(session.wish):
        facts.append(("by", flags))
    session.console.block(f"jaxlm train, {session.directory.path}", facts)


def _objective(session: Trainer) -> str:
    """What is learnt, the slots that it needs, and what the validation sets are read as."""
    run, validation = session.run, session.engine.data.validation
    known = session.engine.data.train.corruption
    room = known.room if known else 0
    told: str = run.objective.name
    if room:
        told += f"; rows have {run.data.sequence - room} tokens of text, and {room} slots for what it adds"
    if any(loader.corruption is None for loader in validation.values()):
        told += "; evaluated as causal"
    if run.sample.prompts and not session.assessment.has_samples:
        told += "; no samples: it has not learnt to go on from a prompt"
    return told


def _sources(session: Trainer) -> Iterator[str]:
    """What the run will have read of each source of a mixture."""
    train, run = session.engine.data.train, session.run
    if isinstance(train, Mixture):
        yield from train.told(run.pace, run.train.steps)


def _stages(session: Trainer) -> Iterator[str]:
    """The stages of a warm-up of the batch or of its rows."""
    stages, last = session.engine.pace.phases, session.run.train.steps
    for stage, end in zip(stages, [*(each.first for each in stages[1:]), last], strict=True):
        rows = stage.rows * session.run.data.sequence // stage.length
        begin = stage.first + 1
        span = f"steps {begin} to {end}" if end > begin else f"step {end}"
        if len(stages) > 1:
            yield (
                f"{span}: {rows} rows x {stage.length} tokens, "
                f"{rows * stage.length:,} a step, compiled once"
            )


def _validation(session: Trainer) -> str:
    """The sets, and which of them ranks checkpoints where there are several."""
    sets = [
        f"{name} ({formatting.count(loader.shards.manifest.tokens)} tokens)"
        for name, loader in session.engine.data.validation.items()
    ]
    told = ", ".join(sets)
    return f"{told}; {session.assessment.followed} ranks checkpoints" if len(sets) > 1 else told


def _arithmetic(precision: PrecisionConfig) -> str:
    """Return the dtype of products, and what is rounded to other dtypes and how."""
    told = [str(precision.compute)]
    if precision.products != "compute":
        told.append(f"projections in {precision.products}")
    if precision.params != "float32":
        told.append(
            f"parameters in {precision.params} with stochastically rounded updates, "
            f"moments in {precision.moments}"
        )
    elif precision.moments != "float32":
        told.append(f"moments in {precision.moments}, stochastically rounded")
    return ", ".join(told)


def _processes(session: Trainer) -> str:
    """How many there are and who told so; where devices lie in several slices, what crosses between them."""
    place, mesh = session.crew.place, session.engine.model.mesh
    found = meshes.slices(list(mesh.devices.flat))
    crossing = shown(meshes.across(dict(mesh.shape), found)) if found > 1 else ""
    return f"{place.count or 1}: {place.told}" + (
        f"; {found} groups of devices, between them {crossing}" if crossing else ""
    )


def _memory(session: Trainer) -> str:
    """What a device holds of the state, by its layout; activations come on top."""
    engine, run = session.engine, session.run
    whole = tree.size_bytes(engine.shapes)
    held = " + ".join(
        f"{formatting.size(size)} of {name}" for name, size in engine.bytes_per_device().items()
    )
    is_away = ", the last on the host between steps" if run.train.offload else ""
    return (
        f"{formatting.size(whole)} of weights and optimizer state; each device has {held} "
        f"(zero={run.mesh.zero}){is_away}"
    )


def _plan(session: Trainer) -> str:
    """What `jaxlm plan` says of this run on these devices."""
    forecast, steps = session.forecast, session.run.train.steps
    if forecast is None:
        return "none: no table knows this chip"
    low, high = forecast.seconds
    return (
        f"{formatting.size(forecast.bytes_per_device['total'])} of {formatting.size(forecast.memory_bytes)} a device; "
        f"{formatting.duration(low)} to {formatting.duration(high)} a step, "
        f"{formatting.duration(steps * low)} to {formatting.duration(steps * high)} for {steps:,} steps"
    )


def _checks(session: Trainer) -> str:
    """What was looked at before this was said, and found right; memory is, once the step is compiled."""
    run = session.run
    found = ["settings", "sizes on the mesh", "data", "ids of the tokenizer"]
    if session.start:
        found.append("the checkpoint by its digests")
    if run.checkpoint.space != "ignore":
        found.append("space for checkpoints")
    if session.crew.peers.count > 1:
        found.append("the same on all processes")
    return f"{', '.join(found)}: ok"


def _example(session: Trainer) -> str:
    """The start of one row, its trained tokens marked."""
    data = session.engine.data
    first = data.train.at(session.start, batch=session.engine.pace, rows=slice(0, 1))
    text = peek.rendered(first, data.tokenizer, 0)[0].replace("\n", "\\n")
    return text[:150] + (" ..." if len(text) > 150 else "")


def write_partial_report(path: Path) -> None:
    """The report of a run that did not come to its end: at once, and with the plots as soon as they are drawn.

    Raises:
      JaxlmError: where a file of the run is damaged, or one cannot be written.
    """
    report.write(path)
    plots.draw(path)
    report.write(path)


def _next(session: Trainer, verdict: dict[str, Any] | None) -> str:
    """Return the commands that this run can be used with: none that its objective or data refuse.

    The first one is that of the `verdict` of a run that diverged.
    """
    place = shlex.quote(str(session.directory.path))
    lines = [verdict["command"]] if verdict else []
    lines += [f"jaxlm eval --workdir={place}"] if session.engine.data.validation else []
    if session.run.objective.prompts != "none":
        lines.append(f"jaxlm generate --workdir={place} --prompt='...'")
    return "\n".join(lines)


def print_summary(session: Trainer) -> dict[str, Any]:
    """The yardsticks, the plots, the report, and the closing block."""
    path, progress = session.directory.path, session.progress
    followed = session.assessment.followed
    last, batches = session.directory.step, session.run.eval.batches
    answer = (session.evaluation or {}) | {
        "step": last,
        "complete": last >= session.run.train.steps,
        "workdir": str(path),
    }
    if not session.directory.is_writer:
        return answer
    validation = session.engine.data.validation[followed] if followed else None
    # An objective that predicts a part of the text, or sees more of it, is not to be compared.
    if validation and validation.corruption is None and session.evaluation:
        text = baselines.stored_text(validation.shards)
        known = baselines.bits_per_byte(text)
        session.directory.write_json("baselines.json", known)
        ours = "this run" + formatting.limits(session.evaluation, last)
        measured = session.evaluation["bits_per_byte"] or math.nan
        table = sorted([*known.items(), (ours, measured)], key=lambda row: -row[1])
        title = f"validation set {followed}, bits per byte"
        if len(text) == baselines.MEASURED_BYTES:
            title += f"; of the compressors on its first {formatting.size(len(text))}"
        session.console.block(
            title,
            [(name, f"{bits:.4f}" + (" <" if name == ours else "")) for name, bits in table],
        )
        answer["baselines"] = known
    session.alarm.write()
    verdict = session.alarm.verdict
    if verdict:
        answer["divergence"] = verdict
    plots.draw(path)
    answer["report"] = str(report.write(path))
    advice = noise.advice(sinks.read(path / "metrics.jsonl"))
    is_bad_best = progress.best_loss is not None and session.alarm.is_worse_than_uniform(
        progress.best_loss
    )
    title = f"done at step {last}, {formatting.count(progress.tokens)} tokens"
    session.console.block(
        f"{title}: {verdict['outcome']}" if verdict else title,
        [
            *(
                [
                    ("verdict", f"{verdict['said']}, since step {verdict['step']}"),
                    ("cause", f"likely, {verdict['cause']}"),
                ]
                if verdict
                else []
            ),
            (
                "best",
                f"step {progress.best_step}, {progress.best_loss:.4f} nats on {followed}"
                + ("" if batches == "all" else f", {batches} batches of it")
                + (", worse than uniform" if is_bad_best else "")
                if progress.best_loss is not None
                else "no evaluation",
            ),
            *([("batch", advice)] if advice else []),
            ("report", str(path / "report.html")),
            *([("next", following)] if (following := _next(session, verdict)) else []),
        ],
        style="bold red" if verdict else "bold",
        alarm="verdict",
    )
    return answer
