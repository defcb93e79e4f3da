"""Prefer right answers of the model to its wrong ones: third stage of the chain.

    jaxlm train --config=chain/dpo:runs/chain/data --init_from=runs/chain/sft \
      --workdir=runs/chain/dpo

scripts/chain.py draws the pairs from the second stage and compares them with the sums. The
likelihood term keeps chosen answers likely; without it both become unlikely.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(folder: str = "runs/chain/data") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.data.kind = "pairs"
    c.data.train = (f"{folder}/pairs.jsonl",)
    c.data.validation = ("5%",)
    c.data.sequence = 80
    c.objective.name = "preference"
    c.objective.loss = "dpo"
    c.objective.beta = 0.1
    c.objective.nll = 1.0
    c.optim.lr = 3e-4
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "10%"
    c.train.steps = 100
    c.train.batch = 32
    c.eval.every = "100%"
    c.checkpoint.every = "100%"
    c.sample.prompts = ()
    return c
