"""Text from a trained run."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.generate.config import GenerateConfig
from jaxlm.recipes.sampler import OnText, Sampler
from jaxlm.recipes.use import chat, load
from jaxlm.recipes.use.load import Weights


def generate(
    workdir: Path,
    settings: GenerateConfig,
    *,
    step: int | None = None,
    best: bool = False,
    weights: Weights = "raw",
    cpu_devices: int | None = None,
    is_chat: bool = False,
    say: Callable[[str], None] = lambda _: None,
    tell: OnText | None = None,
) -> dict[str, Any]:
    """`samples`: for each prompt of `settings` its `prompt`, new `ids`, their `log_probabilities`, `text`, and `finish_reason`.

    `tell` is told of each text as it is made, see `Sampler.write`. `is_chat` makes each prompt what a user says, by the chat template of the imported model. Log-probabilities are those
    that the model itself gives, before temperature, penalties and cuts. The reason is one of `length`, `eos_token`,
    `stop_sequence`.

    Raises:
      ConfigError: where a prompt and what follows it do not fit the model's position table, or the model has not learnt to
        go on from any.
    """
    opened = load.load_run(
        workdir, step=step, best=best, weights=weights, cpu_devices=cpu_devices, say=say
    )
    if opened.run.objective.prompts == "none":
        raise ConfigError(
            "this model has not learnt to go on from a text",
            where=f"objective.name={opened.run.objective.name}",
            why="it predicts hidden tokens from those before and after them",
            fix=f"jaxlm eval --workdir={shlex.quote(str(workdir))}    # what such a model can do",
        )
    if is_chat and opened.run.architecture == "encoder-decoder":
        raise ConfigError(
            "a conversation with an encoder-decoder",
            where="--chat",
            why=f"{opened.run.model.family} writes a text of its own about what it has read, and goes on from none",
            fix="without --chat a prompt is read as it is",
        )
    tokenizer = chat.tokenizer_of(opened.tokenizer, workdir) if is_chat else opened.tokenizer
    with jax.set_mesh(opened.model.mesh):
        sampler = Sampler(
            settings,
            opened.model.blueprint,
            tokenizer,
            both_ways=opened.run.objective.prompts == "both ways",
            is_scored=True,
            flag="--",
        )
        written = sampler.write(opened.params, tell)
    return {"step": opened.step, "samples": [each.as_json() for each in written]}
