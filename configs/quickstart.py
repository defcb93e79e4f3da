"""A decoder learns Python from Python's own library.

    jaxlm train --config=configs/quickstart.py --workdir=runs/quickstart
    jaxlm train --config=configs/quickstart.py:long --workdir=runs/long

Hardware: two CPU cores. See README.md for times and expected bits per byte.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.data.tokenizer = "sentencepiece:4096"
    c.data.sequence = 256
    c.model.family = "llama"
    c.model.depth = 4
    c.model.width = 256
    c.model.heads = 4
    c.model.kv_heads = 2
    c.model.tied = True
    c.train.batch = 16
    c.train.steps = 600
    c.optim.lr = 3e-3
    c.schedule.name = "linear"
    c.schedule.warmup = "5%"
    c.sample.prompts = ("def ", "class Test", "import os\n")
    if arg == "long":
        c.train.steps = 4000
    return c
