"""Export a run's model for other programs; it is read back and compared before it gets its name."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal

from jaxlm.checkpoint.hub_folder import SHARD_BYTES
from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, cannot_write
from jaxlm.models.cost import model_cost
from jaxlm.models.families.hub import uncomputed
from jaxlm.objectives.config import Causal
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import parity
from jaxlm.recipes.exchange.export_formats import DTYPES, Dtype, ExportJob, GGUFExport, HFExport
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import LoadedRun
from jaxlm.training.rundir import IMPORTED

ExportFormat = HFExport | GGUFExport
To = Literal["hf", "gguf"]
FORMATS: dict[To, type[ExportFormat]] = {"hf": HFExport, "gguf": GGUFExport}


def export_model(
    workdir: Path,
    out: Path,
    *,
    to: To = "hf",
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Write a run's model as a transformers folder or a GGUF, read it back, and compare the logits.

    The export is written as NAME.partial and renamed once both agree. Raises CommandError if the
    output exists, ConfigError if the format does not support the model or the tokenizer, and
    ParityError if the export gives other logits.

    Args:
      workdir: the run.
      out: the folder or the file to write.
      to: the format.
      dtype: of the tensors; None for that of the imported model, else float32.
      shard_bytes: largest file of tensors.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    if out.exists():
        what = f"the {'folder' if out.is_dir() else 'file'} already exists"
        fix = f"--out={out.with_stem(f'{out.stem}-2')}"
        raise CommandError(what, where=f"--out={out}", why="an export never overwrites", fix=fix)
    opened = load.load_run(workdir, say=say, **selection)
    opened = _without_capacity(_without_heads(opened, say), say)
    decoder = opened.model.blueprint.config
    family = dataclasses.replace(opened.run.model, vocab=decoder.vocab)
    if decoder.width_ratio != 1:
        base = opened.run.mup.base_width
        why = f"mup.base_width = {base} divides its logits by {decoder.width_ratio:g}"
        raise uncomputed(family.HUB, why)
    imported = workdir / IMPORTED  # facts of an imported run
    facts = json.loads(imported.read_text()) if imported.is_file() else {}
    job = ExportJob(
        opened=opened,
        family=family,
        tensors=layout(decoder, family.HUB),
        dtype=DTYPES[dtype or facts.get("dtype", "float32")],
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
    report = parity.compare_logits(format_.read(partial), opened, job.dtype, format_.held)
    answer = {
        "out": str(out),
        "architecture": family.HUB.architecture,
        "step": opened.step,
        "dtype": job.dtype.name,
        "parameters": model_cost.parameters(decoder),
        "tensors": len(job.tensors),
        "files": files,
        "parity": report,
    }
    format_.finish(partial, answer)
    parity.check(report, partial)
    os.replace(partial, out)
    return answer


def _without_heads(opened: LoadedRun, say: Log) -> LoadedRun:
    """Return the model without its multi-token-prediction heads."""
    heads = opened.model.blueprint.config.heads
    if not heads:
        return opened
    say(f"left out: {len(heads)} heads for later tokens; the format has no names for them")
    run = dataclasses.replace(opened.run, objective=Causal())
    params = {name: part for name, part in opened.params.items() if name != "heads"}
    return _rebuilt(dataclasses.replace(opened, params=params), run)


def _without_capacity(opened: LoadedRun, say: Log) -> LoadedRun:
    """Return the model whose experts accept every token, as in other programs."""
    if getattr(opened.run.model, "capacity", None) is None:
        return opened
    say("left out: model.capacity; training dropped tokens, the export drops none")
    return _rebuilt(opened, opened.run.changed({"model.capacity": None}))


def _rebuilt(opened: LoadedRun, run: Run) -> LoadedRun:
    """Return the run with another config, and the model of that config."""
    model = setup.build_sharded_model(run, opened.model.blueprint.config.vocab, opened.model.mesh)
    return dataclasses.replace(opened, run=run, model=model)
