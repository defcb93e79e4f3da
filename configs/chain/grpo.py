"""Raise the share of right answers by GRPO, from prompts and a verifier alone: the last stage.

    jaxlm train --config=chain/grpo:runs/chain/data --init_from=runs/chain/dpo \
      --workdir=runs/chain/grpo

No answer is shown to the model: 64 prompts with 8 samples each, rewarded by 1 if the last number is
the sum. Samples are drawn at a temperature above 1, at which the answers are harder to keep apart:
at 1 the trained model then errs less. Twice the learning rate ends in rewards of 0.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(folder: str = "runs/chain/data") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.data.kind = "prompts"
    c.data.train = (f"{folder}/prompts.jsonl",)
    c.data.validation = (f"{folder}/held_out_prompts.jsonl",)
    c.data.sequence = 16
    c.objective.name = "policy"
    c.objective.algorithm = "grpo"
    c.rl.samples = 8
    c.rl.max_tokens = 5
    c.rl.temperature = 1.2
    c.reward.functions = ("number=1",)
    c.optim.lr = 5e-4
    c.optim.b2 = 0.99  # gradients of rewards are noisy
    c.optim.weight_decay = 0.0
    c.schedule.warmup = "10%"
    c.train.steps = 200
    c.train.batch = 512
    c.guard.sigmas = None  # gradients of rewards have no usual size
    c.eval.every = "100%"
    c.checkpoint.every = "100%"
    c.sample.prompts = ()
    return c
