"""The adapter of --adapter: a folder of PEFT, or a run with an adapter, on the model of a run."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, DataError
from jaxlm.data import chat_templates
from jaxlm.models.heads import ADDED_HEADS
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import adapter_places
from jaxlm.recipes.exchange.import_adapter import read_folder
from jaxlm.recipes.use import load
from jaxlm.training.rundir import read_json, split_ref
from jaxlm.tune.config import Full

FLAG = "--adapter"


def reader(ref: str | None, say: Log) -> load.ReadAdapter | None:
    """Return the function that reads the adapter of a folder or RUN[@STEP]; None without one."""
    if ref is None:
        return None
    workdir = run_of(ref)

    def read(base: load.InitSource) -> load.Adapter:
        load.check_plain(base, "--workdir")
        if workdir is not None:
            return _of_run(ref, base, say)
        adapter = read_folder(Path(ref), base)
        adapter.log_absent(say)
        return adapter

    return read


def run_of(ref: str | None) -> Path | None:
    """Return the run directory of RUN[@STEP]; None for a folder of PEFT, or without an adapter."""
    if ref is None:
        return None
    path = Path(ref)
    if path.is_dir():
        is_run = (path / "config.json").is_file() and not (path / adapter_places.CONFIG).is_file()
        return path if is_run else None
    return split_ref(ref)[0]


def template_folder(ref: str | None) -> Path | None:
    """Return the folder with the chat template of an adapter, if it has one; None without one."""
    workdir = run_of(ref)
    if workdir is None:
        return None if ref is None else Path(ref)
    return workdir / chat_templates.HUB


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAdapter(load.Adapter):
    """The adapter of a step of another run."""

    source: load.InitSource

    def leaves(self, model: setup.ShardedModel, base: Any) -> Any:
        """Return the leaves of the step, without a head that only its training reads."""
        del base
        step, target = self.source.step, model.own(setup.abstract_params(model))
        return self.source.store.restore_part(step, "params", target, left_out=ADDED_HEADS)


def _of_run(ref: str, base: load.InitSource, say: Log) -> RunAdapter:
    """Return the adapter of RUN[@STEP] in the precision of this run.

    Raises CommandError if the run has none, or its objective makes another use of the model;
    DataError if it was trained on other weights.
    """
    source = load.open_run_ref(ref, FLAG, say)
    if isinstance(source.run.tune, Full):
        raise CommandError(
            "the run has no adapter",
            where=f"{FLAG}={ref}",
            why="its checkpoints have all weights (tune.name = full)",
            fix=f"jaxlm eval --workdir={shlex.quote(str(source.workdir))}    # it needs no other",
        )
    record = read_json(source.workdir, load.BASE)
    if record["sha256"] != base.digest:
        raise DataError(
            "the adapter was trained on another base",
            where=f"{FLAG}={ref}",
            why=f"sha256 of {base} is {base.digest[:16]}..., and "
            f"{source.workdir / load.BASE} has {record['sha256'][:16]}...",
            fix=f"{shlex.quote('--workdir=' + record['run'])} --step={record['step']}",
        )
    objective, other = source.run.objective, base.run.objective
    if objective.prompts != other.prompts:
        raise CommandError(
            "the adapter does not fit the objective of the base",
            where=f"{FLAG}={ref}",
            why=f"it was trained with objective.name = {objective.name}, and {base.workdir} "
            f"is read as one of {other.name}",
            fix=f"jaxlm eval --workdir={shlex.quote(str(source.workdir))}    # with its base",
        )
    run = dataclasses.replace(base.run, tune=source.run.tune, precision=source.run.precision)
    return RunAdapter(run=run, source=source)
