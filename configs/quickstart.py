"""A small Qwen3 learns Python from Python's own library, on two CPU cores.

    jaxlm train --config=quickstart --workdir=runs/quickstart
    jaxlm train --config=quickstart:long --workdir=runs/long

Hardware: two CPU cores, 2 GiB of memory. Minutes: about 2, and about 9 with `:long`, where the
cores have a unit for bfloat16; about 3 and 13 elsewhere. Expect fewer bits per byte than gzip -9,
and with `:long` fewer than bz2 -9. How it was tuned stands in scripts/LOG.md.

No validation file is trained on, but the split is by file and not by content: tables of character
encodings in it nearly repeat others that are trained on, which no compressor of the validation
files alone can know. `:long` needs about 1.07 bits per byte there, and 1.40 on files of Python's
own tests, which are in neither set. `pydoc_data` is left out of both: one generated file of prose,
which would be 60% of the validation bytes.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    c = config.new(Run)
    c.data.tokenizer = "sentencepiece:2048"
    c.data.sequence = 256
    c.model.family = "qwen3"  # a Llama with normed queries and keys
    c.model.max_positions = 256
    c.model.depth = 4
    c.model.width = 256
    c.model.heads = 4
    c.model.kv_heads = 2
    c.model.tied = True
    c.model.init = "gpt2"
    # bfloat16 takes two thirds of float32's time on a CPU with a unit for it.
    c.precision.compute = "auto"
    c.optim.name = "muon"
    c.optim.lr = 0.02
    c.optim.adam_lr = 5e-3
    c.optim.newton_schulz_dtype = "float32"  # not every CPU multiplies bfloat16
    c.schedule.name = "linear"
    c.schedule.warmup = "5%"
    c.schedule.floor = 0.02
    c.train.batch = 8
    c.train.stack = "auto"
    c.train.steps = 200
    c.eval.every = "25%"
    c.eval.batches = 16
    c.checkpoint.every = "25%"
    c.sample.every = "50%"
    c.sample.prompts = ("def ", "class Test", "import os\n")
    if arg == "long":
        c.train.steps = 1500
        c.schedule.warmup = "2%"
    elif arg:
        raise ValueError(f"quickstart.py takes no argument or `long`, not {arg!r}")
    return c
