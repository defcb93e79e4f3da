"""GPT-2's largest size on 31 billion tokens of web text, 20 for each parameter.

    jaxlm train --config=gpt2_1p5b --workdir=runs/gpt2_1p5b
    jaxlm train --config=gpt2_1p5b:v5e-16 --workdir=runs/gpt2_1p5b

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it.
Batch and learning rate are those of GPT-3's size next to this one (XL, arXiv:2005.14165, table
2.1). The 25 heads and 50,257 ids divide over no tensor axis, and 1,600 wide over an fsdp axis of at
most 64.

Hardware: any number of GPUs, timed for 8 GPUs of the H100's class, or one of the arguments.
Weights, gradients and moments take 25 GB over all devices. Hours at 40% of the peak, not measured:

    1gpu      214   one H100
    8gpu      27    parameters split over all
    v5e-16    67    16 chips, parameters split over all
    v5p-128   7     64 chips, parameters split over all
    v6e-256   0.9   256 chips, parameters split over 64

Expected loss: not measured; it depends on the text.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.hardware import layout

HARDWARE = {  # the mesh, and micro-batches; the batch is the same on all, and so is the loss
    "1gpu": (dict(data=1), 64),
    "8gpu": (dict(fsdp=8), 8),
    "v5e-16": (dict(fsdp=16), 4),
    "v5p-128": (dict(fsdp=64), 2),
    "v6e-256": (dict(data=4, fsdp=64), 1),
}


def get_config(hardware: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model = "gpt2-xl"
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.05%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 1024
    c.train.steps = 29_700
    c.train.batch = 1024
    c.train.microbatches = 8
    c.train.remat = "full"
    c.loss.chunk = 4_096
    c.optim.lr = 2e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "2%"
    c.schedule.floor = 0.1
    c.mesh.data = 1
    c.mesh.fsdp = "auto"
    c.precision.compute = "bfloat16"
    c.checkpoint.every = "1%"
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    if hardware:
        mesh, c.train.microbatches = layout(HARDWARE, hardware, c, __file__)
        c.mesh.update(dict(data=1, fsdp=1, tensor=1) | mesh)
    return c
