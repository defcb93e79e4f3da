"""GPT-2's smallest size on ten billion tokens of web text.

    jaxlm train --config=gpt2_124m --workdir=runs/gpt2_124m
    jaxlm train --config=gpt2_124m:v5e-16 --workdir=runs/gpt2_124m

Put the text under data/web/ first, such as the parquet files of the FineWeb-Edu sample-10BT; a
tokenizer of the published size is trained on it. Batch, learning rate and length are those with
which llm.c trains this size.

Hardware: any number of GPUs, timed for 8 GPUs of the H100's class, or one of the arguments. Hours
at 40% of the peak, which a model this small does not reach on a whole pod; not measured:

    1gpu      6      one H100
    8gpu      0.7    rows split over all
    v5e-16    2      16 chips, rows split over all
    v5p-128   0.2    64 chips, rows split over all
    v6e-256   0.05   256 chips, rows split over all

Expected: a validation loss near 3.3 nats a token, which llm.c reports on FineWeb with GPT-2's own
tokenizer; not measured here.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.hardware import layout

HARDWARE = {  # the mesh, and micro-batches; the batch is the same on all, and so is the loss
    "1gpu": (dict(data=1), 32),
    "8gpu": (dict(data=8), 4),
    "v5e-16": (dict(data=16), 8),
    "v5p-128": (dict(data=64), 1),
    "v6e-256": (dict(data=256), 1),
}


def get_config(hardware: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model = "gpt2"
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.05%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 1024
    c.train.steps = 19_600
    c.train.stack = "auto"
    c.train.batch = 512
    c.train.microbatches = 4
    c.train.remat = "dots"
    c.loss.chunk = 16_384
    c.optim.lr = 6e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "4%"
    c.schedule.floor = 0.0
    c.precision.compute = "bfloat16"
    c.checkpoint.every = "1%"
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    if hardware:
        mesh, c.train.microbatches = layout(HARDWARE, hardware, c, __file__)
        c.mesh.update(dict(data=1, fsdp=1, tensor=1) | mesh)
    return c
