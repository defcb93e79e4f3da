"""Mixtral 8x7B's shape on 252 billion tokens.

That is 20 tokens for each of the 12.9 billion parameters that a token meets.

    jaxlm train --config=mixtral_8x7b --workdir=runs/mixtral_8x7b
    jaxlm train --config=mixtral_8x7b:v5p-128 --workdir=runs/mixtral_8x7b

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it.
Weights and shape are those of arXiv:2401.04088, the balance loss pushes each layer as the published
configuration's does; how it was trained is not published, so batch and learning rate are those of
our Llama 8B.

Hardware: a multiple of 8 GPUs, timed for 64 GPUs of the H100's class, an expert on each of 8 and
parameters split over all; or one of the arguments. Weights, gradients and moments take 747 GB over
all devices: more than 8 GPUs or a v5e-16 have. Hours at 40% of the peak, not measured:

    64gpu     220   experts over 8, parameters over all
    v5p-128   470   64 chips, experts over 8, parameters over all
    v6e-256   59    256 chips, experts over 8, parameters over all

On TPUs no token is dropped. On GPUs an expert takes 1.25 times its even share of a row
(arXiv:2101.03961, section 2.2) and drops later tokens, and its layers compute 1.25 times the FLOPs
that they need: without a capacity XLA for GPUs would compute many times as many. The share of
choices dropped is `moe_dropped` in metrics.jsonl and is reported while training.

Expected loss: not measured; it depends on the text.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.hardware import layout

HARDWARE = {  # the mesh, and micro-batches; the batch is the same on all
    "64gpu": (dict(fsdp=8, expert=8), 16),
    "v5p-128": (dict(fsdp=8, expert=8), 16),
    "v6e-256": (dict(fsdp=32, expert=8), 4),
}


def get_config(hardware: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model = "mixtral-8x7b"
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.01%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 4096
    c.train.steps = 60_000
    c.train.batch = 1024
    c.train.microbatches = 16
    c.train.remat = "full"
    c.loss.chunk = 4_096
    c.optim.lr = 3e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "5%"
    c.schedule.floor = 0.1
    c.mesh.data = 1
    c.mesh.fsdp = "auto"
    c.mesh.expert = 8
    c.precision.compute = "bfloat16"
    c.checkpoint.every = 100
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    if hardware in ("", "64gpu"):
        c.model.capacity = 1.25
    if hardware:
        mesh, c.train.microbatches = layout(HARDWARE, hardware, c, __file__)
        c.mesh.update(dict(data=1, fsdp=1, tensor=1) | mesh)
    return c
