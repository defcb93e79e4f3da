"""Distill a draft of an eighth of the size of a run, for `jaxlm serve --draft`.

    jaxlm train --config=distill/draft:runs/a --workdir=runs/draft
    jaxlm serve --workdir=runs/a --draft=runs/draft

The argument is the finished run. The draft has its family, tokenizer, text, rows and optimizer, at
most half of its layers, and as many of its heads as leave it an eighth of the parameters. It learns
the run's distributions alone: labels have no part in the loss. Evaluations measure the acceptance:
`draft_greedy`, `draft_sampled` and the tokens of a pass (jaxlm/docs/serving.md).

Hardware: that of the run. Minutes: those of a forward pass of the run for each step, and a few. A
draft of an imported run names its text: --config.data.train=GLOB. What to expect of a small run
stands in scripts/LOG.md.
"""

from pathlib import Path

import ml_collections

from jaxlm.core.errors import ConfigError
from jaxlm.recipes.draft import draft_config


def get_config(run: str = "") -> ml_collections.ConfigDict:
    if not run:
        raise ConfigError(
            "the run that the draft learns from is not named",
            where="configs/distill/draft.py",
            why="its directory is the config's argument",
            fix="--config=distill/draft:runs/a",
        )
    return draft_config(Path(run))
