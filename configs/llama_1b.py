"""Llama 3.2's 1B shape on 26 billion tokens, 20 for each parameter.

    jaxlm train --config=configs/llama_1b.py --workdir=runs/llama_1b

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it.

Hardware: 8 GPUs of the H100's class, parameters split over all of them. Hours: about 19 at 40% of their peak, not
measured. Expected loss: not measured; it depends on the text.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.models.families.llama import SIZES
from jaxlm.recipes.config import Run


def get_config() -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model.family = "llama"
    c.model.update(SIZES["llama3.2-1b"])
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.01%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 2048
    c.train.steps = 25_000
    c.train.batch = 512
    c.train.microbatches = 8
    c.train.remat = "dots"
    c.loss.chunk = 16_384
    c.optim.lr = 5e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "4%"
    c.schedule.floor = 0.1
    c.mesh.data = 1
    c.mesh.fsdp = "auto"
    c.precision.compute = "bfloat16"
    c.checkpoint.every = "30m"
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    return c
