"""Evaluate a trained run on its validation sets or on any text."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.corpus.config import Perplexity
from jaxlm.corpus.filters.models import Scorer
from jaxlm.data import cache, dataset
from jaxlm.data.batch import Tokens
from jaxlm.data.documents import Corpus
from jaxlm.data.loader import Loader
from jaxlm.data.mixture_config import Temperature
from jaxlm.evals import loss
from jaxlm.evals import loss as evals
from jaxlm.objectives import build as objectives
from jaxlm.parallel import host, rules
from jaxlm.recipes import setup
from jaxlm.recipes.plan import attention_kernels
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import LoadedRun, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The run, its step, and the text to evaluate on."""

    workdir: Path
    step: int | None = None
    best: bool = False
    weights: Weights = "raw"
    text: tuple[str, ...] = ()  # globs; () means the run's own validation sets
    sequence: int | None = None
    batch: int | None = None
    cpu_devices: int | None = None


def evaluate(options: Options, say: Any = lambda _: None) -> dict[str, Any]:
    """Return metrics by set under `sets`; those of the ranking set also at the top level.

    Totals are exact: every token counts once. The objective of the run decides what is predicted,
    see `objectives.objective`.
    """
    opened = load.load_run(
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
    attention_kernels.check_length(
        opened.model.mesh.shape, opened.model.blueprint.config, sequence, flag="--sequence"
    )
    loaders = _loaders(opened, options, sequence, say)
    sets = measure(opened, loaders, options.batch or run.train.batch)
    first = next(iter(sets)) if options.text else setup.ranking_set(run, sets)
    assert first is not None  # there is at least one set
    return {"step": opened.step, "sequence": sequence, **sets[first], "sets": sets}


def measure(
    opened: LoadedRun, loaders: Mapping[str, Loader], batch: int
) -> dict[str, dict[str, Any]]:
    """Return metrics by set over every token of each, once.

    The batch has at least `batch` rows: as many as the devices share evenly.
    """
    mesh = opened.model.mesh
    ways = rules.split(mesh, "batch")
    batch = -(-batch // ways) * ways
    sets = {}
    with jax.set_mesh(mesh):
        table = setup.token_bytes(opened.model, opened.tokenizer)
        chunk = opened.run.loss.chunk
        prefix = setup.prefix(opened.tokenizer)
        step = jax.jit(evals.build(opened.model.blueprint.merge, table, chunk=chunk, prefix=prefix))
        rows, put = host.host_rows(mesh, batch), functools.partial(host.put, mesh)
        for name, loader in loaders.items():
            batches = loader.evaluation(batch=batch, rows=rows)
            result = evals.evaluate(functools.partial(step, opened.params), batches, put)
            sets[name] = result.record() | {"reliability": dataclasses.asdict(result.reliability)}
    return sets


def _loaders(opened: LoadedRun, options: Options, sequence: int, say: Any) -> dict[str, Loader]:
    run = opened.run
    if options.text:
        corpus = Corpus.find(options.text, run.data.text_key, "--text")
        read = objectives.build(run.objective, run.loss, run.architecture).prepare
        return dataset.text_loaders(corpus, opened.tokenizer, sequence, read, cache.default(), say)
    # Mixture weights do not matter for validation sets, and other lengths change the row counts.
    data = dataclasses.replace(run.data, sequence=sequence, mixture=Temperature())
    opened_data = setup.open_data(dataclasses.replace(run, data=data), say=say, warn=say)
    if opened_data.tokenizer.digest != opened.tokenizer.digest:
        raise ConfigError(
            "the run's data now gives another tokenizer than the one it was trained with",
            where="data.tokenizer",
            why="files behind data.train have changed since then",
            fix="name the text to evaluate on with --text",
        )
    if not opened_data.validation:
        raise ConfigError(
            "the run has no validation set",
            where="data.validation",
            why="it was trained with data.validation = ()",
            fix="name the text to evaluate on with --text",
        )
    return opened_data.validation


# Perplexity of texts under a trained run, as a filter of a data recipe.


def scorer(config: Perplexity) -> Scorer:
    """Return a function: exp of the mean of -log p over the first tokens of a text, in rows.

    A row holds as many tokens as the run's own; each token is predicted from those before it in its
    row. The scores are the same in every process on one kind of device.

    Raises:
      InputMissing: if the run has no checkpoint.
      ConfigError: if its model is bidirectional, and so has no perplexity.
    """
    opened = load.load_run(Path(config.run))
    if opened.run.objective.prompts == "none" or opened.run.architecture == "encoder-decoder":
        raise ConfigError(
            "a bidirectional model has no perplexity",
            where=f"perplexity.run={config.run}",
            why=f"its objective.name is {opened.run.objective.name}",
            fix="name a run whose objective.name is causal",
        )
    mesh = opened.model.mesh
    batch, length = rules.split(mesh, "batch"), opened.run.data.sequence
    table = setup.token_bytes(opened.model, opened.tokenizer)
    step = jax.jit(loss.build(opened.model.blueprint.merge, table, chunk=opened.run.loss.chunk))
    rows_of = functools.partial(_rows, batch=batch, length=length)

    def score(text: str) -> float | None:
        ids = [*opened.tokenizer.before, *opened.tokenizer.encode(text)][: config.tokens]
        nll = weight = 0.0
        with jax.set_mesh(mesh):
            for rows in rows_of(np.array(ids, np.int32), pad=opened.tokenizer.pad):
                sums = step(opened.params, host.put(mesh, rows))
                nll, weight = nll + float(sums.nll), weight + float(sums.weight)
        # e^709 is the limit of float64.
        return math.exp(min(nll / weight, 700.0)) if weight else None

    return score


def _rows(ids: np.ndarray, *, batch: int, length: int, pad: int) -> list[Tokens]:
    """Return batches in which each token but the first is a target once."""
    count = max(0, len(ids) - 1)
    size = batch * length
    batches = []
    for begin in range(0, count, size):
        filled = min(size, count - begin)
        tokens, targets = np.full(size, pad, np.int32), np.full(size, pad, np.int32)
        tokens[:filled] = ids[begin : begin + filled]
        targets[:filled] = ids[begin + 1 : begin + filled + 1]
        is_filled = np.arange(size) < filled
        fields = (
            *(tokens, targets, is_filled.astype(np.float32), is_filled.astype(np.int32)),
            np.tile(np.arange(length, dtype=np.int32), batch),
        )
        # NumPy until it is placed on devices.
        shaped: Any = (field.reshape(batch, length) for field in fields)
        batches.append(Tokens(*shaped))
    return batches
