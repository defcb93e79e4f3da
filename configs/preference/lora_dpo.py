"""Prefer chosen answers to rejected ones with a low-rank adapter.

    jaxlm train --config=preference/lora_dpo --init_from=MODEL --config.data.train=pairs.jsonl \
      --workdir=runs/lora_dpo

MODEL is a run after supervised fine-tuning, a folder of transformers, a .gguf file or hf:ORG/NAME;
the model without the adapter is the reference, scored once before the first step.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "pairs"
    c.data.sequence = 1024
    c.objective.name = "preference"
    c.objective.loss = "dpo"
    c.objective.nll = 0.2  # keeps chosen answers likely
    c.tune.name = "lora"
    c.tune.rank = 16
    c.tune.alpha = 32
    c.optim.lr = 1e-5
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "10%"
    c.precision.compute = "auto"
    c.train.steps = 500
    c.train.batch = 16
    c.train.epochs = 3.0  # a small set has fewer steps, and smaller batches
    c.train.stack = "auto"
    c.loss.chunk = 2048
    c.eval.every = "10%"
    c.checkpoint.every = "10%"
    c.sample.prompts = ()
    return c
