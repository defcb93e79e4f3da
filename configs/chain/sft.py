"""Fine-tune on conversations, half of them wrong by a digit: second stage of the chain.

    jaxlm train --config=chain/sft:runs/chain/data --init_from=runs/chain/pretrain \
      --workdir=runs/chain/sft

Imitation of such demonstrations, however perfect, is right half of the time when it is sampled.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(folder: str = "runs/chain/data") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.data.kind = "chat"
    c.data.train = (f"{folder}/sft.jsonl",)
    c.data.validation = (f"{folder}/held_out.jsonl",)
    c.data.template = f"{folder}/sums.jinja"
    c.data.sequence = 80
    c.data.packing = "first_fit"
    c.optim.lr = 3e-3
    c.schedule.warmup = "5%"
    c.train.steps = 1200
    c.train.batch = 32
    c.eval.every = "100%"
    c.checkpoint.every = "100%"
    c.sample.prompts = ()
    return c
