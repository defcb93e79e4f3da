"""The chat template of an imported run, and its tokenizer over conversations."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data.chat import ChatTemplate, Message
from jaxlm.data.hub_tokenizer import Imported
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.recipes.exchange.import_model import FOLDER

# Around a special token that a person spelt out, while a template works: characters that no text should use.
OPENS, CLOSES = "\U000f0000", "\U000f0001"
MARKED = re.compile(f"{OPENS}([^{CLOSES}]*){CLOSES}")


def template_of(workdir: Path) -> ChatTemplate:
    """The chat template that came with an imported model.

    Raises:
      ConfigError: where none did.
      DataError: where it is damaged.
    """
    settings = _settings(workdir / FOLDER / "tokenizer_config.json")
    source, where = template_source(workdir)
    if source is None:
        raise ConfigError(
            "this run has no chat template",
            where=str(workdir),
            why="it comes with an imported model: chat_template.jinja, tokenizer_config.json, or a GGUF's own",
            fix="without --chat a prompt is gone on from as it is",
        )
    tokens = {
        name: text
        for name, token in settings.items()
        if name.endswith("_token")
        and isinstance(text := token.get("content") if isinstance(token, dict) else token, str)
    }
    return ChatTemplate(source, tokens, str(where))


def template_source(workdir: Path) -> tuple[str | None, Path]:
    """The text of the template, None where none came with the model, and the file it is in. Raises DataError."""
    kept = workdir / FOLDER
    where = kept / "tokenizer_config.json"
    source = _settings(where).get("chat_template")
    if isinstance(source, list):  # several by name
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if (kept / "chat_template.jinja").is_file():
        where = kept / "chat_template.jinja"
        source = where.read_text(errors="replace")
    return source if isinstance(source, str) else None, where


class Chat(Tokenizer):
    """A tokenizer to which each text is what a user says: its ids are those of the conversation, up to the answer.

    Special tokens of the template are such, those that the text spells are text.
    """

    before: tuple[int, ...] = ()  # the template says how a conversation begins

    def __init__(self, own: Imported, template: ChatTemplate):
        super().__init__(own.table)
        self._own, self._template = own, template
        self.pad, self.eos, self.unk = own.pad, own.eos, own.unk
        self.after, self.ends = own.after, own.ends
        self.specials = own.specials
        names = sorted(own.specials, key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of a conversation that begins with each text."""
        return self.encode_chats([[{"role": "user", "content": text}] for text in texts])

    def encode_chats(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """The ids of each conversation. Raises DataError where the template refuses one."""
        marked = [[self._marked(message) for message in each] for each in conversations]
        return [self._ids(text) for text in self._template.render(marked)]

    def serialise(self) -> bytes:
        """That of the tokenizer itself."""
        return self._own.serialise()

    def _marked(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        plain = content.replace(OPENS, "").replace(CLOSES, "")
        return {**message, "content": self._spelt.sub(f"{OPENS}\\g<0>{CLOSES}", plain)}

    def _ids(self, text: str) -> list[int]:
        """Of a rendered text, in which only what is not marked may become special tokens."""
        ids: list[int] = []
        for number, part in enumerate(MARKED.split(text)):
            ids += self._own.encode(part) if number % 2 else self._own.encode_spelt(part)
        return ids


def tokenizer_of(own: Tokenizer, workdir: Path) -> Chat:
    """The tokenizer of a run over conversations. Raises what `template_of` does."""
    template = template_of(workdir)
    assert isinstance(own, Imported)  # as in every run that has a template
    return Chat(own, template)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise DataError(
            "tokenizer_config.json is not JSON",
            where=str(path),
            why=str(error),
            fix="import the model again into another --workdir",
        ) from error
    return found if isinstance(found, dict) else {}
