"""Export a run's model for other programs; it is read back and compared before it gets its name."""

import dataclasses
import functools
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoint import hub_architecture
from jaxlm.checkpoint.gguf_blocks import CodeSteps
from jaxlm.checkpoint.gguf_writer import Scheme
from jaxlm.checkpoint.hub_folder import SHARD_BYTES, ModelSource
from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice, layout
from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import EARLIER_STEP, CommandError, ConfigError, JaxlmError, cannot_write
from jaxlm.models.build import Blueprint
from jaxlm.models.cost import model_cost
from jaxlm.models.families.hub import uncomputed
from jaxlm.objectives.config import Causal
from jaxlm.ops import integer_product
from jaxlm.parallel import rules
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import (
    export_formats,
    import_model,
    importance,
    quantized_tensors,
    reward_head,
)
from jaxlm.recipes.use import calibration_text, load
from jaxlm.training.rundir import imported_facts, read_json
from jaxlm.tune import surgery
from jaxlm.tune.config import PROJECTIONS, Full, Quantized

ExportFormat = export_formats.HFExport | export_formats.GGUFExport
To = Literal["hf", "gguf"]
FORMATS: dict[To, type[ExportFormat]] = {
    "hf": export_formats.HFExport,
    "gguf": export_formats.GGUFExport,
}
TOLERANCE = 1e-5  # of the largest logit: the same arithmetic computes both
LEAST_BLOCK = 16  # of codes that a fix names
MAX_LENGTH = 256  # of the rows of text to compare on


class ParityError(JaxlmError, code=1, kind="not the same"):
    """The export does not compute the same as the run."""


def check_has_format(run: Run) -> None:
    """Raise ConfigError if the model is a family of a user without a format of transformers."""
    if not hasattr(run.model, "HUB"):
        raise ConfigError(
            f"{type(run.model).__name__} has no format of transformers",
            where=f"model.family = {run.model.family}",
            why="the class has no HUB, the names of its tensors, and no config.json",
            fix="keep the model in this format: jaxlm generate, eval and train use it",
        )


