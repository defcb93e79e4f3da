"""Prefer chosen answers to rejected ones by SimPO, without a reference.

    jaxlm train --config=preference/simpo --init_from=MODEL --config.data.train=pairs.jsonl \
      --workdir=runs/simpo

MODEL is a run after supervised fine-tuning, a folder of transformers, a .gguf file or hf:ORG/NAME.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "pairs"
    c.data.sequence = 1024
    c.objective.name = "preference"
    c.objective.loss = "simpo"
    c.objective.beta = 2.0
    c.objective.gamma = 1.0
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
