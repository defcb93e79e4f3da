"""The config of a draft: a run that distills an eighth of the size of another run.

Example:
  >>> from jaxlm.models.families.union import SIZES
  >>> draft = smaller_model(SIZES["llama3-8b"], ids=128_256)
  >>> draft.depth, draft.width, draft.heads
  (13, 1792, 14)
"""

import dataclasses
from pathlib import Path
from typing import Any

import ml_collections

from jaxlm.core import config
from jaxlm.core.nearest import divisors
from jaxlm.data import tokenizer_file
from jaxlm.models.cost import model_cost
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.use import load

SHARE = 8  # the parameters of the run over those of the draft


def draft_config(workdir: Path) -> ml_collections.ConfigDict:
    """Return the config of a draft that distills from a finished run.

    Raise CommandError if there is no run, and InputMissing if it has no tokenizer.
    """
    target = load.read_config(workdir)
    tokenizer = workdir / "tokenizer"
    ids = setup.vocabulary(target, tokenizer_file.read(tokenizer).size)
    c = config.new(Run)
    sections = {"data": target.data, "optim": target.optim, "schedule": target.schedule}
    for name, section in {**sections, "model": smaller_model(target.model, ids)}.items():
        for key, value in config.to_json(section).items():
            c[name][key] = value
    c.data.tokenizer = str(tokenizer)
    c.objective.name = "distill"
    c.objective.teacher = str(workdir)
    c.objective.weight = 1.0
    c.precision.compute = target.precision.compute
    c.train.batch = target.train.batch
    c.train.steps = target.train.steps
    c.train.stack = "auto"
    c.eval.every = "25%"
    c.eval.batches = 64
    c.sample.prompts = ()
    return c


def smaller_model(model: Any, ids: int) -> Any:
    """Return the largest model of a family with an eighth of the parameters, else the smallest.

    Args:
      model: settings of a model family, the larger model.
      ids: its number of ids, which a model with `vocab=0` takes from its tokenizer.
    """
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
