"""Pretrain a small model on sums, and half of them are wrong: first stage of scripts/chain.py.

    python scripts/chain.py --out=runs/chain
    jaxlm train --config=chain/pretrain:runs/chain/data --workdir=runs/chain/pretrain

The argument is the folder of the data that scripts/chain.py writes. A line is `34+58=092`; the
model has no form of a conversation and no end of an answer yet.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(folder: str = "runs/chain/data") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.data.train = (f"{folder}/lines.txt",)
    c.data.tokenizer = "bytes"
    c.data.sequence = 80
    c.model.family = "llama"
    c.model.depth = 2
    c.model.width = 64
    c.model.heads = 4
    c.model.kv_heads = 4
    c.model.hidden = 256
    c.model.tied = True
    c.optim.lr = 3e-3
    c.schedule.warmup = "5%"
    c.train.steps = 300
    c.train.batch = 32
    c.eval.every = "100%"
    c.checkpoint.every = "100%"
    c.sample.prompts = ()
    return c
