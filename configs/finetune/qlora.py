"""Fine-tune a large model on conversations with QLoRA: the base is stored in 4 bits a weight.

    jaxlm train --config=finetune/qlora --init_from=MODEL \
      --config.data.train=chat.jsonl --workdir=runs/qlora
    jaxlm merge --workdir=runs/qlora --out=runs/merged

As configs/finetune/lora.py, with the adapted weights in NormalFloat4 with double quantization
(Dettmers et al. 2023, arXiv:2305.14314). A base of 8 billion parameters takes 8 GB: 4 of codes, and
4 of the embedding and the head in float32, as the adapter is.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "chat"
    c.data.packing = "first_fit"  # conversations stay whole
    c.data.sequence = 1024
    c.tune.name = "qlora"
    c.tune.rank = 16
    c.tune.alpha = 32.0
    c.precision.compute = "bfloat16"
    c.optim.lr = 2e-4
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "3%"
    c.train.steps = 500
    c.train.batch = 16
    c.train.epochs = 3.0  # a small set has fewer steps, and smaller batches
    c.train.stack = "auto"
    c.train.remat = "full"
    c.eval.every = "10%"
    c.checkpoint.every = "10%"
    c.sample.prompts = ()
    return c
