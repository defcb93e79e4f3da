"""Fine-tune a model on conversations with LoRA: 1% of the weights, the base stays as it is.

    jaxlm train --config=finetune/lora --init_from=MODEL --config.data.train=chat.jsonl \
      --workdir=runs/lora
    jaxlm merge --workdir=runs/lora --out=runs/merged

As configs/finetune/sft.py, with ten times its learning rate: low-rank updates of all linear layers
learn best at about that (Schulman 2025, "LoRA Without Regret").
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "chat"
    c.data.packing = "first_fit"  # conversations stay whole
    c.data.sequence = 1024
    c.tune.name = "lora"
    c.tune.rank = 16
    c.tune.alpha = 32.0
    c.optim.lr = 2e-4
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "3%"
    c.precision.compute = "auto"
    c.train.steps = 500
    c.train.batch = 16
    c.train.epochs = 3.0  # a small set has fewer steps, and smaller batches
    c.train.stack = "auto"
    c.eval.every = "10%"
    c.checkpoint.every = "10%"
    c.sample.prompts = ()
    return c
