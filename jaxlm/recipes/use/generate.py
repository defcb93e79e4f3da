"""Generate text from a trained run."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.callbacks import Log, OnText
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data.chat import ChatTemplate, Message, render_chat
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampler import Sampler
from jaxlm.recipes.exchange.import_model import FOLDER
from jaxlm.recipes.use import load

# Private-use characters that enclose a special token spelled out by a user, during rendering.
OPENS, CLOSES = "\U000f0000", "\U000f0001"
MARKED = re.compile(f"{OPENS}([^{CLOSES}]*){CLOSES}")


def generate(
    workdir: Path,
    settings: GenerateConfig,
    *,
    is_chat: bool = False,
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
      `say`: receives log lines.
      on_text: receives text as it is generated, see `Sampler.write`.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    opened = load.load_run(workdir, say=say, **selection)
    if opened.run.objective.prompts == "none":
        where = f"objective.name={opened.run.objective.name}"
        why = "it predicts masked tokens from those before and after them"
        fix = f"jaxlm eval --workdir={shlex.quote(str(workdir))}    # what such a model can do"
        raise ConfigError("this model cannot continue a text", where=where, why=why, fix=fix)
    if is_chat and opened.run.architecture == "encoder-decoder":
        what = "an encoder-decoder does not support --chat"
        fix = "without --chat a prompt is read as it is"
        why = f"{opened.run.model.family} does not continue its input"
        raise ConfigError(what, where="--chat", why=why, fix=fix)
    tokenizer = opened.tokenizer
    if is_chat:
        template = template_of(workdir)
        assert isinstance(tokenizer, ImportedTokenizer)  # every run that has a template is imported
        tokenizer = Chat(tokenizer, template)
    with jax.set_mesh(opened.model.mesh):
        sampler = Sampler(
            settings,
            opened.model.blueprint,
            tokenizer,
            both_ways=opened.run.objective.prompts == "both ways",
            is_scored=True,
            flag="--",
        )
        written = sampler.write(opened.params, on_text)
    return {"step": opened.step, "samples": [each.as_json() for each in written]}


def template_of(workdir: Path) -> ChatTemplate:
    """Return an imported model's chat template. Raises ConfigError without one, DataError."""
    source, where = template_source(workdir)
    if source is None:
        places = "chat_template.jinja, tokenizer_config.json or a GGUF"
        why = f"a template comes with an imported model: in {places}"
        fix = "without --chat a prompt is continued as it is"
        raise ConfigError("this run has no chat template", where=str(workdir), why=why, fix=fix)
    tokens = {}
    for name, token in _settings(workdir / FOLDER / "tokenizer_config.json").items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return ChatTemplate(source, tokens, str(where))


def template_source(workdir: Path) -> tuple[str | None, Path]:
    """Return the text of the template, or None, and its file. Raises DataError."""
    folder = workdir / FOLDER
    where = folder / "tokenizer_config.json"
    source = _settings(where).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        where = folder / "chat_template.jinja"
        source = where.read_text(errors="replace")
    return source if isinstance(source, str) else None, where


class Chat(Tokenizer):
    """A tokenizer that encodes each text as a user's turn, up to the start of the answer.

    Special tokens of the template become special ids; those spelled out in the text stay text.
    """

    before: tuple[int, ...] = ()  # the template begins the conversation

    def __init__(self, tokenizer: ImportedTokenizer, template: ChatTemplate):
        super().__init__(tokenizer.table)
        self._tokenizer, self._template = tokenizer, template
        self.pad, self.eos, self.unk = tokenizer.pad, tokenizer.eos, tokenizer.unk
        self.after, self.ends = tokenizer.after, tokenizer.ends
        self.specials = tokenizer.specials
        names = sorted(tokenizer.specials, key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of a conversation that begins with each text."""
        return self.encode_chats([[{"role": "user", "content": text}] for text in texts])

    def encode_chats(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the ids of each conversation. Raises DataError if the template refuses one."""
        marked = [[self._marked(message) for message in each] for each in conversations]
        return [self._ids(text) for text in render_chat(marked, self._template)]

    def serialize(self) -> bytes:
        """Return the bytes of the underlying tokenizer."""
        return self._tokenizer.serialize()

    def _marked(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        plain = content.replace(OPENS, "").replace(CLOSES, "")
        return {**message, "content": self._spelt.sub(f"{OPENS}\\g<0>{CLOSES}", plain)}

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a rendered text; only unmarked parts may become special tokens."""
        ids: list[int] = []
        tokenizer = self._tokenizer
        for number, part in enumerate(MARKED.split(text)):
            ids += tokenizer.encode(part) if number % 2 else tokenizer.encode_with_specials(part)
        return ids


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        what = "tokenizer_config.json is not JSON"
        fix = "import the model again into another --workdir"
        raise DataError(what, where=str(path), why=str(error), fix=fix) from error
    return settings if isinstance(settings, dict) else {}
