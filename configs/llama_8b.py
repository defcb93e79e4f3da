"""Llama 3's 8B shape on 168 billion tokens, 20 for each parameter.

    jaxlm train --config=llama_8b --workdir=runs/llama_8b
    jaxlm train --config=llama_8b:v5p-128 --workdir=runs/llama_8b

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it.
The peak learning rate is that of Llama 3 (arXiv:2407.21783, table 3).

Hardware: any number of GPUs, timed for 64 GPUs of the H100's class, parameters split over all of
them; or one of the arguments. Weights, gradients and moments take 128 GB over all devices: more
than one GPU has. Hours at 40% of the peak, not measured:

    8gpu      710    parameters split over all
    64gpu     90     parameters split over all
    v5e-16    1800   16 chips, tensors over 4, parameters over all
    v5p-128   190    64 chips, parameters split over all
    v6e-256   24     256 chips, tensors over 4, parameters over all

Expected loss: not measured; it depends on the text.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.hardware import layout

HARDWARE = {  # the mesh, and micro-batches; the batch is the same on all, and so is the loss
    "8gpu": (dict(fsdp=8), 64),
    "64gpu": (dict(fsdp=64), 16),
    "v5e-16": (dict(fsdp=4, tensor=4), 256),
    "v5p-128": (dict(fsdp=64), 2),
    "v6e-256": (dict(fsdp=64, tensor=4), 8),
}


def get_config(hardware: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model = "llama3-8b"
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.01%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 4096
    c.train.steps = 40_000
    c.train.batch = 1024
    c.train.microbatches = 16
    c.train.remat = "full"
    c.loss.chunk = 8_192
    c.optim.lr = 3e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "5%"
    c.schedule.floor = 0.1
    c.mesh.data = 1
    c.mesh.fsdp = "auto"
    c.precision.compute = "bfloat16"
    c.checkpoint.every = 100
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    if hardware:
        mesh, c.train.microbatches = layout(HARDWARE, hardware, c, __file__)
        c.mesh.update(dict(data=1, fsdp=1, tensor=1) | mesh)
    return c
