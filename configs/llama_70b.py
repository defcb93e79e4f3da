"""Llama 3's 70B shape on 1.4 trillion tokens, 20 for each parameter.

    jaxlm train --config=llama_70b --workdir=runs/llama_70b
    jaxlm train --config=llama_70b:v5p-128 --workdir=runs/llama_70b

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it.
The peak learning rate is that of Llama 3 (arXiv:2407.21783, table 3).

Hardware: a multiple of 8 GPUs, timed for 512 GPUs of the H100's class; heads, hidden units and
vocabulary split over the 8 of a machine, parameters over all. Or one of the arguments. Weights,
gradients and moments take 1,129 GB over all devices: more than 8 GPUs or a v5e-16 have. Days at 40%
of the peak, not measured:

    512gpu    35    tensors over 8, parameters over all
    v5p-128   600   64 chips, tensors over 4, parameters over all: for shorter runs
    v6e-256   75    256 chips, tensors over 4, parameters over all

Expected loss: not measured; it depends on the text.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.hardware import layout

HARDWARE = {  # the mesh, and micro-batches; the batch is the same on all, and so is the loss
    "512gpu": (dict(fsdp=64, tensor=8), 32),
    "v5p-128": (dict(fsdp=16, tensor=4), 128),
    "v6e-256": (dict(fsdp=64, tensor=4), 32),
}


def get_config(hardware: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model = "llama3-70b"
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.01%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 4096
    c.train.steps = 168_000
    c.train.batch = 2048
    c.train.microbatches = 32
    c.train.remat = "full"
    c.loss.chunk = 4_096
    c.optim.lr = 1.5e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "2%"
    c.schedule.floor = 0.1
    c.mesh.data = 1
    c.mesh.fsdp = "auto"
    c.mesh.tensor = 8
    c.precision.compute = "bfloat16"
    c.checkpoint.every = 100
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    if hardware:
        mesh, c.train.microbatches = layout(HARDWARE, hardware, c, __file__)
        c.mesh.update(dict(data=1, fsdp=1, tensor=1) | mesh)
    return c
