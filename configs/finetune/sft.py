"""Fine-tune all weights of a model on conversations.

    jaxlm train --config=finetune/sft --init_from=MODEL --config.data.train=chat.jsonl \
      --workdir=runs/sft

MODEL is a run, a folder of transformers, a .gguf file or hf:ORG/NAME; the model, its tokenizer and
its chat template come from it. The loss is that of the assistant's tokens. A twentieth of
the conversations is held out for validation unless data.validation names others.
"""

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config():
    c = config.new(Run)
    c.data.kind = "chat"
    c.data.packing = "first_fit"  # conversations stay whole
    c.data.sequence = 1024
    c.optim.lr = 2e-5
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
