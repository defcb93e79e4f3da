"""Llama 3.2's 1B shape on 26 billion tokens, 20 for each parameter.

    jaxlm train --config=llama_1b --workdir=runs/llama_1b
    jaxlm train --config=llama_1b:v5e-16 --workdir=runs/llama_1b

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it.

Hardware: any number of GPUs, timed for 8 GPUs of the H100's class, or one of the arguments.
Weights, gradients and moments take 20 GB over all devices. Hours at 40% of the peak, not measured:

    1gpu      144   one H100
    8gpu      18    parameters split over all
    v5e-16    45    16 chips, parameters split over all
    v5p-128   5     64 chips, parameters split over all
    v6e-256   0.6   256 chips, parameters split over 64

Expected loss: not measured; it depends on the text.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.hardware import layout

HARDWARE = {  # the mesh, and micro-batches; the batch is the same on all, and so is the loss
    "1gpu": (dict(data=1), 64),
    "8gpu": (dict(fsdp=8), 8),
    "v5e-16": (dict(fsdp=16), 16),
    "v5p-128": (dict(fsdp=64), 2),
    "v6e-256": (dict(data=4, fsdp=64), 1),
}


def get_config(hardware: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model = "llama3.2-1b"
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.01%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 2048
    c.train.steps = 25_000
    c.train.stack = "auto"
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
    c.checkpoint.every = "1%"
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    if hardware:
        mesh, c.train.microbatches = layout(HARDWARE, hardware, c, __file__)
        c.mesh.update(dict(data=1, fsdp=1, tensor=1) | mesh)
    return c
