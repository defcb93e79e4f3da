"""Text from a trained run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.generate.config import SampleConfig
from jaxlm.recipes import trained
from jaxlm.recipes.sample import Sampler
from jaxlm.recipes.trained import Weights


def generate(
    workdir: Path,
    settings: SampleConfig,
    *,
    seed: int,
    step: int | None = None,
    best: bool = False,
    weights: Weights = "raw",
    cpu_devices: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """`samples`: for each prompt of `settings` its `prompt`, new `ids`, and their `text`.

    Raises:
      ConfigError: where a prompt and what follows it do not fit the model's position table, or the model has not learnt to
        go on from any.
    """
    opened = trained.open_run(
        workdir, step=step, best=best, weights=weights, cpu_devices=cpu_devices, say=say
    )
    if opened.run.objective.prompts == "none":
        raise ConfigError(
            "this model has not learnt to go on from a text",
            where=f"objective.name={opened.run.objective.name}",
            why="it predicts hidden tokens from those before and after them",
            fix="jaxlm train --config.objective.name=causal",
        )
    with jax.set_mesh(opened.model.mesh):
        sampler = Sampler(
            settings,
            opened.model.blueprint,
            opened.tokenizer,
            seed,
            both_ways=opened.run.objective.prompts == "both ways",
            flag="--",
        )
        ids = sampler.ids(opened.params, settings.prompts)
    samples = [
        {"prompt": prompt, "ids": row, "text": opened.tokenizer.decode(row)}
        for prompt, row in zip(settings.prompts, ids, strict=True)
    ]
    return {"step": opened.step, "samples": samples}
