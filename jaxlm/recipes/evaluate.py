"""Evaluating a trained run on its validation sets, or on any text."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.data import cache, dataset
from jaxlm.data.documents import Corpus
from jaxlm.data.loader import Loader
from jaxlm.data.mixture_config import Temperature
from jaxlm.evals import loss as evals
from jaxlm.objectives import corruption
from jaxlm.parallel import host, rules
from jaxlm.recipes import assembly, attention, reading, trained
from jaxlm.recipes.trained import Trained, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is evaluated."""

    workdir: Path
    step: int | None = None
    best: bool = False
    weights: Weights = "raw"
    text: tuple[str, ...] = ()  # globs; none means the run's own validation sets
    sequence: int | None = None
    batch: int | None = None
    cpu_devices: int | None = None


def evaluate(options: Options, say: Any = lambda _: None) -> dict[str, Any]:
    """Figures by set under `sets`, those of the one that the run follows also at the top; exact totals over every token, once each.

    The objective of the run decides what is predicted, see `objectives.corruption`.
    """
    opened = trained.open_run(
        options.workdir,
        step=options.step,
        best=options.best,
        weights=options.weights,
        sequence=options.sequence,
        cpu_devices=options.cpu_devices,
        say=say,
    )
    run = opened.run
    sequence = options.sequence or run.data.sequence
    limit = opened.model.blueprint.config.positions or sequence
    if sequence > limit:
        raise ConfigError(
            f"rows of {sequence} tokens are longer than the model's position table",
            where="--sequence",
            why=f"the model has {limit} positions",
            fix=f"--sequence={limit}",
        )
    attention.check_length(
        opened.model.mesh.shape, opened.model.blueprint.config, sequence, flag="--sequence"
    )
    loaders = _loaders(opened, options, sequence, say)
    sets = measure(opened, loaders, options.batch or run.train.batch)
    first = next(iter(sets)) if options.text else reading.followed(run, sets)
    assert first is not None  # there is at least one set
    return {"step": opened.step, "sequence": sequence, **sets[first], "sets": sets}


def measure(
    opened: Trained, loaders: Mapping[str, Loader], batch: int
) -> dict[str, dict[str, Any]]:
    """Figures by set, over every token of each once, at least `batch` rows at a time: as many as the devices share evenly."""
    mesh = opened.model.mesh
    ways = rules.split(mesh, "batch")
    batch = -(-batch // ways) * ways
    sets = {}
    with jax.set_mesh(mesh):
        table = assembly.token_bytes(opened.model, opened.tokenizer)
        chunk = opened.run.loss.chunk
        prefix = assembly.prefix(opened.tokenizer)
        step = jax.jit(evals.build(opened.model.blueprint.merge, table, chunk=chunk, prefix=prefix))
        rows, put = host.host_rows(mesh, batch), functools.partial(host.put, mesh)
        for name, loader in loaders.items():
            batches = loader.evaluation(batch=batch, rows=rows)
            result = evals.evaluate(functools.partial(step, opened.params), batches, put)
            sets[name] = result.record() | {"reliability": dataclasses.asdict(result.reliability)}
    return sets


def _loaders(opened: Trained, options: Options, sequence: int, say: Any) -> dict[str, Loader]:
    run = opened.run
    if options.text:
        corpus = Corpus.find(options.text, run.data.text_key, "--text")
        read = corruption.reading(run.objective, is_paired=run.is_paired)
        return dataset.text_loaders(corpus, opened.tokenizer, sequence, read, cache.default(), say)
    # How often sources are read says nothing of the validation sets, and rows of another length are of another number.
    data = dataclasses.replace(run.data, sequence=sequence, mixture=Temperature())
    found = reading.open_data(dataclasses.replace(run, data=data), say=say, warn=say)
    if found.tokenizer.digest != opened.tokenizer.digest:
        raise ConfigError(
            "the run's data now gives another tokenizer than the one it was trained with",
            where="data.tokenizer",
            why="files behind data.train have changed since",
            fix="name the text to evaluate on with --text",
        )
    if not found.validation:
        raise ConfigError(
            "the run has no validation set",
            where="data.validation",
            why="it was trained with data.validation = ()",
            fix="name the text to evaluate on with --text",
        )
    return found.validation
