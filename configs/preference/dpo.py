"""Prefer chosen answers to rejected ones, by DPO with a likelihood term.

    jaxlm train --config=preference/dpo --init_from=MODEL --config.data.train=pairs.jsonl \
      --workdir=runs/dpo

MODEL is a run after supervised fine-tuning, a folder of transformers, a .gguf file or hf:ORG/NAME;
its answers are the reference. A twentieth of the prompts is held out for validation unless
data.validation names others.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "pairs"
    c.data.sequence = 1024
    c.objective.name = "preference"
    c.objective.loss = "dpo"
    c.objective.beta = 0.1
    c.objective.nll = 0.2  # keeps chosen answers likely
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
