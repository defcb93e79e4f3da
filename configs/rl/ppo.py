"""Raise the reward of sampled answers, by PPO with a value head.

    jaxlm train --config=rl/ppo --init_from=MODEL --config.data.train=prompts.jsonl \
      --workdir=runs/ppo

MODEL and prompts.jsonl are as for rl/grpo. A value head predicts the reward of the rest of an
answer, and replaces the group of samples as the baseline: a prompt has one sample. Each rollout is
trained on four times. Exports leave the head out.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "prompts"
    c.data.sequence = 512
    c.objective.name = "ppo"
    c.rl.samples = 1
    c.rl.epochs = 4
    c.rl.max_tokens = 256
    c.reward.functions = ("number=1",)
    c.optim.lr = 1e-6
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "2%"
    c.train.steps = 300
    c.train.batch = 64  # prompts, with a sample each
    c.train.stack = "auto"
    c.loss.chunk = 2048
    c.guard.sigmas = None  # gradients of rewards have no usual size
    c.eval.every = "10%"
    c.checkpoint.every = "10%"
    c.log.every = 1
    c.sample.prompts = ()
    return c
