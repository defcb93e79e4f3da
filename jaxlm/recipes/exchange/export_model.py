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
from jaxlm.recipes.exchange import parity
from jaxlm.recipes.exchange.export_formats import DTYPES, Dtype, ExportJob, GGUFExport, HFExport
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import LoadedRun, Weights
from jaxlm.training.rundir import IMPORTED

ExportFormat = HFExport | GGUFExport
To = Literal["hf", "gguf"]
FORMATS: dict[To, type[ExportFormat]] = {"hf": HFExport, "gguf": GGUFExport}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The run and step to export, the format, and the output path."""

    workdir: Path
    out: Path
    to: To = "hf"
    step: int | None = None
    best: bool = False
    weights: Weights = "raw"
    dtype: Dtype | None = None  # None: of the imported model, else float32
    shard_bytes: int = SHARD_BYTES
    cpu_devices: int | None = None


def export_model(options: ExportOptions, say: Log = lambda _: None) -> dict[str, Any]:
    """Write a run's model as a transformers folder or a GGUF, read it back, and compare the logits.

    The export is written as NAME.partial and renamed once both agree.

    Raises:
      CommandError: if the output exists.
      ConfigError: if the format does not support the model or the tokenizer.
      ParityError: if the export gives other logits.
    """
    if options.out.exists():
        raise CommandError(
            f"the {'folder' if options.out.is_dir() else 'file'} already exists",
            where=f"--out={options.out}",
            why="an export never overwrites",
            fix=f"--out={options.out.with_stem(f'{options.out.stem}-2')}",
        )
    opened = load.load_run(
        options.workdir,
        step=options.step,
        best=options.best,
        weights=options.weights,
        cpu_devices=options.cpu_devices,
        say=say,
    )
    opened = _without_capacity(_without_heads(opened, say), say)
    decoder = opened.model.blueprint.config
    family = dataclasses.replace(opened.run.model, vocab=decoder.vocab)
    if decoder.width_ratio != 1:
        base = opened.run.mup.base_width
        why = f"mup.base_width = {base} divides its logits by {decoder.width_ratio:g}"
        raise uncomputed(family.HUB, why)
    job = ExportJob(
        opened=opened,
        family=family,
        tensors=layout(decoder, family.HUB),
        dtype=DTYPES[options.dtype or _imported(options.workdir).get("dtype", "float32")],
        workdir=options.workdir,
        shard_bytes=options.shard_bytes,
        say=say,
    )
    format_ = FORMATS[options.to](job)
    partial = options.out.with_name(f"{options.out.name}.partial")
    try:
        files = format_.write(partial)
    except OSError as error:
        raise cannot_write("the export", partial, error, fix="--out=another/place") from error
    report = parity.compare_logits(format_.read(partial), opened, job.dtype, format_.held)
    answer = {
        "out": str(options.out),
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
    os.replace(partial, options.out)
    return answer


def _without_heads(opened: LoadedRun, say: Log) -> LoadedRun:
    """Return the model without its multi-token-prediction heads."""
    heads = opened.model.blueprint.config.heads
    if not heads:
        return opened
    say(f"left out: {len(heads)} heads for later tokens; the format has no names for them")
    run = dataclasses.replace(opened.run, objective=Causal())
    vocab = opened.model.blueprint.config.vocab
    return dataclasses.replace(
        opened,
        run=run,
        model=setup.build_sharded_model(run, vocab, opened.model.mesh),
        params={name: part for name, part in opened.params.items() if name != "heads"},
    )


def _without_capacity(opened: LoadedRun, say: Log) -> LoadedRun:
    """Return the model whose experts accept every token, as in other programs."""
    if getattr(opened.run.model, "capacity", None) is None:
        return opened
    say("left out: model.capacity; training dropped tokens, the export drops none")
    run = opened.run.changed({"model.capacity": None})
    vocab = opened.model.blueprint.config.vocab
    model = setup.build_sharded_model(run, vocab, opened.model.mesh)
    return dataclasses.replace(opened, run=run, model=model)


def _imported(workdir: Path) -> dict[str, Any]:
    """Return the facts of an imported run; empty for other runs."""
    path = workdir / IMPORTED
    return json.loads(path.read_text()) if path.is_file() else {}
