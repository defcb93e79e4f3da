"""Llama 3's 70B shape on 1.4 trillion tokens, 20 for each parameter.

    jaxlm train --config=configs/llama_70b.py --workdir=runs/llama_70b

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it. The peak learning
rate is that of Llama 3 (arXiv:2407.21783, table 3). Weights and AdamW's moments take 847 GB over all devices.

Hardware: 512 GPUs of the H100's class; heads, hidden units and vocabulary split over the 8 of a machine, parameters over
all. Days: about 35 at 40% of their peak, not measured. Expected loss: not measured; it depends on the text.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.models.families.llama import SIZES
from jaxlm.recipes.config import Run


def get_config() -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model.family = "llama"
    c.model.update(SIZES["llama3-70b"])
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.01%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 4096
    c.train.steps = 168_000
    c.train.batch = 2048
    c.train.microbatches = 32
    c.train.remat = "full"
    c.loss.chunk = 65_536
    c.optim.lr = 1.5e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "2%"
    c.schedule.floor = 0.1
    c.mesh.data = 1
    c.mesh.fsdp = "auto"
    c.mesh.tensor = 8
    c.precision.compute = "bfloat16"
    c.checkpoint.every = "30m"
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    return c
