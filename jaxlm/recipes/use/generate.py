"""Generate text from a trained run."""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.callbacks import Log, OnText
from jaxlm.core.errors import ConfigError, not_installed
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate import batch
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.engine import Engine, check_supported, is_supported
from jaxlm.generate.grammar import GrammarCompiler, GrammarRefused, GrammarSource
from jaxlm.generate.sampler import Continuation, Sampler, check_positions, prompt_rows
from jaxlm.recipes.plan import oom
from jaxlm.recipes.use import adapter as adapters
from jaxlm.recipes.use import drafts, load
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
    is `length`, `eos_token` or `stop_sequence`; with a grammar, `eos_token` ends a whole text, and
    `error` one whose logits were not finite.

    Raises ConfigError if a prompt and its continuation do not fit the position table, the model
    cannot continue text, or a grammar is refused; InputMissing without the extra of grammars.

    Args:
      workdir: the run.
      settings: prompts and sampling settings.
      is_chat: wrap each prompt as a user turn with the model's chat template.
      adapter: a folder of PEFT or RUN[@STEP], whose adapter changes the model of the run.
      `say`: receives log lines.
      on_text: receives text as it is generated, see `Sampler.write`.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    check_grammar(settings)
    drafts.read_draft(settings.draft)
    reader = adapters.reader(adapter, say)
    opened = load.load_run(workdir, adapter=reader, say=say, **selection)
    load.check_generates(opened, is_chat=is_chat)
    template = template_of(workdir, adapters.template_folder(adapter), say) if is_chat else None
    samples = continue_prompts(opened, settings, template, on_text, say)
    return {"step": opened.step, "samples": [each.as_json() for each in samples]}


def check_grammar(settings: GenerateConfig) -> None:
    """Raise ConfigError if the grammar of the settings is refused, before a model is opened."""
    source = GrammarSource.of(settings)
    if source is None:
        return
    flag = f"--{settings.constraints[0]}"
    if importlib.util.find_spec("llguidance") is None:
        raise not_installed(flag, "llguidance", "serve", where=flag)
    with _refused_by(flag):
        source.check()


@contextlib.contextmanager
def _refused_by(flag: str) -> Iterator[None]:
    try:
        yield
    except GrammarRefused as error:
        raise ConfigError(
            "the grammar is refused",
            where=flag,
            why=str(error),
            fix="jaxlm docs serving    # what a grammar may have",
        ) from None


def continue_prompts(
    opened: LoadedRun,
    settings: GenerateConfig,
    template: ChatTemplate | None = None,
    on_text: OnText | None = None,
    say: Log = lambda _: None,
) -> list[Continuation]:
    """Return the continuation of each prompt, with log-probabilities.

    Args:
      opened: the run.
      settings: prompts and sampling settings.
      template: makes each prompt a user turn.
      on_text: receives text as it is generated, see `Sampler.write`.
      `say`: receives log lines.

    Raises:
      ConfigError: if a prompt and its continuation do not fit the position table, or the draft or
        the grammar of the settings is not one for this model.
      OutOfMemory: if the texts do not fit the memory.
    """
    tokenizer: Tokenizer = opened.tokenizer
    if template is not None:
        tokenizer = ChatTokenizer(tokenizer, template)
    with jax.set_mesh(opened.model.mesh):
        both_ways = opened.run.objective.prompts == "both ways"
        needs_engine = settings.constraints or settings.draft is not None
        is_engine = settings.beams == 1 and not both_ways and is_supported(opened.model.blueprint)
        if needs_engine or is_engine:
            return _continue_by_engine(opened, settings, tokenizer, on_text, say)
        sampler = Sampler(
            settings,
            opened.model.blueprint,
            tokenizer,
            both_ways=both_ways,
            is_scored=True,
            flag="--",
        )
        return sampler.write(opened.params, on_text)


def _continue_by_engine(
    opened: LoadedRun,
    settings: GenerateConfig,
    tokenizer: Tokenizer,
    on_text: OnText | None,
    say: Log,
) -> list[Continuation]:
    """Return the continuations, within the grammar or with the draft of the settings, if any.

    Args: as in `continue_prompts`; `tokenizer` may be that of a chat.
    """
    blueprint = opened.model.blueprint
    if settings.constraints:
        needs, what = "a grammar", "a grammar does not limit the texts of this model"
        fix = f"without --{settings.constraints[0]} a text is free"
    else:
        needs, what = "a draft", "a draft does not guess the tokens of this model"
        fix = "without --draft the text is the same"
    if opened.run.objective.prompts == "both ways":
        raise ConfigError(
            f"{needs} needs a model that reads from left to right",
            where=f"objective.name={opened.run.objective.name}",
            why="this model reads a prompt in both directions, as a whole",
            fix=fix,
        )
    try:
        check_supported(blueprint)
    except ConfigError as error:
        raise ConfigError(what, where=error.where, why=error.why, fix=fix) from None
    rows = prompt_rows(tokenizer, settings.prompts, is_paired=False)
    check_positions(rows, settings.max_tokens, blueprint.text_positions, "--")
    longest, positions = max(map(len, rows), default=0), opened.run.model.max_positions
    if longest + settings.max_tokens > positions:
        say(
            f"caution: {longest} prompt tokens and {settings.max_tokens} new ones exceed "
            f"model.max_positions = {positions}"
        )
    grammar, source = None, GrammarSource.of(settings)
    if source is not None:
        # The tokenizer of a chat encodes turns, and a grammar is of texts.
        compiler = GrammarCompiler(opened.tokenizer, blueprint.config.vocab)
        with compiler, _refused_by(f"--{settings.constraints[0]}"):
            grammar = compiler.compile(source, tokenizer.ends)
    sizes = batch.settings_of(settings, rows)
    explain = functools.partial(
        oom.texts_error, longest=max(map(len, rows)), has_draft=settings.draft is not None
    )
    planned = drafts.read_draft(settings.draft)
    with oom.explain_engine_oom(opened.run, blueprint.config, sizes, planned, explain):
        draft = drafts.open_draft(opened, settings.draft, sizes.context, say)
        engine = Engine(blueprint, opened.params, tokenizer, sizes, draft=draft)
        with contextlib.closing(engine):
            if draft is not None:
                engine.warm_up()
            samples = batch.continue_rows(engine, settings, rows, grammar, on_text)
    drafts.log_guesses(engine, say)
    return samples


def template_of(
    workdir: Path, adapter: Path | None = None, say: Log = lambda _: None
) -> ChatTemplate:
    """Return the chat template in the folder of an adapter, or else that of the run.

    A date in place of today's is logged. Raises ConfigError without a template, DataError.
    """
    for folder in (adapter, workdir / chat_templates.HUB):
        if folder is None:
            continue
        if (template := chat_templates.of_folder(folder)) is not None:
            if note := chat_templates.date_note(template):
                say(note)
            return template
    places = "chat_template.jinja, tokenizer_config.json or a GGUF"
    why = f"a template comes with training on conversations, or an imported model: in {places}"
    fix = "without --chat a prompt is continued as it is"
    raise ConfigError("this run has no chat template", where=str(workdir), why=why, fix=fix)
