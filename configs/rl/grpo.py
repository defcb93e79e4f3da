"""Raise the reward of sampled answers, by GRPO.

    jaxlm train --config=rl/grpo --init_from=MODEL --config.data.train=prompts.jsonl \
      --workdir=runs/grpo

MODEL is a run after supervised fine-tuning, a folder of transformers, a .gguf file or hf:ORG/NAME.
A line of prompts.jsonl is {"prompt": "34+58=", "answer": "92"}; the reward is 1 if the last number
of a sample is that of the answer. A twentieth of the prompts is held out unless data.validation
names others.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "prompts"
    c.data.sequence = 512
    c.objective.name = "policy"
    c.objective.algorithm = "grpo"
    c.rl.samples = 8
    c.rl.max_tokens = 256
    c.reward.functions = ("number=1",)
    c.optim.lr = 1e-6
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "2%"
    c.train.steps = 300
    c.train.batch = 64  # samples: 8 prompts
    c.train.stack = "auto"
    c.train.microbatches = 4  # those without a sample that has a gradient are not computed
    c.loss.chunk = 2048
    c.guard.sigmas = None  # gradients of rewards have no usual size
    c.eval.every = "10%"
    c.checkpoint.every = "10%"
    c.log.every = 1
    c.sample.prompts = ()
    return c