def export_model(
    workdir: Path,
    out: Path,
    *,
    to: To = "hf",
    dtype: export_formats.Dtype | None = None,
    scheme: Scheme | None = None,
    calibration: Sequence[str] = (),
    calibration_tokens: int = calibration_text.TOKENS,
    shard_bytes: int = SHARD_BYTES,
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Write a run's model as a transformers folder or a GGUF, read it back, and compare the logits.

    The export is written as NAME.partial and renamed once both agree. Raises CommandError if the
    output exists or the text is for nothing, ConfigError if the format does not support the model
    or the tokenizer, DataError if the text is in a validation set, and ParityError if the export
    gives other logits.

    Args:
      workdir: the run.
      out: the folder or the file to write.
      to: the format.
      dtype: of the tensors; None for that of the imported model, else float32.
      scheme: storage of a GGUF's matrices in blocks; those that no block fits have `dtype`.
      calibration: globs of text, or `train`: the scales of a scheme are searched by the mean
        squares of the inputs of each matrix.
      calibration_tokens: of that text.
      shard_bytes: largest file of tensors.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    check_new(out)
    check_scheme(to, scheme)
    plain = _plain_command(workdir, out, scheme, dtype, selection)
    importance.check(scheme, calibration, plain)
    facts = imported_facts(workdir)
    numbers = export_formats.DTYPES[dtype or facts.get("dtype", "float32")]

    def check_opened(opened: load.LoadedRun) -> None:
        _check_format(opened, out, to, numbers, scheme)

    opened = load.load_run(workdir, check=check_opened, say=say, **selection)
    quantized = opened
    is_reward = opened.run.objective.has_reward_head
    if isinstance(opened.run.tune, Quantized) and to == "gguf":
        opened = _dequantized(opened)
    opened = _without_value_head(_without_heads(opened, say), say)
    opened = _without_capacity(opened, say)
    if opened.run.precision.qat != "none":
        say(f"left out: precision.qat={opened.run.precision.qat}; the export has weights before it")
        opened = _rebuilt(opened, opened.run.changed({"precision.qat": "none"}))
    decoder = opened.model.blueprint.config
    family = dataclasses.replace(opened.run.model, vocab=decoder.vocab)
    if decoder.width_ratio != 1:
        base = opened.run.mup.base_width
        why = f"mup.base_width = {base} divides its logits by {decoder.width_ratio:g}"
        raise uncomputed(family.HUB, why)
    tensors = (reward_head.tensors if is_reward else layout)(decoder, family.HUB)
    steps_of: dict[str, CodeSteps] = {}
    if quantized.run.tune != opened.run.tune:
        scheme, steps_of = _stored_codes(quantized, tensors, scheme, numbers, say)
    measured = importance.Importance({}, 0)
    if calibration:
        text = importance.CalibrationText(tuple(calibration), calibration_tokens, plain)
        measured = importance.of_text(opened, tensors, text, out.parent, say)
    job = export_formats.ExportJob(
        opened=opened,
        family=family,
        tensors=tensors,
        dtype=numbers,
        scheme=scheme,
        steps_of=steps_of,
        importance=measured.of,
        workdir=workdir,
        shard_bytes=shard_bytes,
        say=say,
    )
    format_ = FORMATS[to](job)
    partial = out.with_name(f"{out.name}.partial")
    try:
        files = format_.write(partial)
    except OSError as error:
        raise cannot_write("the export", partial, error, fix="--out=another/place") from error
    size = sum(each.stat().st_size for each in (partial, *partial.rglob("*")) if each.is_file())
    report = compare_logits(format_.read(partial), opened, job.dtype, format_.held)
    answer = {
        "out": str(out),
        "architecture": job.attributes["architectures"][0],
        "step": opened.step,
        "dtype": job.dtype.name,
        "parameters": model_cost.parameters(decoder),
        "tensors": len(job.tensors),
        "files": files,
        "bytes": size,
        "parity": report,
    }
    if isinstance(format_, export_formats.GGUFExport):
        answer |= {"scheme": scheme, "storages": format_.storages}
    if calibration and isinstance(format_, export_formats.GGUFExport):
        is_used = format_.by_importance
        without = [name for name, is_known in is_used.items() if not is_known]
        say(
            f"scales by the importance of inputs: {len(is_used) - len(without)} of {len(is_used)} "
            f"tensors in blocks; without: {', '.join(without) or 'none'}"
        )
        answer |= {
            "calibration": list(calibration),
            "without_importance": without,
            "unread_experts": measured.unread,
        }
    format_.finish(partial, answer)
    check(report, partial)
    os.replace(partial, out)
    return answer


def check_new(out: Path) -> None:
    """Raise CommandError if the output exists."""
    if out.exists():
        what = f"the {'folder' if out.is_dir() else 'file'} already exists"
        other = out.with_stem(f"{out.stem}-2") if out.stem else out / "export"
        fix = shlex.quote(f"--out={other}")
        raise CommandError(what, where=f"--out={out}", why="an export never overwrites", fix=fix)


def _check_format(
    opened: load.LoadedRun, out: Path, to: To, dtype: np.dtype, scheme: Scheme | None
) -> None:
    """Raise ConfigError if the format has no place for the run; its weights are not read.

    Args:
      opened: the run, with shapes in the place of weights.
      out: the output, for the fix.
      to: the format.
      dtype: of the tensors.
      scheme: storage of a GGUF's matrices.
    """
    run = opened.run
    check_has_format(run)
    is_quantized = isinstance(run.tune, Quantized)
    if run.objective.has_reward_head:
        reward_head.check(run, opened.workdir, to)
    if run.tune.unmerged and not is_quantized:
        raise ConfigError(
            f"a {run.tune.name} cannot be merged into its base",
            where=f"tune.name = {run.tune.name}",
            why=run.tune.unmerged,
            fix="--to=peft"
            if run.tune.virtual_tokens
            else f"jaxlm generate --workdir={shlex.quote(str(opened.workdir))} --prompt=Hello",
        )
    if to == "hf":
        if is_quantized:
            _check_folder(opened, out)
        return
    family: Any = dataclasses.replace(run.model, vocab=opened.model.blueprint.config.vocab)
    if hasattr(family, "capacity"):  # left out, as by `_without_capacity`
        family = dataclasses.replace(family, capacity=None)
    try:
        export_formats.check_gguf(opened, family, dtype, scheme)
    except ConfigError as error:
        if error.fix.startswith("--to=hf") and is_quantized:
            _give_folder_fix(error, opened, out)
        raise


def _check_folder(opened: load.LoadedRun, out: Path) -> None:
    """Raise ConfigError if a folder has no tensors for the codes of a quantized run."""
    tune = opened.run.tune
    assert isinstance(tune, Quantized)
    base = read_json(opened.workdir, load.BASE) if (opened.workdir / load.BASE).is_file() else None
    try:
        decoder = opened.model.blueprint.config
        tensors = layout(decoder, type(opened.run.model).HUB)
        layers = surgery.quantized_weights(opened.model.blueprint)
        quantized_tensors.leaf_tensors(tensors, layers)
        quantized_tensors.file_tensors(tensors, layers)
    except ConfigError as error:
        fix = f"jaxlm generate --workdir={shlex.quote(str(opened.workdir))} --prompt=Hello"
        if base:
            plain = [f"--workdir={base['run']}", f"--step={base['step']}"]
            fix = shlex.join(["jaxlm", "export", *plain, f"--out={out}", "--to=hf"])
            if nearest := _requantized(opened, tensors, plain):
                fix = f"{nearest}\n{fix}"
        raise ConfigError(
            "the quantized run cannot be exported",
            where=f"tune.base = {tune.base}",
            why=error.why,
            fix=fix,
        ) from error


def _requantized(opened: load.LoadedRun, tensors: list[HFTensor], plain: list[str]) -> str | None:
    """Return the command of the nearest codes that a folder has, None if there are none.

    Args:
      opened: the quantized run.
      tensors: of the model if nothing were quantized.
      plain: flags of the run that was quantized.
    """
    tune, facts = opened.run.tune, imported_facts(opened.workdir)
    assert isinstance(tune, Quantized)
    layers = surgery.quantized_weights(opened.model.blueprint)
    matrices = [each for each in tensors if each.parts[0].path in layers]
    is_other = any(each.layout == "same" or not each.parts[0].ins for each in matrices)
    if tune.block == "all" or is_other:
        return None
    scheme = "int4" if tune.base in ("nf4", "nf4_double") else tune.base
    block = math.gcd(tune.block, *(each.parts[0].sizes[0] for each in matrices))
    if (scheme, block) == (tune.base, tune.block) or block < LEAST_BLOCK:
        return None
    words = ["jaxlm", "quantize", *plain, f"--scheme={scheme}", f"--block={block}"]
    words += [f"--at={','.join(tune.at)}"] if tune.at != PROJECTIONS else []
    if facts.get("method", "rtn") != "rtn":
        words.append(f"--method={facts['method']}")
        words += [f"--calibration={each}" for each in facts["calibration"]]
    suffix = f"{block}" if scheme == tune.base else f"{scheme}-{block}"
    words.append(f"--out={opened.workdir}-{suffix}")
    return f"{shlex.join(words)}    # the nearest codes that it has"


def _give_folder_fix(error: ConfigError, opened: load.LoadedRun, out: Path) -> None:
    """Replace the fix of a refused GGUF, if a folder is refused too, by that of the folder."""
    try:
        _check_folder(opened, out.with_suffix(""))
    except ConfigError as refusal:
        error.fix = refusal.fix


def _dequantized(opened: load.LoadedRun) -> load.LoadedRun:
    """Return the plain model of the numbers that the codes stand for, in float32."""
    layers = surgery.quantized_weights(opened.model.blueprint)
    leaves = tree.leaves(opened.params)
    precision = dataclasses.replace(opened.run.precision, params="float32")
    plain = _rebuilt(opened, dataclasses.replace(opened.run, tune=Full(), precision=precision))

    def numbers(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        if path not in layers:
            return leaves[path].astype(like.dtype)
        layer, start = layers[path], f"{path}_"
        codes = {
            name.removeprefix(start): leaf
            for name, leaf in leaves.items()
            if name.startswith(start)
        }
        return jax.device_put(layer.dequantized(codes), like.sharding)

    params = tree.map_with_path(numbers, setup.abstract_params(plain.model))
    return dataclasses.replace(plain, params=params)


def _stored_codes(
    opened: load.LoadedRun,
    tensors: list[HFTensor],
    scheme: Scheme | None,
    dtype: np.dtype,
    say: Log,
) -> tuple[Scheme | None, dict[str, CodeSteps]]:
    """Return the storage of a GGUF for a quantized run, and the steps of matrices that keep codes.

    Args:
      opened: the quantized run.
      tensors: of the model if nothing were quantized.
      scheme: the storage that the command names; the codes stay without one, if they can be.
      dtype: of matrices that are in no blocks.
      `say`: receives a line about what happens to the codes.
    """
    layers = surgery.quantized_weights(opened.model.blueprint)
    leaves = tree.leaves(opened.params)
    format = next(iter(layers.values())).format
    base = format.base

    def leaf(part: MappedSlice) -> np.ndarray:
        array = leaves[part.path]
        return np.asarray(array[part.lead] if part.lead else array)

    if scheme is not None:
        say(f"the matrices of {base} are dequantized, and rounded again to {scheme}")
        return scheme, {}
    storage, steps_of = quantized_tensors.code_steps(tensors, layers, leaf)
    if storage is None:
        say(
            f"the matrices of {base} are dequantized to {dtype.name}: no storage of a GGUF has "
            "their codes; --scheme=q4_k_m rounds them again"
        )
    else:
        say(
            f"{len(steps_of)} matrices of {base} keep their codes in {storage}, with float16 scales"
        )
    if integer_product.is_integer(format):
        say("its products round their inputs to 8 bits; other programs decide for themselves")
    return storage, steps_of


def check_scheme(to: str, scheme: str | None) -> None:
    """Raise CommandError if the format has no storage in blocks."""
    if scheme is not None and to != "gguf":
        what, why = f"the format {to} has no scheme {scheme}", "its tensors have a dtype alone"
        raise CommandError(what, where=f"--scheme={scheme}", why=why, fix="--to=gguf")


def _plain_command(
    workdir: Path,
    out: Path,
    scheme: Scheme | None,
    dtype: export_formats.Dtype | None,
    selection: Mapping[str, Any],
) -> str:
    """Return the command that makes the same export without a text."""
    flags = {"workdir": workdir, "out": out, "to": "gguf", "scheme": scheme, "dtype": dtype}
    flags |= {"step": selection.get("step"), "weights": selection.get("weights")}
    words = [f"--{name}={value}" for name, value in flags.items() if value not in (None, "raw")]
    return shlex.join(["jaxlm", "export", *words, *(["--best"] if selection.get("best") else [])])


def _without_heads(opened: load.LoadedRun, say: Log) -> load.LoadedRun:
    """Return the model without its multi-token-prediction heads."""
    heads = opened.model.blueprint.config.heads
    if not heads:
        return opened
    say(f"left out: {len(heads)} heads for later tokens; the format has no names for them")
    run = dataclasses.replace(opened.run, objective=Causal())
    params = {name: part for name, part in opened.params.items() if name != "heads"}
    return _rebuilt(dataclasses.replace(opened, params=params), run)


def _without_value_head(opened: load.LoadedRun, say: Log) -> load.LoadedRun:
    """Return the model without the head by which PPO predicts rewards."""
    if not opened.run.objective.has_value_head:
        return opened
    say("left out: the value head; it predicts rewards in training, and writes no text")
    run = dataclasses.replace(opened.run, objective=Causal())
    params = {name: part for name, part in opened.params.items() if name != "value"}
    return _rebuilt(dataclasses.replace(opened, params=params), run)


def _without_capacity(opened: load.LoadedRun, say: Log) -> load.LoadedRun:
    """Return the model whose experts accept every token, as in other programs."""
    if getattr(opened.run.model, "capacity", None) is None:
        return opened
    say("left out: model.capacity; training dropped tokens, the export drops none")
    return _rebuilt(opened, opened.run.changed({"model.capacity": None}))


def _rebuilt(opened: load.LoadedRun, run: Run) -> load.LoadedRun:
    """Return the run with another config, and the model of that config."""
    model = setup.build_sharded_model(run, opened.model.blueprint.config.vocab, opened.model.mesh)
    return dataclasses.replace(opened, run=run, model=model)


def compare_logits(
    source: ModelSource,
    opened: load.LoadedRun,
    dtype: np.dtype,
    held: export_formats.ExportedParams,
) -> dict[str, Any]:
    """Return the largest difference between the logits of the export and of the run, on real text.

    The export's model is built from its own config.json. The run's parameters are first rounded as
    the format rounds them; the effect of the rounding is reported separately. They are freed leaf
    by leaf as the export is read, so that memory holds one model and one leaf; the run is unusable
    afterwards. `held` is the rounding of each leaf. Of a reward model, scores are compared.
    """
    model = opened.model
    family, _ = hub_architecture.read_family(source, lambda _: None)
    described = dataclasses.replace(opened.run, model=family)
    written = setup.build_sharded_model(described, model.blueprint.config.vocab, model.mesh)
    tokens, positions = _text(opened)
    is_paired = opened.run.architecture == "encoder-decoder"

    is_reward = opened.run.objective.has_reward_head

    def logits(
        blueprint: Blueprint, params: Any, tokens: jax.Array, positions: jax.Array
    ) -> jax.Array:
        merged = blueprint.merge(params)
        if is_reward:
            return reward_head.scores(merged, tokens, positions)
        inputs = {"source": tokens} if is_paired else {}
        return merged(tokens, positions=positions, **inputs)

    of_run = jax.jit(functools.partial(logits, model.blueprint))
    of_export = jax.jit(functools.partial(logits, written.blueprint))
    is_identical = []

    def rounded(path: str, leaf: jax.Array) -> jax.Array:
        if path not in held:  # the unembedding of a reward model
            return leaf
        result = held[path](leaf)
        if isinstance(result, np.ndarray):
            result = jax.device_put(result, leaf.sharding)
        if result is not leaf:
            leaf.delete()
        return result

    with source.opened() as fetch, jax.set_mesh(model.mesh):
        exact = np.asarray(of_run(opened.params, tokens, positions))
        rounded_params = tree.map_with_path(rounded, opened.params)
        rounded_logits = np.asarray(of_run(rounded_params, tokens, positions))
        remaining = tree.leaves(rounded_params)
        tensors = (reward_head.tensors if is_reward else layout)(family.build(), family.HUB)
        layers = surgery.quantized_weights(model.blueprint)
        tensors = quantized_tensors.leaf_tensors(tensors, layers)
        tensors = hub_architecture.in_folder_names(tensors, source, family.HUB)
        read = import_model.leaf_reader(tensors, fetch)

        def taken(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            if path not in held:
                return remaining[path]
            leaf = read(path, like)
            is_identical.append(np.array_equal(leaf, remaining[path]))
            remaining[path].delete()
            return leaf

        read_params = tree.map_with_path(taken, setup.abstract_params(written))
        read_back = np.asarray(of_export(read_params, tokens, positions))
    return {
        "tokens": int(tokens.size),
        "largest_difference": float(np.abs(rounded_logits - read_back).max()),
        "tolerance": TOLERANCE * float(np.abs(rounded_logits).max()),
        "is_bit_identical": all(is_identical),
        "largest_difference_by_rounding": float(np.abs(rounded_logits - exact).max()),
        "dtype": dtype.name,
    }


def check(parity: dict[str, Any], partial: Path) -> None:
    """Raise ParityError if the export differs from the run."""
    fix = "the export is kept for inspection; this is a bug of jaxlm: please report it"
    difference, tolerance = parity["largest_difference"], parity["tolerance"]
    if not math.isfinite(difference):
        what = "the export gives logits that are not finite"
        why = f"weights of the run are not finite, or exceed the range of {parity['dtype']}"
        is_narrow = parity["dtype"] == "float16"
        fix = "--dtype=bfloat16" if is_narrow else EARLIER_STEP
    elif difference > tolerance:
        what = "the export gives other logits than the run"
        why = f"they differ by {difference:.3g}, the tolerance is {tolerance:.3g}"
    elif not parity["is_bit_identical"]:
        what = "the export holds other weights than the run"
        why = "the logits of the tested text agree, but that text does not use every weight"
    else:
        return
    raise ParityError(what, where=str(partial), why=why, fix=fix)


def _text(opened: load.LoadedRun) -> tuple[jax.Array, jax.Array]:
    """Return rows of ids of a text that is always available: Python's json package."""
    max_length = min(MAX_LENGTH, opened.run.model.max_positions)
    text = Path(json.__file__).read_text()
    ids = opened.tokenizer.encode(text)
    rows = max(2, rules.split(opened.model.mesh, "batch"))
    length = min(max_length, len(ids) // rows)
    tokens = np.array(ids[: rows * length], np.int32).reshape(rows, length)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return jnp.asarray(tokens), jnp.asarray(positions)
