"""Text from a trained run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxlm.generate.config import SampleConfig
from jaxlm.recipes import trained
from jaxlm.recipes.sample import Sampler


def generate(
    workdir: Path,
    settings: SampleConfig,
    *,
    seed: int,
    step: int | None = None,
    best: bool = False,
    cpu_devices: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """`samples`: for each prompt of `settings` its `prompt`, new `ids`, and their `text`.

    Raises:
      ConfigError: where a prompt and what follows it do not fit the model's position table.
    """
    opened = trained.open_run(workdir, step=step, best=best, cpu_devices=cpu_devices, say=say)
    with jax.set_mesh(opened.model.mesh):
        sampler = Sampler(settings, opened.model.blueprint, opened.tokenizer, seed, flag="--")
        ids = sampler.ids(opened.params, settings.prompts)
    samples = [
        {"prompt": prompt, "ids": row, "text": opened.tokenizer.decode(row)}
        for prompt, row in zip(settings.prompts, ids, strict=True)
    ]
    return {"step": opened.step, "samples": samples}
