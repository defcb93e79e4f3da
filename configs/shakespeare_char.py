"""nanoGPT's CPU setting: a small GPT-2 learns tiny Shakespeare, character by character.

    jaxlm train --config=shakespeare_char:input.txt --workdir=runs/shakespeare

The text is data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn; its last tenth
is held out. Sizes, optimizer, learning rate and schedule are those of nanoGPT's
config/train_shakespeare_char.py under the command that its README gives for a CPU. The initial
weights are not: a standard deviation of 0.02 is small for 128 wide, and ends at 1.886 nats, where
Xavier's ends at 1.800 (seed 0 both, see scripts/LOG.md). Products in bfloat16, which are faster on
cores with a unit for it, end at 1.799.

Hardware: one CPU core. Minutes: about 5. Expected validation loss: 1.80 nats; nanoGPT reports 1.88.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(path: str = "input.txt") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.data.train = (path,)
    c.data.validation = ("tail:10%",)
    c.data.tokenizer = "characters"
    c.data.sequence = 64
    c.model.family = "gpt2"
    c.model.depth = 4
    c.model.heads = 4
    c.model.width = 128
    c.model.max_positions = 64
    c.model.bias = False
    c.model.activation = "gelu"
    c.model.init = "xavier"
    c.precision.compute = "auto"
    c.train.steps = 2000
    c.train.batch = 12
    c.train.stack = "auto"
    c.optim.lr = 1e-3
    c.optim.b2 = 0.99
    c.optim.weight_decay = 0.1
    c.optim.clip_norm = 1.0
    c.schedule.name = "cosine"
    c.schedule.warmup = "5%"
    c.schedule.floor = 0.1
    c.eval.every = "12.5%"
    c.eval.batch = 128
    c.sample.prompts = ("ROMEO:", "\n")
    c.sample.max_tokens = 48  # prompt and sample share 64 positions
    return c
