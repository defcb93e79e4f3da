"""Generate text from a trained run."""

import shlex
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.callbacks import Log, OnText
from jaxlm.core.errors import ConfigError
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampler import Continuation, Sampler
from jaxlm.recipes.use import adapter as adapters
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import LoadedRun


def generate(
    workdir: Path,
    settings: GenerateConfig,
    *,
    is_chat: bool = False,
    adapter: str | None = None,
    say: Log = lambda _: None,
    on_text: OnText | None = None,
    **selection: Any,
) -> dict[str, Any]:
    """Return `samples`: prompt, new ids, log-probabilities, text and finish reason of each prompt.

    Log-probabilities are the model's own, before temperature, penalties and cuts. `finish_reason`
    is `length`, `eos_token` or `stop_sequence`. Raises ConfigError if a prompt and its continuation
    do not fit the position table, or the model cannot continue text.

    Args:
      workdir: the run.
      settings: prompts and sampling settings.
      is_chat: wrap each prompt as a user turn with the model's chat template.
      adapter: a folder of PEFT or RUN[@STEP], whose adapter changes the model of the run.
      `say`: receives log lines.
      on_text: receives text as it is generated, see `Sampler.write`.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    reader = adapters.reader(adapter, say)
    opened = load.load_run(workdir, adapter=reader, say=say, **selection)
    check_generates(opened, is_chat=is_chat)
    template = template_of(workdir, adapters.run_of(adapter), say) if is_chat else None
    samples = continue_prompts(opened, settings, template, on_text)
    return {"step": opened.step, "samples": [each.as_json() for each in samples]}


def check_generates(opened: LoadedRun, *, is_chat: bool) -> None:
    """Raise ConfigError if the model of a run cannot continue text, or answer as in a chat."""
    if opened.run.objective.prompts == "none":
        where = f"objective.name={opened.run.objective.name}"
        why = "it predicts masked tokens from those before and after them"
        if opened.run.objective.has_reward_head:
            why = "it scores answers"
        workdir = shlex.quote(str(opened.workdir))
        fix = f"jaxlm eval --workdir={workdir}    # what such a model can do"
        raise ConfigError("this model cannot continue a text", where=where, why=why, fix=fix)
    if is_chat and opened.run.architecture == "encoder-decoder":
        what = "an encoder-decoder does not support --chat"
        fix = "without --chat a prompt is read as it is"
        why = f"{opened.run.model.family} does not continue its input"
        raise ConfigError(what, where="--chat", why=why, fix=fix)


def continue_prompts(
    opened: LoadedRun,
    settings: GenerateConfig,
    template: ChatTemplate | None = None,
    on_text: OnText | None = None,
) -> list[Continuation]:
    """Return the continuation of each prompt, with log-probabilities.

    With a template, each prompt is a user turn. Raises ConfigError if a prompt and its continuation
    do not fit the position table.
    """
    tokenizer: Tokenizer = opened.tokenizer
    if template is not None:
        tokenizer = ChatTokenizer(tokenizer, template)
    with jax.set_mesh(opened.model.mesh):
        sampler = Sampler(
            settings,
            opened.model.blueprint,
            tokenizer,
            both_ways=opened.run.objective.prompts == "both ways",
            is_scored=True,
            flag="--",
        )
        return sampler.write(opened.params, on_text)


def template_of(
    workdir: Path, adapter: Path | None = None, say: Log = lambda _: None
) -> ChatTemplate:
    """Return the chat template of the run with the adapter, or else of the run.

    A date in place of today's is logged. Raises ConfigError without a template, DataError.
    """
    for folder in (adapter, workdir):
        if folder is None:
            continue
        if (template := chat_templates.of_folder(folder / chat_templates.HUB)) is not None:
            if date := chat_templates.date_of(template):
                say(f"the chat template's date is {date} on every day: answers do not depend on it")
            return template
    places = "chat_template.jinja, tokenizer_config.json or a GGUF"
    why = f"a template comes with training on conversations, or an imported model: in {places}"
    fix = "without --chat a prompt is continued as it is"
    raise ConfigError("this run has no chat template", where=str(workdir), why=why, fix=fix)
