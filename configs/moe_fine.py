"""DeepSeekMoE 16B's shape, 64 small experts and two shared ones, on 57 billion tokens.

That is 20 tokens for each parameter that a token meets.

    jaxlm train --config=moe_fine --workdir=runs/moe_fine
    jaxlm train --config=moe_fine:v5p-128 --workdir=runs/moe_fine

Put the text under data/web/ first, as parquet; a tokenizer of the published size is trained on it.
Shape, learning rate and the weight of the balance loss are those of arXiv:2401.06066, section 5.1;
of 16.4 billion parameters a token meets 2.8.

Hardware: a multiple of 8 GPUs, timed for 8 GPUs of the H100's class, 32 experts on each of 2; or
one of the arguments. Weights, gradients and moments take 262 GB over all devices: nearly all of a
v5e-16. Hours at 40% of the peak, not measured:

    8gpu      85    experts over 2, parameters over all
    v5p-128   23    64 chips, experts over 8, parameters over all
    v6e-256   3     256 chips, experts over 8, parameters over all

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
    "8gpu": (dict(fsdp=4, expert=2), 64),
    "v5p-128": (dict(fsdp=8, expert=8), 8),
    "v6e-256": (dict(fsdp=32, expert=8), 2),
}


def get_config(hardware: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.model = "deepseek-moe-16b"
    c.data.train = ("data/web/*.parquet",)
    c.data.validation = ("0.01%",)
    c.data.tokenizer = f"sentencepiece:{c.model.vocab}"
    c.data.sequence = 4096
    c.train.steps = 13_500
    c.train.batch = 1024
    c.train.microbatches = 64
    c.train.remat = "full"
    c.loss.chunk = 8_192
    c.optim.lr = 4.2e-4
    c.schedule.name = "cosine"
    c.schedule.warmup = "5%"
    c.schedule.floor = 0.1
    c.mesh.data = 1
    c.mesh.fsdp = "auto"
    c.mesh.expert = 2
    c.precision.compute = "bfloat16"
    c.checkpoint.every = 100
    c.eval.every = "1%"
    c.log.every = 10
    c.sample.prompts = ("The", "In 2016, ")
    if hardware in ("", "8gpu"):
        c.model.capacity = 1.25
    if hardware:
        mesh, c.train.microbatches = layout(HARDWARE, hardware, c, __file__)
        c.mesh.update(dict(data=1, fsdp=1, tensor=1) | mesh)
    return c
