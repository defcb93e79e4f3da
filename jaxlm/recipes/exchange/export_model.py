"""A run's model written for other programs, read back and compared before it is called finished."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from jaxlm.checkpoint.hub_folder import SHARD_BYTES, Source
from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.core.errors import CommandError, cannot_write
from jaxlm.models.cost import model_cost
from jaxlm.models.families.hub import uncomputed
from jaxlm.objectives.config import Causal
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import parity
from jaxlm.recipes.exchange.export_gguf import GgufForm
from jaxlm.recipes.exchange.export_hf import FolderForm
from jaxlm.recipes.exchange.parity import DTYPES, Dtype, ExportedParams, ExportJob
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import LoadedRun, Weights
from jaxlm.training.rundir import IMPORTED


class ExportFormat(Protocol):
    """What a run's model is written as; made of a Job, it has refused what it cannot hold."""

    def write(self, place: Path) -> int:
        """Writes the model; returns how many files hold its tensors. Raises OSError, NotWritable."""

    def read(self, place: Path) -> Source:
        """What was written."""

    @property
    def held(self) -> ExportedParams:
        """What it holds of each leaf."""

    def finish(self, place: Path, answer: dict[str, Any]) -> None:
        """Adds what says how it compares with the run."""


To = Literal["hf", "gguf"]
FORMS: dict[To, Callable[[ExportJob], ExportFormat]] = {"hf": FolderForm, "gguf": GgufForm}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is exported, as what, and where to."""

    workdir: Path
    out: Path
    to: To = "hf"
    step: int | None = None
    best: bool = False
    weights: Weights = "raw"
    dtype: Dtype | None = None  # None is that of the model it was imported from, else float32
    shard_bytes: int = SHARD_BYTES
    cpu_devices: int | None = None


def export_model(
    options: ExportOptions, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Writes a run's model as a folder of transformers or as a GGUF, reads it back, and compares logits on real text.

    It has its name once both agree; until then it is beside it, as NAME.partial.

    Raises:
      CommandError: where something has that name.
      ConfigError: where the form has no such model, or no such tokenizer.
      Different: where what was written gives other logits.
    """
    if options.out.exists():
        named = options.out.with_stem(f"{options.out.stem}-2")
        raise CommandError(
            f"the {'folder' if options.out.is_dir() else 'file'} is already there",
            where=f"--out={options.out}",
            why="nothing is overwritten",
            fix=f"--out={named}",
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
        why = f"its logits are divided by {decoder.width_ratio:g}, as mup.base_width = {opened.run.mup.base_width} asks"
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
    form = FORMS[options.to](job)
    partial = options.out.with_name(f"{options.out.name}.partial")
    try:
        files = form.write(partial)
    except OSError as error:
        raise cannot_write("the export", partial, error, fix="--out=another/place") from error
    report = parity.compare_logits(form.read(partial), opened, job.dtype, form.held)
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
    form.finish(partial, answer)
    parity.check(report, partial)
    os.replace(partial, options.out)
    return answer


def _without_heads(opened: LoadedRun, say: Callable[[str], None]) -> LoadedRun:
    """The model that predicts the next token alone."""
    heads = opened.model.blueprint.config.heads
    if not heads:
        return opened
    say(f"left out: {len(heads)} heads for tokens beyond the next, which the form has no names for")
    run = dataclasses.replace(opened.run, objective=Causal())
    vocab = opened.model.blueprint.config.vocab
    return dataclasses.replace(
        opened,
        run=run,
        model=setup.build_sharded_model(run, vocab, opened.model.mesh),
        params={name: part for name, part in opened.params.items() if name != "heads"},
    )


def _without_capacity(opened: LoadedRun, say: Callable[[str], None]) -> LoadedRun:
    """Return the model whose experts take every token, as those of other programs do."""
    if getattr(opened.run.model, "capacity", None) is None:
        return opened
    say("left out: model.capacity, by which training dropped tokens; what is exported drops none")
    run = opened.run.changed({"model.capacity": None})
    vocab = opened.model.blueprint.config.vocab
    model = setup.build_sharded_model(run, vocab, opened.model.mesh)
    return dataclasses.replace(opened, run=run, model=model)


def _imported(workdir: Path) -> dict[str, Any]:
    """What is known of a run that was imported; nothing of another."""
    place = workdir / IMPORTED
    return json.loads(place.read_text()) if place.is_file() else {}
