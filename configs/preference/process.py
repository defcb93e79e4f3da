"""Train a process reward model: a score for each step of an answer.

    jaxlm train --config=preference/process --init_from=MODEL --config.data.train=steps.jsonl \
      --workdir=runs/process

MODEL is a run, a folder of transformers, a .gguf file or hf:ORG/NAME. `jaxlm eval` prints the
accuracy on the steps that were held out.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "steps"
    c.data.sequence = 1024
    c.objective.name = "process"
    c.optim.lr = 1e-5
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "10%"
    c.precision.compute = "auto"
    c.train.steps = 500
    c.train.batch = 16
    c.train.epochs = 3.0  # a small set has fewer steps, and smaller batches
    c.train.stack = "auto"
    c.eval.every = "10%"
    c.checkpoint.every = "10%"
    c.sample.prompts = ()
    return c
