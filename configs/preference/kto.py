"""Learn from answers that were judged one by one, good or bad, by KTO.

    jaxlm train --config=preference/kto --init_from=MODEL --config.data.train=pairs.jsonl \
      --workdir=runs/kto

A line has prompt, completion and label. MODEL is a run after supervised fine-tuning, a folder of
transformers, a .gguf file or hf:ORG/NAME; its answers are the reference.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "labeled"
    c.data.sequence = 1024
    c.objective.name = "preference"
    c.objective.loss = "kto"
    c.objective.beta = 0.1
    c.optim.lr = 1e-6
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
