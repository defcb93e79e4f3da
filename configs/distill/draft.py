"""Distill a draft of an eighth of the size of a run, for `jaxlm serve --draft`.

    jaxlm train --config=distill/draft:runs/a --workdir=runs/draft
    jaxlm serve --workdir=runs/a --draft=runs/draft

The argument is the finished run. The draft has its family, tokenizer, text, rows and optimizer, at
most half of its layers, and as many of its heads as leave it an eighth of the parameters. It learns
the run's distributions alone: labels have no part in the loss. Evaluations measure the acceptance:
`draft_greedy`, `draft_sampled` and the tokens of a pass (jaxlm/docs/serving.md).

Hardware: that of the run. Minutes: those of a forward pass of the run for each step, and a few. A
draft of an imported run names its text: --config.data.train=GLOB. What to expect of a small run
stands in scripts/LOG.md.
"""

import dataclasses
from pathlib import Path
from typing import Any

import ml_collections

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import divisors
from jaxlm.data import tokenizer_file
from jaxlm.models.cost import model_cost
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.use import load

SHARE = 8  # the parameters of the run over those of the draft


def get_config(run: str = "") -> ml_collections.ConfigDict:
    if not run:
        raise ConfigError(
            "the run that the draft learns from is not named",
            where="configs/distill/draft.py",
            why="its directory is the config's argument",
            fix="--config=distill/draft:runs/a",
        )
    target = load.read_config(Path(run))
    tokenizer = Path(run, "tokenizer")
    ids = setup.vocabulary(target, tokenizer_file.read(tokenizer).size)
    c = config.new(Run)
    sections = {"data": target.data, "optim": target.optim, "schedule": target.schedule}
    for name, section in {**sections, "model": smaller(target.model, ids)}.items():
        for key, value in config.to_json(section).items():
            c[name][key] = value
    c.data.tokenizer = str(tokenizer)
    c.objective.name = "distill"
    c.objective.teacher = run
    c.objective.weight = 1.0
    c.precision.compute = target.precision.compute
    c.train.batch = target.train.batch
    c.train.steps = target.train.steps
    c.train.stack = "auto"
    c.eval.batches = 64
    c.sample.prompts = ()
    return c


def smaller(model: Any, ids: int) -> Any:
    """Return the largest model of these shapes with an eighth of the parameters, or the least."""
    decoder = dataclasses.replace(model, vocab=ids)
    most = model_cost.parameters(decoder.build()) // SHARE
    depths, counts = range(model.depth // 2, 1, -1), range(model.heads // 2, 1, -1)
    sizes = [(depth, heads) for heads in (*counts, 1) for depth in (*depths, 1)]
    models = [_of_size(decoder, *size) for size in sizes]
    fitting = [each for each in models if model_cost.parameters(each.build()) <= most]
    chosen = max(fitting, key=lambda each: model_cost.parameters(each.build()), default=models[-1])
    return dataclasses.replace(chosen, vocab=model.vocab)


def _of_size(model: Any, depth: int, heads: int) -> Any:
    """Return a model with some of the layers and heads, and a width and an MLP in proportion."""
    share = heads / model.heads
    sizes = {"depth": depth, "heads": heads, "width": model.width * heads // model.heads}
    if isinstance(getattr(model, "hidden", None), int):
        sizes["hidden"] = max(1, round(model.hidden * share))
    if isinstance(getattr(model, "kv_heads", None), int):
        fewer = max(1, round(model.kv_heads * share))
        sizes["kv_heads"] = max(each for each in divisors(heads) if each <= fewer)
    return dataclasses.replace(model, **sizes)
