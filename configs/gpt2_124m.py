"""GPT-2's smallest size on ten billion tokens of web text.

    jaxlm train --config=configs/gpt2_124m.py --workdir=runs/gpt2_124m

Put the text under data/web/ first, such as the parquet files of the FineWeb-Edu sample-10BT; a tokenizer of the published
size is trained on it. Batch, learning rate and length are those with which llm.c trains this size.

Hardware: 8 GPUs of the H100's class. Hours: about 1 at 40% of their peak, not measured. Expected: a validation loss near
3.3 nats a token, which llm.c reports on FineWeb with GPT-2's own tokenizer; not measured here.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.models.families.gpt2 import SIZES
from jaxlm.recipes.config import Run


def get_config() -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model.family = "gpt2"
    c.model.update(SIZES["gpt2"])
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.05%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 1024
    c.train.steps = 19_600
    c.train.batch = 512
    c.train.microbatches = 4
    c.train.remat = "dots"
    c.loss.chunk = 32_768
    c.optim.lr = 6e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "4%"
    c.schedule.floor = 0.0
    c.precision.compute = "bfloat16"
    c.checkpoint.every = "30m"
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    return c
