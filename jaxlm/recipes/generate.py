"""Text from a trained run."""

from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
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
) -> dict[str, Any]:
    """`samples`: for each prompt of `settings` its `prompt`, new `ids`, and their `text`.

    Raises:
      ConfigError: where a prompt and what follows it do not fit the model's position table.
    """
    opened = trained.open_run(workdir, step=step, best=best, cpu_devices=cpu_devices)
    positions = opened.model.blueprint.config.positions
    longest = 1 + max(len(ids) for ids in opened.tokenizer.encode_many(settings.prompts))
    if positions is not None and longest + settings.max_tokens > positions:
        room = positions - longest
        raise ConfigError(
            f"{longest} prompt tokens and {settings.max_tokens} new ones are more than the model has positions",
            where="--prompt, --max_tokens",
            why=f"the model has {positions} positions",
            fix=f"--max_tokens={room}" if room > 0 else "a shorter --prompt",
        )
    with jax.set_mesh(opened.model.mesh):
        sampler = Sampler(settings, opened.model.blueprint, opened.tokenizer, seed)
        ids = sampler.ids(opened.params, settings.prompts)
    samples = [
        {"prompt": prompt, "ids": row, "text": opened.tokenizer.decode(row)}
        for prompt, row in zip(settings.prompts, ids, strict=True)
    ]
    return {"step": opened.step, "samples": samples}
