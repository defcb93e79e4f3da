"""The perplexity of texts under a trained run, for the cleaning of others."""

import functools
import math
from pathlib import Path

import jax
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.data.prepare.filters.config import Perplexity
from jaxlm.data.prepare.filters.perplexity import Scorer
from jaxlm.evals import loss
from jaxlm.parallel import host, rules
from jaxlm.recipes import assembly, trained


def scorer(config: Perplexity) -> Scorer:
    """exp of the mean of -log p over the tokens of a text's beginning, each given those before it in its row.

    A row holds as many tokens as the run's own. The same texts get the same numbers in every process on one kind of device.

    Raises:
      InputMissing: where the run has no checkpoint.
      ConfigError: where its model reads both ways, and so has no perplexity.
    """
    opened = trained.open_run(Path(config.run))
    if opened.run.objective.name == "masked" or opened.run.is_paired:
        raise ConfigError(
            "a model that reads both ways has no perplexity",
            where=f"perplexity.run={config.run}",
            why=f"its objective.name is {opened.run.objective.name}",
            fix="name a run whose objective.name is causal",
        )
    mesh = opened.model.mesh
    batch, length = rules.split(mesh, "batch"), opened.run.data.sequence
    table = assembly.token_bytes(opened.model, opened.tokenizer)
    step = jax.jit(loss.build(opened.model.blueprint.merge, table, chunk=opened.run.loss.chunk))
    rows_of = functools.partial(_rows, batch=batch, length=length)

    def score(text: str) -> float | None:
        ids = [*opened.tokenizer.before, *opened.tokenizer.encode(text)][: config.tokens]
        nll = weight = 0.0
        with jax.set_mesh(mesh):
            for rows in rows_of(np.array(ids, np.int32), pad=opened.tokenizer.pad):
                sums = step(opened.params, host.put(mesh, rows))
                nll, weight = nll + float(sums.nll), weight + float(sums.weight)
        # Past e^700 there is no float64.
        return math.exp(min(nll / weight, 700.0)) if weight else None

    return score


def _rows(ids: np.ndarray, *, batch: int, length: int, pad: int) -> list[Tokens]:
    """Batches in which each token but the first is a target once."""
    count = max(0, len(ids) - 1)
    size = batch * length
    found = []
    for begin in range(0, count, size):
        here = min(size, count - begin)
        tokens, targets = np.full(size, pad, np.int32), np.full(size, pad, np.int32)
        tokens[:here] = ids[begin : begin + here]
        targets[:here] = ids[begin + 1 : begin + here + 1]
        is_there = np.arange(size) < here
        fields = (
            *(tokens, targets, is_there.astype(np.float32), is_there.astype(np.int32)),
            np.tile(np.arange(length, dtype=np.int32), batch),
        )
        # NumPy until it is placed on devices.
        found.append(Tokens(*(field.reshape(batch, length) for field in fields)))  # type: ignore[arg-type]
    return found
